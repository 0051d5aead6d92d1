"""PresentOptimizer: a trainer's optimizer between its calls: rate, number of updates and slots.

Owns what the next fit begins with. Slots stay in the last checkpoint of the run that made them until they are asked
for. Knows no model. Called by `parashard.api.trainer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parashard.api.optimizers import Mapped
from parashard.checkpoints.catalogue import Catalogue
from parashard.checkpoints.state import whole_slots
from parashard.errors import ConfigurationError
from parashard.job.schema import Job
from parashard.launch.run_files import CHECKPOINTS
from parashard.launch.run_folders import resumed_job
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.slots import NO_SLOTS, Slots
from parashard.store import open_store


class PresentOptimizer:
    """An optimizer and its state.

    Parameters
    ----------
    mapped : Mapped
        The trainer's.

    Attributes
    ----------
    updates : int or None
        How many updates its state has; None: it is new.
    """

    def __init__(self, mapped: Mapped) -> None:
        self.mapped = mapped
        self.updates: int | None = None
        self._learning_rate = mapped.spec.learning_rate
        self._run_dir: Path | None = None

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer with the rate that callbacks have left."""
        return self.mapped.spec.replaced(learning_rate=self._learning_rate)

    def go_on_from(self, run_dir: Path, answer: Mapping[str, Any]) -> None:
        """Go on with the state of a run, by what its fit has answered."""
        self.updates = answer.get("updates")  # a fit of an earlier version says nothing: the state is new then
        self._learning_rate = answer.get("learning_rate", self._learning_rate)
        self._run_dir = run_dir if self.updates is not None else None

    def slots(self) -> Slots:
        """Return the state of whole variables, by slot and variable.

        Raises
        ------
        ConfigurationError
            If the run that has it is gone.
        DamagedCheckpoint, StoreFailed
            If its last checkpoint is damaged, or on an error of the store.
        """
        names = self.mapped.spec.slots
        if self._run_dir is None or not names:
            return NO_SLOTS
        job = resumed_job(self._run_dir, []).job
        store = open_store(job.checkpoint.url or str(self._run_dir / CHECKPOINTS))
        newest = Catalogue(store).newest_job_manifest()
        if newest is None:
            raise ConfigurationError(
                f"{self._run_dir}: the optimizer's state is in the last checkpoint of this run, which is gone; a new "
                "trainer begins with a new state"
            )
        return whole_slots(store, newest, names)


def updates_after(job: Job, steps: int) -> int:
    """Return the updates that an optimizer has done after a job of so many steps, with those before the job."""
    policy = job.consistency.policy
    return (job.job.updates_before or 0) + (-(-steps // policy.bound) if policy.kind == "sync" else steps)
