"""TrainedOptimizer: a trainer's optimizer between its calls: rate, number of updates and slots.

Owns what the next fit begins with. Slots stay in the last checkpoint of the run that made them until they are asked
for. Knows no model. Called by `parashard.api.trainer`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parashard.api.optimizers import Mapped, optimizer_for, optimizer_of, with_arguments
from parashard.checkpoints.catalogue import Catalogue
from parashard.checkpoints.state import whole_slots
from parashard.errors import ConfigurationError
from parashard.job.schema import Job
from parashard.launch.run_folders import resumed_job
from parashard.models.base import KeepsOptimizer, Model, OptimizerState, ReadsOptimizer
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.variables import NO_SLOTS, Slots
from parashard.process.run_files import CHECKPOINTS
from parashard.store import open_store


class TrainedOptimizer:
    """An optimizer and its state.

    Parameters
    ----------
    state : OptimizerState, optional
        What it has done already; None: nothing.
    given : object, optional
        An optimizer of a framework that it is the equal of, which its user may change.
    beside : (clip_norm, schedule)
        What the trainer says beside it.

    Attributes
    ----------
    updates : int or None
        How many updates its state has; None: it is new.
    passes : int
        How many passes over the examples have begun.
    """

    def __init__(
        self,
        mapped: Mapped,
        state: OptimizerState | None = None,
        given: Any = None,
        beside: tuple[float | None, Any] = (None, None),
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
        """The optimizer with the rate that callbacks have left."""
        return self.mapped.spec.replaced(learning_rate=self._learning_rate)

    def begin(self) -> None:
        """Read the framework's optimizer again as a fit begins: its user may have added a group, or set a rate.

        Raises ConfigurationError if it has no equal now.
        """
        if self._of_framework is None:
            return
        before, self.mapped = self.mapped, with_arguments(optimizer_of(self._of_framework), *self._beside)
        if self.mapped.spec.learning_rate != before.spec.learning_rate:
            self._learning_rate = self.mapped.spec.learning_rate
        if self.mapped.spec.rule != before.spec.rule:  # the slots are others
            self.updates, self._given, self._run_dir = None, NO_SLOTS, None

    @property
    def rate_factor(self) -> float:
        """By which callbacks have changed the rate since the first fit: rates of tables change alike."""
        first = self.mapped.spec.learning_rate
        return self._learning_rate / first if first else 1.0

    def go_on_from(self, run_dir: Path, answer: Mapping[str, Any]) -> None:
        """Go on with the state of a run, by what its fit has answered."""
        self.updates = answer.get("updates")  # a fit of an earlier version says nothing: the state is new then
        self.passes = answer.get("passes", 0)
        self._learning_rate = answer.get("learning_rate", self._learning_rate)
        self._run_dir = run_dir if self.updates is not None else None

    def slots(self) -> Slots:
        """Return the state of whole variables, by slot and variable.

        Raises ConfigurationError if the run that has it is gone; DamagedCheckpoint or StoreFailed if its last
        checkpoint is damaged, or on an error of the store.
        """
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
        """What it has done; None: nothing. Raises as `slots`."""
        return None if self.updates is None else OptimizerState(self.updates, self.slots())

    def restore(self, model: Model, own: Any) -> None:
        """Give the optimizer of a user's own object this state, if the object has one of the same rule."""
        if self.updates is None or not isinstance(model, KeepsOptimizer):
            return
        theirs = model.own_optimizer(own)
        try:
            same = theirs is not None and optimizer_of(theirs).spec.rule == self.spec.rule
        except ConfigurationError:  # it has no equal: the trainer has another one
            return
        state = self.state
        if same and state is not None:
            model.restore_optimizer(own, self.spec, state)


def trained_optimizer(
    given: Any, model: Model, seed: int, clip_norm: float | None = None, schedule: Any = None
) -> TrainedOptimizer:
    """Return a trainer's optimizer, with the state of one of a framework that has taken steps.

    Raises ConfigurationError if it has no equal, or its state has none.
    """
    mapped, beside = optimizer_for(given, model, seed), (clip_norm, schedule)
    compiled = getattr(model, "compiled_optimizer", None)
    theirs = compiled(seed) if given is None and compiled is not None else given
    made = not isinstance(theirs, OptimizerSpec | type | functools.partial | None)
    if not made:
        return TrainedOptimizer(mapped, beside=beside)
    state = model.optimizer_state(theirs, mapped.spec) if isinstance(model, ReadsOptimizer) else None
    return TrainedOptimizer(mapped, state, given, beside)


def updates_after(job: Job, steps: int) -> int:
    """Return the updates that an optimizer has done after a job of so many steps, with those before the job."""
    return (job.job.updates_before or 0) + -(-steps // job.consistency.policy.steps_of_update)
