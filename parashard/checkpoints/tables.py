"""Rows of embedding tables in a checkpoint: files of bounded size, in the order of mixed keys, verified when read.

A file has some rows of one table: keys (the mixed ones, so that those of a shard's buckets lie together), t, last use,
values and optimizer slots. Knows manifests and tables, and nothing of how rows lie in memory. Called by the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from parashard.checkpoints.catalogue import CheckpointId, place_of
from parashard.checkpoints.encoding import sha256_of
from parashard.checkpoints.manifest import ShardManifest, StoredFile
from parashard.checkpoints.tensors import FILE_BYTES, read_file
from parashard.errors import DamagedCheckpoint
from parashard.plan.embedding import BUCKET_BITS, BUCKETS, Keys
from parashard.plan.variables import Float32s
from parashard.store.arrays import from_bytes, to_bytes
from parashard.store.base import Store

PREFIX = "tables"
_SLOT = "slot:"


class StoredRows(NamedTuple):
    """Rows of a table.

    Parameters
    ----------
    keys : ndarray of uint64, shape (rows,)
        Mixed, ascending, each once.
    t, last_use : ndarray of uint32, shape (rows,)
        How often each was pushed, and the time of its last push.
    values : ndarray of float32, shape (rows, row_elements)
    slots : mapping of str to ndarray of float32, shape (rows, row_elements)
        Optimizer state by the slot's name.
    """

    keys: Keys
    t: NDArray[np.uint32]
    last_use: NDArray[np.uint32]
    values: Float32s
    slots: Mapping[str, Float32s]

    def taken(self, which: Any) -> Self:
        """Return some of the rows."""
        slots = {name: slot[which] for name, slot in self.slots.items()}
        return type(self)(self.keys[which], self.t[which], self.last_use[which], self.values[which], slots)


def write_tables(
    store: Store, folder: str, tables: Iterable[tuple[str, StoredRows]], *, file_bytes: int = FILE_BYTES
) -> list[StoredFile]:
    """Write tables as `FOLDER/tables-0.safetensors`, `tables-1...`, and return the files; a table may have several.

    Raises
    ------
    StoreFailed
        Some of the files may be left; without a manifest they are not a checkpoint.
    """
    written: list[StoredFile] = []
    for name, rows in tables:
        row_bytes = 16 + 4 * rows.values.shape[1] * (1 + len(rows.slots))
        each = max(1, file_bytes // row_bytes)
        for begin in range(0, len(rows.keys), each):
            content = to_bytes(_arrays(name, rows.taken(slice(begin, begin + each))))
            file = f"{PREFIX}-{len(written)}.safetensors"
            store.create(f"{folder}/{file}", content)
            written.append(StoredFile(name=file, size_bytes=len(content), sha256=sha256_of(content)))
    return written


def iterate_tables(store: Store, manifest: ShardManifest) -> Iterator[tuple[str, StoredRows]]:
    """Yield rows of a checkpoint's tables with the table's name, file by file, each once it is verified.

    Raises
    ------
    DamagedCheckpoint
        If a file is not what the manifest says, or the files have other rows than it counts.
    StoreFailed
        If the store gives an error.
    """
    folder = CheckpointId.of(manifest).folder
    due = dict(manifest.tables)
    last: dict[str, int] = {}
    for file in manifest.files:
        if not file.name.startswith(f"{PREFIX}-"):
            continue
        where = place_of(store, f"{folder}/{file.name}")
        name, rows = _parsed(read_file(store, folder, file), where)
        if due.get(name, 0) < len(rows.keys):
            raise DamagedCheckpoint(f"{where}: more rows of table {name!r} than the manifest says")
        if last.get(name, -1) >= int(rows.keys[0]):
            raise DamagedCheckpoint(f"{where}: keys of table {name!r} do not go on from the file before")
        due[name] -= len(rows.keys)
        last[name] = int(rows.keys[-1])
        yield name, rows
    for name, rows_due in due.items():
        if rows_due:
            raise DamagedCheckpoint(f"{place_of(store, folder)}: {rows_due} rows of table {name!r} are in no file")


def within(stored: Iterable[tuple[str, StoredRows]], buckets: tuple[int, int]) -> Iterator[tuple[str, StoredRows]]:
    """Yield of stored rows those that lie in a shard's half-open range of buckets."""
    for name, rows in stored:
        first, stop = (
            len(rows.keys)
            if bucket == BUCKETS
            else int(np.searchsorted(rows.keys, np.uint64(bucket << (64 - BUCKET_BITS))))
            for bucket in buckets
        )
        if first < stop:
            yield name, rows.taken(slice(first, stop))


def _arrays(name: str, rows: StoredRows) -> dict[str, NDArray[Any]]:
    arrays = {"keys": rows.keys, "t": rows.t, "last_use": rows.last_use, "values": rows.values}
    arrays |= {_SLOT + slot: values for slot, values in rows.slots.items()}
    return {f"{name}/{part}": np.ascontiguousarray(array) for part, array in arrays.items()}


def _parsed(content: bytes, where: str) -> tuple[str, StoredRows]:
    """Return the rows in a file, if they are such."""
    try:
        arrays: dict[str, NDArray[Any]] = dict(from_bytes(content))
        names = {name.rpartition("/")[0] for name in arrays}
        (name,) = names
        parts = {whole.rpartition("/")[2]: array for whole, array in arrays.items()}
        slots = {part.removeprefix(_SLOT): array for part, array in parts.items() if part.startswith(_SLOT)}
        rows = StoredRows(parts["keys"], parts["t"], parts["last_use"], parts["values"], slots)
    except (ValueError, KeyError) as error:
        raise DamagedCheckpoint(f"{where}: not rows of one table: {error}") from None
    one, of_values = rows.keys.shape[:1], (*rows.keys.shape[:1], *rows.values.shape[1:])
    due: list[tuple[NDArray[Any], type, tuple[int, ...]]] = [(rows.keys, np.uint64, one)]
    due += [(counts, np.uint32, one) for counts in (rows.t, rows.last_use)]
    due += [(values, np.float32, of_values) for values in (rows.values, *rows.slots.values())]
    right = all(array.dtype == dtype and array.shape == shape for array, dtype, shape in due)
    right = right and rows.values.ndim == 2 and rows.keys.size > 0 and bool((rows.keys[:-1] < rows.keys[1:]).all())
    if not right:
        raise DamagedCheckpoint(
            f"{where}: the arrays of table {name!r} do not fit each other, or keys are not ascending"
        )
    return name, rows
