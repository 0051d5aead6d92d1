"""Read the rows of embedding tables from a run's last checkpoint, without its processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parashard.checkpoints.catalogue import Catalogue
from parashard.checkpoints.manifest import JobManifest
from parashard.checkpoints.row_files import StoredRows, iterate_job_rows
from parashard.client.pulled_rows import TableSet
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.job.embeddings import tables_of
from parashard.job.schema import Job
from parashard.models.base import Model
from parashard.models.looking_up import check_looks_up, keys_of_all, placed
from parashard.plan.embedding import KeyedRows, Keys, candidates_of, floats_of, found_among, unmixed
from parashard.plan.variables import Float32s
from parashard.process.run_files import CHECKPOINTS
from parashard.store import open_store


class StoredTables:
    """Embedding tables in a run's last drained checkpoint."""

    def __init__(self, run_dir: Path, job: Job) -> None:
        self._tables = tables_of(job)
        self._seed = job.job.seed
        self._catalogue = Catalogue(open_store(job.checkpoint.url or str(run_dir / CHECKPOINTS)))
        newest = self._catalogue.newest_job_manifest()
        if newest is None:
            raise ConfigurationError(f"{run_dir}: has no drained checkpoint, which the end of a run writes")
        self._newest = newest

    def rows(self, keys: Mapping[str, Keys]) -> dict[str, Float32s]:
        """Return rows by table for mixed, ascending keys; a key without a stored row gets its initial one."""
        drawn = TableSet(self._tables, self._seed)
        rows = {name: drawn.first_rows(name, of_table) for name, of_table in keys.items()}
        _fill(rows, keys, iterate_job_rows(self._catalogue, self._newest))
        return rows

    def whole(self, table: str, *, state: bool) -> KeyedRows:
        """Return all rows of a table, their keys ascending; with `state` also the optimizer's of each."""
        found = [rows for name, rows in iterate_job_rows(self._catalogue, self._newest) if name == table]
        if not found:
            dimension = next(one.row_elements for one in self._tables if one.name == table)
            return KeyedRows(np.empty(0, np.uint64), np.empty((0, dimension), np.float32))
        keys = np.concatenate([rows.keys for rows in found])
        order = np.argsort(keys)
        values = floats_of(np.concatenate([rows.values for rows in found])[order])
        if not state:
            return KeyedRows(keys[order], values)
        return KeyedRows(
            keys[order],
            values,
            np.concatenate([rows.t for rows in found])[order],
            {slot: np.concatenate([rows.slots[slot] for rows in found])[order] for slot in found[0].slots},
        )


def with_rows(
    run_dir: Path, job: Job, model: Model, variables: Mapping[str, Float32s], batches: Iterable[Batch]
) -> tuple[dict[str, Float32s], Sequence[Batch]]:
    """Return the variables and the rows that batches need, and the batches with their keys' places among the rows."""
    by_name = {table.name: table for table in tables_of(job)}
    check_looks_up(model, by_name)
    seen = list(batches)
    keys = keys_of_all(model, seen, by_name)
    rows = StoredTables(run_dir, job).rows(keys)
    return {**variables, **rows}, [placed(model, batch, by_name, keys) for batch in seen]


def pieces_of_table(catalogue: Catalogue, job: JobManifest, table: str) -> Iterator[tuple[Keys, NDArray[Any]]]:
    """Yield a table's keys and rows as `whole_table`, in pieces, each key once, in no particular order."""
    found = False
    for name, rows in iterate_job_rows(catalogue, job):
        if name == table and rows.values.shape[1]:  # else keys that are counted and have no row
            found = True
            yield unmixed(rows.keys), rows.values
    if not found:
        parts_of_all = (catalogue.part_manifest(job, shard) for shard in range(len(job.parts)))
        stored = {name for part in parts_of_all for name, _ in part.tables}
        known = sorted(stored - {candidates_of(name) for name in stored})
        raise ConfigurationError(
            f"--table {table}: j{job.number} has no row of it; tables with rows: {', '.join(known) or 'none'}"
        )


def whole_table(catalogue: Catalogue, job: JobManifest, table: str) -> tuple[Keys, NDArray[Any]]:
    """Return a table's keys, as the model named them, ascending, and their rows; ConfigurationError without a row."""
    parts = list(pieces_of_table(catalogue, job, table))
    keys = np.concatenate([keys for keys, _ in parts])
    order = np.argsort(keys)
    return keys[order], np.concatenate([rows for _, rows in parts])[order]


def _fill(rows: Mapping[str, Float32s], keys: Mapping[str, Keys], stored: Iterable[tuple[str, StoredRows]]) -> None:
    """Replace initial rows by stored ones."""
    for name, found in stored:
        wanted = keys.get(name)
        if wanted is None:
            continue
        places, there = found_among(found.keys, wanted)
        rows[name][places[there]] = floats_of(found.values[there])
