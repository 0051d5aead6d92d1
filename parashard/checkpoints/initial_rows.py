"""Rows of embedding tables that a job begins with, such as those of an earlier run, in the store of its run.

They lie beside the job's other initial values, in files like those of a checkpoint; the manifest of initial values
names them. Knows no shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from parashard.checkpoints.catalogue import Catalogue, CheckpointId, initial_folder, place_of
from parashard.checkpoints.encoding import sha256_of
from parashard.checkpoints.manifest import InitialManifest, TableFile
from parashard.checkpoints.row_files import FILE_BYTES, StoredRows, TableChange, TableWriter, parsed, rows_within
from parashard.checkpoints.tensors import read_file
from parashard.plan.embedding import BUCKETS, KEY_BYTES, KeyedRows, rows_sha256
from parashard.plan.partition import ELEMENT_BYTES
from parashard.plan.variables import NO_SLOTS, Float32s, Slots, slots_sha256, values_sha256
from parashard.store.base import Store

_NO_KEYS = np.empty(0, np.uint64)


def initial_sha256(arrays: Mapping[str, Float32s], rows: Mapping[str, KeyedRows], slots: Slots = NO_SLOTS) -> str:
    """Return SHA-256 (hex) of what a job begins with: of its variables, with rows and slots where there are some."""
    sha256 = values_sha256(arrays)
    if rows:
        sha256 = sha256_of(f"{sha256} {rows_sha256(rows)}".encode())
    return sha256_of(f"{sha256} {slots_sha256(slots)}".encode()) if slots else sha256


def write_initial_rows(
    store: Store, job_digest: str, incarnation: int, rows: Mapping[str, KeyedRows]
) -> tuple[TableFile, ...]:
    """Write the rows that a job begins with, and return the files."""
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
    """Yield the rows that a job begins with in a range of buckets, with their table's name, file by file."""
    manifest = Catalogue(store).initial_manifest(job_digest)
    for file in () if manifest is None else manifest.table_files:
        if file.buckets[1] > buckets[0] and file.buckets[0] < buckets[1]:
            rows = _read(store, manifest, file).rows
            rows = rows.taken(rows_within(rows.keys, buckets))
            yield file.table, KeyedRows(rows.keys, rows.values, rows.t, rows.slots)


def _read(store: Store, manifest: InitialManifest | None, file: TableFile) -> TableChange:
    assert manifest is not None, "it named the file"
    folder = initial_folder(manifest.job_digest, manifest.incarnation)
    return parsed(read_file(store, folder, file), place_of(store, f"{folder}/{file.name}"))
