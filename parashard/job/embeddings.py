"""Embedding tables of a job: the `[tables.NAME]` tables of a job file, and what they declare.

Owns the keys and their defaults. Knows no row. Called by the schema of the job file, the shards and the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from parashard.plan.embedding import (
    KEYS_PER_STEP_MAX,
    ROW_ELEMENTS_MAX,
    ROWS_MAX,
    ROWS_MAX_DEFAULT,
    EmbeddingTable,
)
from parashard.plan.optimizers import Adagrad, RowOptimizerOptions
from parashard.plan.variables import Initializer
from parashard.settings.table import Table, key

if TYPE_CHECKING:
    from parashard.job.schema import Job


class TableSettings(Table):
    """An embedding table: rows by 64-bit key, which come to be when they are first pushed."""

    dimension: int = key(ge=1, le=ROW_ELEMENTS_MAX, description="Numbers of a row.")
    initializer: Literal["zeros", "constant", "uniform", "normal"] | None = key(
        default=None,
        description="How a row begins: uniform draws from [-scale, scale), normal has a standard deviation of scale; "
        "unset: uniform, but zeros with ftrl.",
    )
    scale: float = key(default=0.05, ge=-1e15, le=1e15, description="Of the initializer.")
    optimizer: RowOptimizerOptions = key(
        default_factory=lambda: Adagrad(learning_rate=0.05),
        description="What moves its rows, with slots and a t of each row's own: sgd, momentum, nesterov, adagrad, "
        "rowwise_adagrad, rmsprop, adam, adamw or ftrl.",
    )
    keys_per_step_max: int = key(
        default=1 << 16, ge=1, le=KEYS_PER_STEP_MAX, description="Most keys, each once, that a step may use."
    )
    rows_max: int = key(
        default=ROWS_MAX_DEFAULT, ge=1, le=ROWS_MAX, description="Most rows on a shard; a job that needs more stops."
    )


def tables_of(job: Job) -> tuple[EmbeddingTable, ...]:
    """Return the tables that a job declares, in the order of their names.

    Raises
    ------
    ConfigurationError
        If one is not possible.
    """
    return tuple(_table(name, settings) for name, settings in sorted(job.tables.items()))


def identity_of(tables: Mapping[str, TableSettings]) -> dict[str, Any]:
    """Return what of tables decides a job's steps: all but bounds, which no arithmetic knows."""
    return {
        name: {
            "dimension": settings.dimension,
            "initializer": table.initializer.kind,
            "scale": float(table.initializer.scale),
            "optimizer": settings.optimizer.plain(),
        }
        for name, settings in sorted(tables.items())
        for table in (_table(name, settings),)
    }


def _table(name: str, settings: TableSettings) -> EmbeddingTable:
    kind = settings.initializer or ("zeros" if settings.optimizer.kind == "ftrl" else "uniform")
    return EmbeddingTable(
        name,
        settings.dimension,
        settings.optimizer,
        Initializer() if kind == "zeros" else Initializer(kind, settings.scale),
        settings.keys_per_step_max,
        settings.rows_max,
    )
