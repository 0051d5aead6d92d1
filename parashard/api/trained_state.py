"""State of a trainer between calls besides weights: the optimizer with its state, and rows of tables.

Slots and rows are read from the last checkpoint of the run that made them only when needed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parashard.api.optimizers import Mapped, optimizer_of, with_arguments
from parashard.callbacks.base import Callback
from parashard.checkpoints.catalogue import Catalogue
from parashard.checkpoints.state import whole_slots
from parashard.client.pulled_rows import TableSet
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.job.embeddings import checked_tables
from parashard.job.schema import Job
from parashard.launch.run_folders import resumed_job
from parashard.launch.stored_rows import StoredTables
from parashard.models.base import HeldTable, LooksUp, Model, OptimizerState
from parashard.models.looking_up import keys_of_all
from parashard.plan.embedding import EmbeddingTable, KeyedRows, Keys, unmixed
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.variables import NO_SLOTS, Float32s, Slots
from parashard.process.run_files import CHECKPOINTS
from parashard.store import open_store


class TrainedOptimizer:
    """An optimizer and its state, with its numbers of updates (None if new) and of passes over the examples."""

    def __init__(
        self,
        mapped: Mapped,
        state: OptimizerState | None = None,
        given: Any = None,  # a framework's optimizer, which the user may change between fits
        beside: tuple[float | None, Any] = (None, None),  # the trainer's clip_norm and schedule
    ) -> None:
        self.mapped = with_arguments(mapped, *beside)
        self._beside = beside
        self._of_framework = given
        self.updates = None if state is None else state.updates
        self.passes = 0
        self._given = NO_SLOTS if state is None else state.slots
        self._learning_rate = mapped.spec.learning_rate
        self._run_dir: Path | None = None

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer with the learning rate last set by callbacks."""
        return self.mapped.spec.replaced(learning_rate=self._learning_rate)

    def begin(self) -> None:
        """Read the framework's optimizer again at the start of a fit: the user may have added a group or set a rate."""
        if self._of_framework is None:
            return
        before, self.mapped = self.mapped, with_arguments(optimizer_of(self._of_framework), *self._beside)
        if self.mapped.spec.learning_rate != before.spec.learning_rate:
            self._learning_rate = self.mapped.spec.learning_rate
        if self.mapped.spec.rule != before.spec.rule:  # the new rule has other slots
            self.updates, self._given, self._run_dir = None, NO_SLOTS, None

    @property
    def rate_factor(self) -> float:
        """Factor by which callbacks have changed the rate; it also applies to rates of tables."""
        first = self.mapped.spec.learning_rate
        return self._learning_rate / first if first else 1.0

    def continue_from(self, run_dir: Path, result: Mapping[str, Any]) -> None:
        """Continue from the state of a run and the result of its fit."""
        self.updates = result.get("updates")  # results of earlier versions lack it: the state is new then
        self.passes = result.get("passes", 0)
        self._learning_rate = result.get("learning_rate", self._learning_rate)
        self._run_dir = run_dir if self.updates is not None else None

    def slots(self) -> Slots:
        """Return the state of whole variables, by slot and variable, from the run's last checkpoint."""
        names = self.mapped.spec.slots
        if self._run_dir is None or not names:
            return self._given
        job = resumed_job(self._run_dir, []).job
        store = open_store(job.checkpoint.url or str(self._run_dir / CHECKPOINTS))
        newest = Catalogue(store).newest_job_manifest()
        if newest is None:
            raise ConfigurationError(
                f"{self._run_dir}: the optimizer's state is in the last checkpoint of this run, which is gone; a new "
                "trainer begins with a new state"
            )
        return whole_slots(store, newest, names)

    @property
    def state(self) -> OptimizerState | None:
        """Updates and slots; None if it has taken no step. Raises as `slots` does."""
        return None if self.updates is None else OptimizerState(self.updates, self.slots())

    def restore(self, model: Any, own: Any) -> None:
        """Load this state into the optimizer of a user's own object, if it has the same rule."""
        if self.updates is None or not hasattr(model, "own_optimizer"):
            return
        theirs = model.own_optimizer(own)
        try:
            same = theirs is not None and optimizer_of(theirs).spec.rule == self.spec.rule
        except ConfigurationError:  # it has no equivalent, so the trainer's is a different one
            return
        state = self.state
        if same and state is not None:
            model.restore_optimizer(own, self.spec, state)


def trained_optimizer(
    given: Any, model: Any, seed: int, clip_norm: float | None = None, schedule: Any = None
) -> TrainedOptimizer:
    """Return a trainer's optimizer: the given one with its state, else the compiled one, else SGD."""
    compiled = getattr(model, "compiled_optimizer", None) if given is None else None
    theirs = given if compiled is None else compiled(seed)
    try:
        mapped = optimizer_of(theirs)
    except ConfigurationError as error:
        if compiled is None:
            raise
        raise ConfigurationError(
            f"the trainer is given no optimizer, and that of compile() has no equal: {error.message}; give the trainer "
            "one, such as ps.Adam(1e-3)"
        ) from None
    is_made = not isinstance(theirs, OptimizerSpec | type | functools.partial | None)
    state = model.optimizer_state(theirs, mapped.spec) if is_made and hasattr(model, "optimizer_state") else None
    return TrainedOptimizer(mapped, state, given if is_made else None, (clip_norm, schedule))


def updates_after(job: Job, steps: int) -> int:
    """Return an optimizer's number of updates after a job of `steps` steps, including those before the job."""
    return (job.job.updates_before or 0) + -(-steps // job.consistency.policy.steps_of_update)


# --- rows of tables ---


class TrainedRows:
    """Rows of tables: those of the last fit's run, or initial values."""

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
        """Return a table's keys (the model's ids, ascending) and their rows."""
        if name not in self._tables:
            known = ", ".join(self._tables) or "none"
            raise ConfigurationError(f"table {name!r} is none of the model's: {known}")
        held = self.held(name)
        keys = unmixed(held.keys)
        order = np.argsort(keys)
        return keys[order], held.rows[order]

    def held(self, name: str) -> HeldTable:
        """Return all rows of a table, with a function for initial values of other keys."""
        dimension = self._tables[name].row_elements
        keys, rows = np.empty(0, np.uint64), np.empty((0, dimension), np.float32)
        if self._run_dir is not None:
            stored = self._stored(self._run_dir).whole(name, state=False)
            keys, rows = stored.keys, stored.values
        return HeldTable(keys, rows, lambda absent: self._drawn.first_rows(name, absent))

    def initial(self) -> dict[str, KeyedRows]:
        """Return the rows that the next fit starts from, by table, with their optimizer's state."""
        if self._run_dir is None:
            return {}
        stored = self._stored(self._run_dir)
        rows = {name: stored.whole(name, state=True) for name in self._tables}
        return {name: of_table for name, of_table in rows.items() if len(of_table.keys)}

    @staticmethod
    def _stored(run_dir: Path) -> StoredTables:
        return StoredTables(run_dir, resumed_job(run_dir, []).job)


def tables_of_model(model: Model) -> dict[str, EmbeddingTable]:
    """Return the tables that a script's model declares, by name; refuse tables without `keys`, and the reverse."""
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
    """Refuse a model with tables where their rows are not available."""
    tables = tables_of_model(model)
    if tables:
        raise ConfigurationError(f"{what}: the model looks up rows of tables ({', '.join(tables)}), which it has not")


def check_callbacks(callbacks: Iterable[Callback], tables: Mapping[str, EmbeddingTable]) -> None:
    """Refuse callbacks that store evaluated weights of a model with tables, since rows are not stored with them."""
    for callback in callbacks:
        if tables and callback.uses_weights:
            raise ConfigurationError(
                f"{type(callback).__name__} keeps the weights of an evaluation, and rows of tables "
                f"({', '.join(tables)}) are not kept with them; the last checkpoint of a run has both: train without it"
            )
