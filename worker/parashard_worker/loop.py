"""StepLoop: a worker's loop: each step of its session computed by the job's model, and pushed.

Beside it `Probe` measures how much updates change a gradient, at the steps for which the coordinator asks. Knows no
lease, which is `parashard_worker.session`'s, and no arithmetic, which is `parashard_worker.computing`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from parashard._proto import coordinator_pb2 as pb
from parashard.client.pulled import Pulled
from parashard.client.shard_client import ShardClient
from parashard.data.base import Batch, any_thread, reads_ahead
from parashard.errors import ConfigurationError
from parashard.metrics import VALUES_MAX, Sums, kind_of
from parashard.plan.variables import Float32s
from parashard.process.logs import log
from parashard_worker.computing import Task, WrongResult
from parashard_worker.evaluating import Keep, evaluate
from parashard_worker.leasing import Leasing
from parashard_worker.session import LeasedStep, Reading, Session
from parashard_worker.transfers import Transfers


class ComputesSteps(Protocol):
    """Computes the steps of a loop, as a `Task` does."""

    def batch_of(self, step: int) -> Batch:
        """Read a step's examples."""

    def gradients(
        self, batch: Batch, values: Mapping[str, Float32s], meanwhile: Callable[[], None]
    ) -> tuple[float | None, int, dict[str, Float32s] | None]:
        """Return loss, number of examples and gradients."""

    def step_metrics(self, examples: int) -> Mapping[str, Sums]:
        """Return the metrics of the step that was computed last."""


class StepLoop:
    """One worker's work."""

    def __init__(
        self,
        task: Task,
        client: ShardClient,
        leasing: Leasing,
        *,
        depth: int,
        keep: Keep = lambda evaluation, values: "",
        computes: ComputesSteps | None = None,
    ) -> None:
        self._computes = computes = computes or task
        self.session = Session(
            client,
            leasing,
            Reading(computes.batch_of, bool(task.tables), reads_ahead(task.source), any_thread(task.source)),
            round_steps=task.round_steps,
            depth=depth,
            evaluate=partial(evaluate, task=task, client=client, leasing=leasing, keep=keep),
        )
        self._probe = Probe(task, self.session.transfers, leasing)

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until the job is over or `stopping` says so; what is half done then is finished or given back."""
        try:
            for step in self.session.steps(stopping):
                self._probe.measure(step.grant, step.pulled)
                self._compute(step)
        finally:
            self.session.close()

    def _compute(self, step: LeasedStep) -> None:
        session, computes = self.session, self._computes
        try:
            with session.computing(step):
                batch = session.read(step)
                loss, examples, gradients = computes.gradients(batch, step.values, session.read_next)
                assert step.pulled is not None
                self._probe.keep(step.grant, batch, gradients, step.pulled)
                metrics = metric_sums(computes.step_metrics(examples)) if examples else []
        except WrongResult as error:
            session.failed(step, str(error), pb.FAILURE_KIND_WRONG_RESULT)
        except ConfigurationError:
            raise
        except BaseException as error:  # whatever a user's model raises fails the step
            log.warning("step-failed", step=step.number, exc_info=error)
            session.failed(step, error)
        else:
            session.push(step, gradients, loss=loss, examples=examples, metrics=metrics)


def metric_sums(metrics: Mapping[str, Sums]) -> list[pb.MetricSums]:
    """Return a step's metrics as they are reported, without those whose states are too long for that."""
    found, left = [], VALUES_MAX
    for name, sums in metrics.items():
        if len(sums.values) <= left:
            left -= len(sums.values)
            found.append(pb.MetricSums(name=name, kind=kind_of(sums.metric), values=sums.values))
    return found


class _Kept(NamedTuple):
    """A step whose gradient is computed again at newer weights, and what its own were."""

    step: int
    batch: Batch
    gradients: dict[str, Float32s]
    versions: tuple[int, ...]
    incarnations: tuple[int, ...]


class Probe:
    """One worker's measurements of drift, one at a time.

    Drift = |g' - g| / |g|: g is the gradient of a step as it was pushed, and g' that of the same examples at weights
    that are at least one update newer. Nothing is pushed, and what is random in a step is drawn by its number: the
    steps come out as without a probe. One that fails is logged, and its drift stays unknown.
    """

    def __init__(self, task: Task, transfers: Transfers, leasing: Leasing) -> None:
        self._task, self._transfers, self._leasing = task, transfers, leasing
        self._kept: _Kept | None = None

    def keep(self, grant: pb.Grant, batch: Batch, gradients: Mapping[str, Float32s] | None, pulled: Pulled) -> None:
        """Keep a step's gradient if the coordinator asks for its drift."""
        if grant.probe and gradients:
            own = {name: array.copy() for name, array in gradients.items() if self._counts(name)}
            self._kept = _Kept(grant.step, batch, own, pulled.versions, pulled.incarnations)

    def measure(self, grant: pb.Grant, pulled: Pulled | None) -> None:
        """Compute the kept gradient again if the weights of the next step are newer, and report the drift."""
        kept = self._kept
        if kept is None or pulled is None:
            return
        same = pulled.incarnations == kept.incarnations  # else a shard was restored, and versions do not tell
        updates = min(after - before for before, after in zip(kept.versions, pulled.versions, strict=True))
        if same and updates < 1:
            return  # the next pull may have an update
        self._kept = None
        if not same:
            return
        try:
            with self._leasing.reading(grant):
                drift = drift_of(kept.gradients, self._again(grant, kept.batch, pulled))
        except BaseException as error:  # noqa: BLE001  # whatever a user's model raises
            log.warning("probe-failed", step=kept.step, error=repr(error))
            return
        if math.isfinite(drift):
            self._leasing.drifted(pb.StepDrift(step=kept.step, drift=drift, updates=updates))

    def _again(self, grant: pb.Grant, batch: Batch, pulled: Pulled) -> Mapping[str, Float32s]:
        if not self._task.tables:
            return self._task.gradients(batch, pulled.variables)[2] or {}
        rows = self._transfers.pull(grant, batch.keys)
        assert rows is not None
        try:
            return self._task.gradients(batch, {**rows.variables, **rows.rows})[2] or {}
        finally:
            rows.release()

    def _counts(self, name: str) -> bool:
        """Tell whether a variable's gradient is one: rows of tables are left out, and state has none."""
        return name in self._task.plan.variables and not self._task.plan.variables[name].state


def drift_of(before: Mapping[str, Float32s], after: Mapping[str, Float32s]) -> float:
    """Return |after - before| / |before| over the variables of `before`; NaN where that is zero."""
    changed = sum(float(np.square(after[name] - g, dtype=np.float64).sum()) for name, g in before.items())
    whole = sum(float(np.square(g, dtype=np.float64).sum()) for g in before.values())
    return math.sqrt(changed / whole) if whole else math.nan
