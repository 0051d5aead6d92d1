"""Table: an embedding table as a script declares it, with the settings that `[tables.NAME]` of a job file has.

Owns the check of one table by itself, and of the tables that a model names. Knows no row. Called by scripts, by models
that look rows up, and by `parashard.api`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from parashard.errors import ConfigurationError, shortened
from parashard.frozen_model import FrozenModel
from parashard.job.embeddings import TableSettings, embedding_of
from parashard.job.validation import validated_words
from parashard.plan.embedding import Combiner, EmbeddingTable
from parashard.plan.row_rules import RowRules


class Table:
    """An embedding table: rows by 64-bit key, which come to be when they are first pushed.

    Parameters
    ----------
    name : str
        Unique among a model's tables and variables.
    dimension : int
        Numbers of a row.
    **settings
        The other keys of `[tables.NAME]` in a job file, all of which are in `docs/job-file.md`. What moves rows:
        `optimizer=ps.Adagrad(0.05)`. First values: `initializer="normal"` and `scale=0.01`. Fewer bytes of rows, and of
        their gradients: `dtype="float16"`, `encoding="int8"`. When a key gets a row, and loses it: `admit_after=3`,
        `admit_probability=0.1`, `evict_unused_steps=100_000`, `evict_norm_below=1e-3`, `evict_above_rows=1 << 20`.
        Bounds of a step and a shard: `keys_per_step_max=1 << 16`, `rows_max=1 << 26`.

    Raises
    ------
    ConfigurationError
        If there is no such setting, or a value is not allowed.

    Examples
    --------
    >>> Table("users", 16, scale=0.01).dimension
    16
    """

    def __init__(self, name: str, dimension: int, **settings: Any) -> None:
        unknown = sorted(settings.keys() - TableSettings.model_fields.keys())
        if unknown:
            known = ", ".join(["name", *TableSettings.model_fields])
            raise ConfigurationError(f"ps.Table({name!r}) has no {unknown[0]}=; allowed: {known}")
        if isinstance(settings.get("optimizer"), str):
            raise ConfigurationError(
                f"ps.Table({name!r}): optimizer: found {shortened(repr(settings['optimizer']))}; allowed: an optimizer "
                "such as ps.Adagrad(0.05)"
            )
        values = {"dimension": dimension, **settings}
        self.name = name
        self._settings: TableSettings = validated_words(TableSettings, _plain(values), f"ps.Table({name!r}): ")
        self.embedding: EmbeddingTable = embedding_of(name, self._settings)

    @property
    def dimension(self) -> int:
        """Numbers of a row."""
        return self._settings.dimension

    @property
    def combiner(self) -> Combiner | None:
        """How rows of several keys become one vector; None: it is not said."""
        return self._settings.combiner

    def plain(self) -> dict[str, Any]:
        """Return the settings as `[tables.NAME]` has them, without those that are unset."""
        plain: dict[str, Any] = _plain(self._settings)
        return plain

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and (self.name, self._settings) == (other.name, other._settings)

    def __hash__(self) -> int:
        return hash((self.name, self.dimension))

    def __repr__(self) -> str:
        return f"ps.Table({self.name!r}, {self.dimension})"


def checked_tables(tables: object) -> dict[str, Table]:
    """Return tables by their names, in the order of these.

    Raises
    ------
    ConfigurationError
        If they are no sequence of tables, or two of one name differ.
    """
    if isinstance(tables, str) or not isinstance(tables, Sequence):
        raise ConfigurationError(f'tables is a list such as [ps.Table("users", 16)], found {tables!r}')
    found: dict[str, Table] = {}
    for table in tables:
        if not isinstance(table, Table):
            raise ConfigurationError(
                f'tables has {shortened(repr(table))}; allowed: tables such as ps.Table("users", 16)'
            )
        if found.setdefault(table.name, table) != table:
            raise ConfigurationError(
                f"two tables are named {table.name!r}, and their settings differ: make one, and share it"
            )
    return dict(sorted(found.items()))


def dimension_of(table: Table | EmbeddingTable) -> int:
    """Return how many numbers a row has."""
    return table.dimension if isinstance(table, Table) else table.row_elements


def declared_again(table: EmbeddingTable) -> Table:
    """Return the declaration of a table that a job file declares."""
    rules = {field.name: getattr(table.rules, field.name) for field in fields(RowRules)}
    return Table(
        table.name,
        table.row_elements,
        optimizer=table.optimizer,
        initializer=table.initializer.kind,
        scale=table.initializer.scale,
        keys_per_step_max=table.keys_per_step_max,
        rows_max=table.rows_max,
        dtype=table.dtype,
        combiner=table.combiner,
        encoding=table.encoding,
        **{name: value for name, value in rules.items() if value is not None},
    )


def _plain(value: Any) -> Any:
    """Return a value as a job file has it, without keys that are unset."""
    if isinstance(value, FrozenModel):
        return _plain(value.plain())
    if isinstance(value, Mapping):
        return {key: _plain(below) for key, below in value.items() if below is not None}
    return value
