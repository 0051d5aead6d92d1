"""Rows of embedding tables in checkpoints: files of bounded size, in the order of mixed keys, verified when read.

A file has some rows of one table: keys (mixed, so that those of a shard's buckets are contiguous), t, last use, values
and optimizer slots; and keys whose rows were removed. A manifest names all files of its rows, including those of
earlier checkpoints (P33); the latest file with a key counts. So a checkpoint needs no other manifest, and an increment
contains only changes. A job's initial rows are beside its other initial values, in files of the same form. Knows
manifests and tables, but not the layout of rows in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from parashard.checkpoints.catalogue import Catalogue, CheckpointId, initial_folder, place_of
from parashard.checkpoints.encoding import sha256_of
from parashard.checkpoints.manifest import JobManifest, ShardManifest, TableFile
from parashard.checkpoints.tensors import read_file
from parashard.data.hashing import keys_of_bytes
from parashard.errors import DamagedCheckpoint
from parashard.plan.embedding import (
    BFLOAT16,
    BUCKET_BITS,
    BUCKETS,
    KEY_BYTES,
    KeyedRows,
    Keys,
    buckets_of,
    floats_of,
    found_among,
)
from parashard.plan.partition import ELEMENT_BYTES
from parashard.plan.row_rules import evicted
from parashard.plan.variables import Float32s
from parashard.store import Store
from parashard.store.arrays import from_bytes, to_bytes

PREFIX = "tables"
FILE_BYTES = 64 << 20
"""Approximate size of a file of rows, which is assembled in memory."""
_SLOT = "slot:"
_NO_KEYS: Keys = np.empty(0, np.uint64)


class StoredRows(NamedTuple):
    """Rows of a table."""

    keys: Keys  # shape (rows,); mixed, ascending, each once
    t: NDArray[np.uint32]  # how often each was pushed
    last_use: NDArray[np.uint32]  # the time of its last push
    values: NDArray[Any]  # float32, float16 or BFLOAT16, shape (rows, row_elements)
    slots: Mapping[str, Float32s]  # optimizer state, shape (rows, row_elements) or (rows, 1)

    def taken(self, which: Any) -> Self:
        """Return some of the rows."""
        slots = {name: slot[which] for name, slot in self.slots.items()}
        return type(self)(self.keys[which], self.t[which], self.last_use[which], self.values[which], slots)


class TableChange(NamedTuple):
    """Content of a file: a table's added or changed rows, and its removed keys, ascending."""

    table: str
    rows: StoredRows
    gone: Keys


class TableWriter:
    """Writes the files of a checkpoint, `FOLDER/tables-0.safetensors`, `tables-1...`, by default in its own folder."""

    def __init__(self, store: Store, id_: CheckpointId, folder: str = "") -> None:
        self._store = store
        self._folder = folder or id_.folder
        self._id = id_
        self.files: list[TableFile] = []

    def write(self, change: TableChange) -> None:
        """Write a file; call it in the order of a table's keys."""
        rows, gone = change.rows, change.gone
        content = as_bytes(change)
        name = f"{PREFIX}-{len(self.files)}.safetensors"
        self._store.create(f"{self._folder}/{name}", content)
        ends = buckets_of(np.concatenate([part[[0, -1]] for part in (rows.keys, gone) if len(part)]))
        self.files.append(
            TableFile(
                name=name,
                size_bytes=len(content),
                sha256=sha256_of(content),
                incarnation=self._id.incarnation,
                number=self._id.number,
                table=change.table,
                rows=len(rows.keys),
                gone=len(gone),
                buckets=(int(ends.min()), int(ends.max()) + 1),
            )
        )


def iterate_rows(
    store: Store, manifest: ShardManifest, buckets: tuple[int, int] = (0, BUCKETS), *, ended_too: bool = False
) -> Iterator[tuple[str, StoredRows]]:
    """Yield a checkpoint's rows with their table's name, file by file, each file verified first; each key once.

    Candidates, keys that are counted and have no row yet, come as rows without elements, under the name of
    `candidates_of`.

    Each table's files are read from the newest checkpoint to the oldest, and the newest version of a key counts. In
    memory are one file, and the keys of the table's files of newer checkpoints.

    Files without rows in `buckets` (half open) are not read. `ended_too`: include rows that the table's rules have
    evicted and the shard had not freed yet. Raises `DamagedCheckpoint` if a file differs from the manifest, or the
    number of rows from the manifest's count.
    """
    found = dict.fromkeys(dict(manifest.tables), 0)
    rules = {} if ended_too else {rule.table: rule.rules for rule in manifest.table_rules}
    for table in dict.fromkeys(file.table for file in manifest.table_files):
        layers = _layers(manifest, table)
        newer = _NO_KEYS  # of the layers before, ascending
        for depth, layer in enumerate(layers, 1):
            own: list[Keys] = []
            for file in layer:
                if file.buckets[1] <= buckets[0] or file.buckets[0] >= buckets[1]:
                    continue
                change = read_change(store, manifest, file)
                if depth < len(layers):
                    own += [change.rows.keys, change.gone]
                rows = change.rows.taken(rows_within(change.rows.keys, buckets))
                if len(newer):
                    rows = rows.taken(~found_among(rows.keys, newer)[1])
                if len(rows.keys):
                    found[table] = found.get(table, 0) + len(rows.keys)
                    if table in rules:
                        rows = rows.taken(
                            ~evicted(rules[table], manifest.version, rows.last_use, floats_of(rows.values))
                        )
                    if len(rows.keys):
                        yield table, rows
            newer = np.unique(np.concatenate([newer, *own]))
    if buckets == (0, BUCKETS) and found != dict(manifest.tables):
        where = place_of(store, CheckpointId.of(manifest).folder)
        raise DamagedCheckpoint(f"{where}: the files have {found} rows, the manifest says {dict(manifest.tables)}")


def read_change(store: Store, manifest: ShardManifest, file: TableFile) -> TableChange:
    """Return the verified content of a file; raises as `iterate_rows`."""
    folder = CheckpointId(manifest.plan_version, manifest.shard, file.incarnation, file.number).folder
    where = place_of(store, f"{folder}/{file.name}")
    change = parsed(read_file(store, folder, file), where)
    if (change.table, len(change.rows.keys), len(change.gone)) != (file.table, file.rows, file.gone):
        raise DamagedCheckpoint(
            f"{where}: {len(change.rows.keys)} rows of table {change.table!r}, where the manifest says {file.rows} of "
            f"{file.table!r}"
        )
    return change


def iterate_job_rows(catalogue: Catalogue, job: JobManifest) -> Iterator[tuple[str, StoredRows]]:
    """Yield the rows of a drained checkpoint, shard by shard, as `iterate_rows`."""
    for shard in range(len(job.parts)):
        yield from iterate_rows(catalogue.store, catalogue.part_manifest(job, shard))


def write_initial_rows(
    store: Store, job_digest: str, incarnation: int, rows: Mapping[str, KeyedRows]
) -> tuple[TableFile, ...]:
    """Write a job's initial rows, and return the files."""
    writer = TableWriter(store, CheckpointId(0, 0, incarnation, 1), initial_folder(job_digest, incarnation))
    for table, (keys, values, t, slots) in sorted(rows.items()):
        of_row = values.shape[1] + sum(part.shape[1] for part in slots.values())
        at_once = max(1, FILE_BYTES // (KEY_BYTES + ELEMENT_BYTES * (2 + of_row)))
        for begin in range(0, len(keys), at_once):
            some = slice(begin, begin + at_once)
            never = np.zeros(len(keys[some]), np.uint32)
            kept = {slot: part[some] for slot, part in slots.items()}
            stored = StoredRows(keys[some], never if t is None else t[some], never, values[some], kept)
            writer.write(TableChange(table, stored, _NO_KEYS))
    return tuple(writer.files)


def iterate_initial_rows(
    store: Store, job_digest: str, buckets: tuple[int, int] = (0, BUCKETS)
) -> Iterator[tuple[str, KeyedRows]]:
    """Yield a job's initial rows in a range of buckets, with their table's name, file by file."""
    manifest = Catalogue(store).initial_manifest(job_digest)
    if manifest is None:
        return
    folder = initial_folder(job_digest, manifest.incarnation)
    for file in manifest.table_files:
        if file.buckets[1] > buckets[0] and file.buckets[0] < buckets[1]:
            rows = parsed(read_file(store, folder, file), place_of(store, f"{folder}/{file.name}")).rows
            rows = rows.taken(rows_within(rows.keys, buckets))
            yield file.table, KeyedRows(rows.keys, rows.values, rows.t, rows.slots)


def _layers(manifest: ShardManifest, table: str) -> list[list[TableFile]]:
    """Return a table's files by the checkpoint that wrote them, the newest first."""
    files = [file for file in manifest.table_files if file.table == table]
    by_checkpoint = itertools.groupby(files, key=lambda file: (file.incarnation, file.number))
    return [list(layer) for _, layer in by_checkpoint][::-1]


def rows_within(keys: Keys, buckets: tuple[int, int]) -> slice:
    """Return the run of ascending keys that lie in a range of buckets."""
    first, stop = (
        len(keys) if bucket == BUCKETS else int(np.searchsorted(keys, np.uint64(bucket << (64 - BUCKET_BITS))))
        for bucket in buckets
    )
    return slice(first, stop)


def as_bytes(change: TableChange) -> memoryview:
    """Return the content of a file."""
    rows = change.rows
    arrays = {"keys": rows.keys, "t": rows.t, "last_use": rows.last_use, "values": rows.values, "gone": change.gone}
    arrays |= {_SLOT + slot: values for slot, values in rows.slots.items()}
    return to_bytes({f"{change.table}/{part}": np.ascontiguousarray(array) for part, array in arrays.items()})


def parsed(content: bytes, where: str) -> TableChange:
    """Decode the content of a file; DamagedCheckpoint if it is not rows of one table."""
    try:
        arrays: dict[str, NDArray[Any]] = dict(from_bytes(content))
        names = {name.rpartition("/")[0] for name in arrays}
        (name,) = names
        parts = {whole.rpartition("/")[2]: array for whole, array in arrays.items()}
        slots = {part.removeprefix(_SLOT): array for part, array in parts.items() if part.startswith(_SLOT)}
        rows = StoredRows(parts["keys"], parts["t"], parts["last_use"], parts["values"], slots)
        gone = parts["gone"]
    except (ValueError, KeyError) as error:
        raise DamagedCheckpoint(f"{where}: not rows of one table: {error}") from None
    one = rows.keys.shape[:1]
    due: list[tuple[NDArray[Any], Any, tuple[int, ...]]] = [(rows.keys, np.uint64, one)]
    due += [(counts, np.uint32, one) for counts in (rows.t, rows.last_use)]
    of_values = rows.values.dtype if rows.values.dtype in (np.float16, BFLOAT16) else np.dtype(np.float32)
    due.append((rows.values, of_values, (*one, *rows.values.shape[1:2])))
    due += [(slot, np.float32, (*one, *slot.shape[1:2])) for slot in rows.slots.values()]
    right = all(array.dtype == dtype and array.shape == shape for array, dtype, shape in due)
    right = right and gone.dtype == np.uint64 and gone.ndim == 1
    right = right and all(values.ndim == 2 for values in (rows.values, *rows.slots.values()))
    right = right and all(slot.shape[1] in {1, rows.values.shape[1]} for slot in rows.slots.values())
    right = right and all(bool((keys[:-1] < keys[1:]).all()) for keys in (rows.keys, gone))
    if not right:
        raise DamagedCheckpoint(
            f"{where}: the arrays of table {name!r} do not fit each other, or keys are not ascending"
        )
    return TableChange(name, rows, gone)


_SEEDS = (0, 0x9E3779B97F4A7C15)


class RowsDigest:
    """Digest of a table's rows in any order: keys, t, last use, values and slots, each key once."""

    def __init__(self) -> None:
        self._sums = [np.uint64(0) for _ in _SEEDS]

    def add(self, rows: StoredRows) -> None:
        """Add rows."""
        slots = [rows.slots[name] for name in sorted(rows.slots)]
        parts: list[Any] = [rows.keys, rows.t, rows.last_use, rows.values, *slots]
        content = np.concatenate([_bytes(part, len(rows.keys)) for part in parts], axis=1)
        offsets = np.arange(len(content) + 1) * content.shape[1]
        with np.errstate(over="ignore"):
            for at, seed in enumerate(_SEEDS):
                self._sums[at] += keys_of_bytes(content.reshape(-1), offsets, seed).sum(dtype=np.uint64)

    def hex(self) -> str:
        """Return the digest as 32 hex digits."""
        return "".join(f"{int(one):016x}" for one in self._sums)


def _bytes(part: Any, rows: int) -> Any:
    little = np.ascontiguousarray(part, part.dtype.newbyteorder("<"))
    return little.view(np.uint8).reshape(rows, -1)
