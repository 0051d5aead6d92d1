"""TrainedRows: the rows of the tables of a trainer's model, between its calls.

Owns which run has them, and their division by calls: which rows an evaluation needs, and all of a table. Knows no
shard: after a fit rows are in its run's last checkpoint. Called by `parashard.api.trained_model`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from parashard.callbacks.base import Callback
from parashard.client.pulled_rows import TableSet
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.job.embeddings import checked_tables
from parashard.launch.run_folders import resumed_job
from parashard.launch.stored_rows import StoredTables
from parashard.models.base import HeldTable, LooksUp, Model
from parashard.models.looking_up import keys_of_all
from parashard.plan.embedding import EmbeddingTable, KeyedRows, Keys, unmixed
from parashard.plan.variables import Float32s


class TrainedRows:
    """Rows of tables: those of a run, or first values.

    Parameters
    ----------
    run_dir : Path, optional
        Of the last fit; None: there was none.
    """

    def __init__(self, tables: Mapping[str, EmbeddingTable], seed: int, run_dir: Path | None) -> None:
        self._tables = dict(tables)
        self._drawn = TableSet(tuple(self._tables.values()), seed)
        self._run_dir = run_dir

    def of(self, model: Model, batches: Iterable[Batch]) -> tuple[dict[str, Keys], dict[str, Float32s]]:
        """Return the keys of the rows that batches need, and these rows, by table."""
        keys = keys_of_all(model, batches, self._tables)
        if self._run_dir is None:
            return keys, {name: self._drawn.first_rows(name, of_table) for name, of_table in keys.items()}
        return keys, self._stored(self._run_dir).rows(keys)

    def whole(self, name: str) -> tuple[Keys, Float32s]:
        """Return a table's keys, as the model names them, ascending, and their rows.

        Raises ConfigurationError if there is no such table.
        """
        if name not in self._tables:
            known = ", ".join(self._tables) or "none"
            raise ConfigurationError(f"table {name!r} is none of the model's: {known}")
        held = self.held(name)
        keys = unmixed(held.keys)
        order = np.argsort(keys)
        return keys[order], held.rows[order]

    def held(self, name: str) -> HeldTable:
        """Return all rows of a table, and how others begin."""
        dimension = self._tables[name].row_elements
        keys, rows = np.empty(0, np.uint64), np.empty((0, dimension), np.float32)
        if self._run_dir is not None:
            keys, rows = self._stored(self._run_dir).whole(name)
        return HeldTable(keys, rows, lambda absent: self._drawn.first_rows(name, absent))

    def all_held(self) -> dict[str, HeldTable]:
        """Return the same of each table."""
        return {name: self.held(name) for name in self._tables}

    def initial(self) -> dict[str, KeyedRows]:
        """Return the rows that a further fit begins with, by table, with their optimizer's state."""
        if self._run_dir is None:
            return {}
        stored = self._stored(self._run_dir)
        rows = {name: stored.with_state(name) for name in self._tables}
        return {name: of_table for name, of_table in rows.items() if len(of_table.keys)}

    @staticmethod
    def _stored(run_dir: Path) -> StoredTables:
        return StoredTables(run_dir, resumed_job(run_dir, []).job)


def tables_of_model(model: Model) -> dict[str, EmbeddingTable]:
    """Return the tables that a script's model names, by name.

    Raises ConfigurationError if it looks rows up and names no tables, or the reverse, or what it names is none.
    """
    named = getattr(model, "tables", None)
    tables = checked_tables(() if named is None else named)
    if tables and not isinstance(model, LooksUp):
        raise ConfigurationError(
            f"the model has tables ({', '.join(tables)}) and no method keys(batch), which says whose rows a batch needs"
        )
    if named is None and isinstance(model, LooksUp):
        raise ConfigurationError(
            'the model has a method keys, and names no tables: tables = [ps.Table("users", 16)], an attribute of the '
            "model, says what keys are of"
        )
    return tables


def check_without_tables(model: Model, what: str) -> None:
    """Refuse a model with tables where their rows cannot be had."""
    tables = tables_of_model(model)
    if tables:
        raise ConfigurationError(f"{what}: the model looks up rows of tables ({', '.join(tables)}), which it has not")


def check_callbacks(callbacks: Iterable[Callback], tables: Mapping[str, EmbeddingTable]) -> None:
    """Refuse callbacks that keep the weights of an evaluation of a model with tables: rows are not kept with them."""
    for callback in callbacks:
        if tables and callback.uses_weights:
            raise ConfigurationError(
                f"{type(callback).__name__} keeps the weights of an evaluation, and rows of tables "
                f"({', '.join(tables)}) are not kept with them; the last checkpoint of a run has both: train without it"
            )
