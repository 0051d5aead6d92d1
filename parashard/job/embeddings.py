"""Embedding tables of a job: the `[tables.NAME]` tables of a job file, and `Table`, which a script declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from parashard.errors import ConfigurationError, shortened
from parashard.frozen_model import FrozenModel
from parashard.job.keys import without_none
from parashard.job.validation import Relation, check_relations, validated_words
from parashard.plan.embedding import (
    KEYS_PER_STEP_MAX,
    ROW_ELEMENTS_MAX,
    ROWS_MAX,
    ROWS_MAX_DEFAULT,
    Combiner,
    EmbeddingTable,
    RowDtype,
    RowEncoding,
    candidates_of,
)
from parashard.plan.optimizers import Adagrad, RowOptimizerOptions
from parashard.plan.row_rules import NO_RULES, STEPS_MAX, RowRules
from parashard.plan.variables import Initializer

if TYPE_CHECKING:
    from parashard.job.schema import Job


class TableSettings(FrozenModel):
    """An embedding table: rows by 64-bit key, created on their first push."""

    dimension: int = Field(ge=1, le=ROW_ELEMENTS_MAX, description="Length of a row.")
    dtype: RowDtype = Field(
        default="float32",
        description="Type of rows in memory, pulls and checkpoints; slots and arithmetic are float32.",
    )
    encoding: RowEncoding = Field(
        default="float32",
        description="How gradients of rows travel: bfloat16 and float16 halve the bytes, int8 takes a byte a number "
        "and a scale a row.",
    )
    initializer: Literal["zeros", "constant", "uniform", "normal"] | None = Field(
        default=None,
        description="First values: uniform in [-scale, scale), normal with standard deviation scale; unset: "
        "uniform, with ftrl zeros.",
    )
    scale: float = Field(default=0.05, ge=-1e15, le=1e15, description="Scale of the initializer.")
    combiner: Combiner | None = Field(
        default=None,
        description="How the rows of a cell with several keys (`data.list_columns`) become one vector; unset: mean.",
    )
    optimizer: RowOptimizerOptions = Field(
        default_factory=lambda: Adagrad(learning_rate=0.05),
        description="Update rule of the rows: sgd, momentum, nesterov, adagrad, rowwise_adagrad, rmsprop, adam, "
        "adamw or ftrl.",
    )
    keys_per_step_max: int = Field(
        default=1 << 16, ge=1, le=KEYS_PER_STEP_MAX, description="Most distinct keys of a step."
    )
    rows_max: int = Field(
        default=ROWS_MAX_DEFAULT, ge=1, le=ROWS_MAX, description="Most rows on a shard; a job that needs more stops."
    )
    admit_after: int = Field(
        default=1,
        ge=1,
        le=STEPS_MAX,
        description="A key gets a row on its Nth push; earlier pushes of it are dropped.",
    )
    admit_probability: float = Field(
        default=1.0, gt=0, le=1, description="Chance that a push gives a new key its row (or counts)."
    )
    evict_unused_steps: int | None = Field(
        default=None,
        ge=1,
        le=STEPS_MAX,
        description="Updates without a push after which a row is gone; unset: never.",
    )
    evict_norm_below: float = Field(
        default=0.0, ge=0, le=1e15, description="A row with an L2 norm below this at a check is gone."
    )
    evict_norm_every: int = Field(default=1000, ge=1, le=STEPS_MAX, description="Updates between two checks of norms.")
    evict_above_rows: int | None = Field(
        default=None,
        ge=1,
        le=ROWS_MAX,
        description="A shard with more rows drops some, down to nine tenths of this; unset: never.",
    )
    evict_first: Literal["lru", "lfu"] = Field(
        default="lru", description="Which rows it drops: those pushed the longest ago (lru) or the fewest times (lfu)."
    )

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        """Refuse values that exclude each other, and settings that `[optimizer]` has for the whole step."""
        check_relations(self, _broken(self))
        return self


def _broken(table: TableSettings) -> Iterator[Relation]:
    for key in ("clip_norm", "variable_clip_norm"):
        if getattr(table.optimizer, key) is not None:
            yield f"optimizer.{key}", "", "left out: [optimizer] says it for the whole step"
    if table.optimizer.kind == "ftrl" and table.initializer not in (None, "zeros"):
        yield "initializer", "optimizer.kind", "zeros where the optimizer is ftrl, which starts there"
    if table.evict_norm_below and table.dtype != "float32":
        yield "evict_norm_below", "dtype", f"0 where dtype is {table.dtype}"
    if table.evict_norm_every != NO_RULES.evict_norm_every and not table.evict_norm_below:
        yield "evict_norm_every", "evict_norm_below", "left out where evict_norm_below is not set"
    if table.evict_above_rows is None:
        if table.evict_first != NO_RULES.evict_first:
            yield "evict_first", "evict_above_rows", "left out where evict_above_rows is not set"
        return
    room = table.rows_max - table.keys_per_step_max
    if room < 1:
        allowed = f"more than keys_per_step_max ({table.keys_per_step_max:,}) where evict_above_rows is set"
        yield "rows_max", "evict_above_rows", allowed
    elif table.evict_above_rows > room:
        allowed = f"a whole number from 1 to {room} (rows_max - keys_per_step_max)"
        yield "evict_above_rows", "rows_max", allowed


class Table(EmbeddingTable):
    """An embedding table: rows by 64-bit key, created on their first push.

    Parameters
    ----------
    name : str
        Unique among a model's tables and variables.
    dimension : int
        Numbers of a row.
    **settings
        The other keys of `[tables.NAME]` in a job file, all of which are in `docs/job-file.md`. Update rule:
        `optimizer=ps.Adagrad(0.05)`. Initial values: `initializer="normal"` and `scale=0.01`. Fewer bytes of rows, and
        of their gradients: `dtype="float16"`, `encoding="int8"`. Admission and eviction of rows: `admit_after=3`,
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
        values = {"dimension": dimension, **settings}
        optimizer = values.get("optimizer")
        if isinstance(optimizer, str):
            raise ConfigurationError(
                f"ps.Table({name!r}): optimizer: found {shortened(repr(optimizer))}; allowed: an optimizer such as "
                "ps.Adagrad(0.05)"
            )
        if isinstance(optimizer, FrozenModel):
            values["optimizer"] = optimizer.plain()
        checked = validated_words(TableSettings, without_none(values), f"ps.Table({name!r}): ")
        vars(self).update(vars(embedding_of(name, checked)))

    @property
    def dimension(self) -> int:
        """Numbers of a row."""
        return self.row_elements

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmbeddingTable) and vars(self) == vars(other)

    __hash__ = EmbeddingTable.__hash__

    def __repr__(self) -> str:
        return f"ps.Table({self.name!r}, {self.dimension})"


def plain_of(table: EmbeddingTable) -> dict[str, Any]:
    """Return the settings of a table as `[tables.NAME]` has them, without those that are unset."""
    settings = {
        "dimension": table.row_elements,
        "dtype": table.dtype,
        "encoding": table.encoding,
        "initializer": table.initializer.kind,
        "scale": table.initializer.scale,
        "combiner": table.combiner,
        "optimizer": table.optimizer.plain(),
        "keys_per_step_max": table.keys_per_step_max,
        "rows_max": table.rows_max,
        **vars(table.rules),
    }
    return without_none(settings)


def checked_tables(tables: object) -> dict[str, EmbeddingTable]:
    """Return tables by name, sorted by name."""
    if isinstance(tables, str) or not isinstance(tables, Sequence):
        raise ConfigurationError(f'tables is a list such as [ps.Table("users", 16)], found {tables!r}')
    found: dict[str, EmbeddingTable] = {}
    for table in tables:
        if not isinstance(table, EmbeddingTable):
            raise ConfigurationError(
                f'tables has {shortened(repr(table))}; allowed: tables such as ps.Table("users", 16)'
            )
        if found.setdefault(table.name, table) != table:
            raise ConfigurationError(
                f"two tables are named {table.name!r}, and their settings differ: make one, and share it"
            )
    return dict(sorted(found.items()))


def tables_of(job: Job) -> tuple[EmbeddingTable, ...]:
    """Return the tables that a job declares, in the order of their names."""
    tables = tuple(embedding_of(name, settings) for name, settings in sorted(job.tables.items()))
    for table in tables:
        if table.rules.admit_after > 1 and candidates_of(table.name) in job.tables:
            raise ConfigurationError(
                f"tables.{candidates_of(table.name)}: checkpoints have keys of table {table.name!r} under that name; "
                "give the table another"
            )
    return tables


def identity_of(tables: Mapping[str, TableSettings]) -> dict[str, Any]:
    """Return the settings of tables that determine a job's steps: all but bounds, which change no arithmetic."""
    return {
        name: {
            "dimension": settings.dimension,
            "initializer": table.initializer.kind,
            "scale": float(table.initializer.scale),
            "optimizer": settings.optimizer.identity(),
        }
        | ({} if table.dtype == "float32" else {"dtype": table.dtype})
        | ({} if table.combiner in (None, "mean") else {"combiner": table.combiner})
        | ({} if table.gradient_encoding == "float32" else {"encoding": table.gradient_encoding})
        | _changed_rules(table.rules)
        for name, settings in sorted(tables.items())
        for table in (embedding_of(name, settings),)
    }


def embedding_of(name: str, settings: TableSettings) -> EmbeddingTable:
    """Return the table that settings describe."""
    kind = settings.initializer or ("zeros" if settings.optimizer.kind == "ftrl" else "uniform")
    return EmbeddingTable(
        name,
        settings.dimension,
        settings.optimizer,
        Initializer() if kind == "zeros" else Initializer(kind, settings.scale),
        settings.keys_per_step_max,
        settings.rows_max,
        RowRules(**{field.name: getattr(settings, field.name) for field in fields(RowRules)}),
        settings.dtype,
        settings.combiner,
        settings.encoding,
    )


def _changed_rules(rules: RowRules) -> dict[str, Any]:
    """Return the rules that are not the default, so that jobs of versions without rules keep their identity."""
    changed = {field.name: getattr(rules, field.name) for field in fields(rules)}
    return {name: value for name, value in changed.items() if value != getattr(NO_RULES, name)}
