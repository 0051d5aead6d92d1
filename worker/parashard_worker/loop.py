"""StepLoop: a worker's loop: compute each step of its session with the job's model and push it; run evaluations.

Evaluated weights are stored before their result is reported, so the best stored weights are exactly those evaluated.
`Probe` measures how much updates change a gradient, at the steps that the coordinator selects. Leases are in
`parashard_worker.session`, arithmetic in `parashard_worker.computing`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import Catalogue, evaluated_name
from parashard.client.pulled import Pulled
from parashard.client.shard_client import ShardClient
from parashard.data.base import Batch, any_thread, reads_ahead
from parashard.errors import (
    ConfigurationError,
    InvalidRequest,
    ParashardError,
    RetryLater,
    StaleIncarnation,
    StaleRequest,
    Unavailable,
    WrongModel,
)
from parashard.metrics import VALUES_MAX, Sums, kind_of
from parashard.models.user_errors import described
from parashard.plan.variables import Float32s, Variable, as_exported
from parashard.process.cuda_faults import GpuFault, fault_of
from parashard.process.cuda_memory import is_of_jax_on_cpu, memory_in_words
from parashard.process.logs import log
from parashard.store import open_store
from parashard.store.arrays import to_bytes
from parashard_worker.computing import Task, WrongResult
from parashard_worker.gpu_copies import Gradients, wait_for_gradients
from parashard_worker.gpu_faults import PROCESS_MUST_END, lost_context, out_of_memory
from parashard_worker.leased import REASON_CHARACTERS_MAX, result_of
from parashard_worker.leasing import Leasing
from parashard_worker.session import LeasedStep, Reading, Session
from parashard_worker.transfers import Transfers

Keep = Callable[[int, Mapping[str, Float32s]], str]
"""Stores evaluated weights, and returns their file in the store; "" if that failed."""


class ComputesSteps(Protocol):
    """Computes the steps of a loop, as a `Task` does."""

    def batch_of(self, step: int) -> Batch:
        """Read a step's examples."""

    def gradients(
        self, batch: Batch, values: Mapping[str, Float32s], meanwhile: Callable[[], Batch | None]
    ) -> tuple[float | None, int, Gradients | None]:
        """Return loss, number of examples and gradients."""

    def step_metrics(self, examples: int) -> Mapping[str, Sums]:
        """Return the metrics of the step that was computed last."""


class StepLoop:
    """One worker's loop. `ends_process`: the process belongs to the worker, and ends if its GPU context is lost."""

    def __init__(
        self,
        task: Task,
        client: ShardClient,
        leasing: Leasing,
        *,
        depth: int,
        keep: Keep = lambda evaluation, values: "",
        computes: ComputesSteps | None = None,
        ends_process: bool = False,
    ) -> None:
        self._task = task
        self._ends_process = ends_process
        self._computes = computes = computes or task
        self.session = Session(
            client,
            leasing,
            Reading(computes.batch_of, bool(task.tables), reads_ahead(task.source), any_thread(task.source)),
            round_steps=task.round_steps,
            depth=depth,
            evaluate=partial(evaluate, task=task, client=client, leasing=leasing, keep=keep, ends_process=ends_process),
            arrived=task.device.arrived,
        )
        self._probe = Probe(task, self.session.transfers, leasing)
        self.traffic = task.device.traffic  # of its GPU
        self.gpu_wait_s = 0.0  # part of the "compute" phase
        if self.traffic is not None:
            phases = leasing.phases
            leasing.phases = lambda: {**phases(), "gpu_wait": self.gpu_wait_s}

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until the job is over or `stopping()`; pushes in progress are completed, other steps given back."""
        # With `ends_process`, raises Unavailable after it has reported a lost GPU context.
        try:
            for step in self.session.steps(stopping):
                self._probe.measure(step.grant, step.pulled)
                self._compute(step)
        finally:
            self.session.close()

    def _compute(self, step: LeasedStep) -> None:
        session, computes, traffic = self.session, self._computes, self.traffic
        waited_s = 0.0 if traffic is None else traffic.waited_s  # so far, by probes of drift too
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
        except BaseException as error:  # any error of a user's model fails the step
            log.warning("step-failed", step=step.number, exc_info=error)
            self._failed(step, error)
        else:
            session.push(step, gradients, loss=loss, examples=examples, metrics=metrics)
        finally:
            if traffic is not None:
                self.gpu_wait_s += traffic.waited_s - waited_s

    def _failed(self, step: LeasedStep, error: BaseException) -> None:
        """Report a step in which the model raised; a lost GPU context ends this process, or else the job."""
        session, steps, fault = self.session, self._task.steps, fault_of(error)
        if fault is GpuFault.LOST_CONTEXT:
            said = lost_context(error)
            where = f"step {step.number:,}{steps.examples_in_words(step.number)}: {said}"
            if not self._ends_process:
                session.failed(step, f"{where}; {PROCESS_MUST_END}", pb.FAILURE_KIND_WRONG_RESULT)
                return
            session.failed(step, said, pb.FAILURE_KIND_MODEL)
            raise Unavailable(where) from error
        if fault is GpuFault.OUT_OF_MEMORY:
            examples = None if steps.batched else steps.size(step.number)
            held = memory_in_words(self._task.device.name)
            what = "this machine" if is_of_jax_on_cpu(error) else "the GPU"
            session.failed(step, out_of_memory(error, examples, steps.batch_size, held, what), pb.FAILURE_KIND_MODEL)
        else:
            session.failed(step, error)


def metric_sums(metrics: Mapping[str, Sums]) -> list[pb.MetricSums]:
    """Return a step's metrics as messages, without those whose values exceed the limit."""
    found, left = [], VALUES_MAX
    for name, sums in metrics.items():
        if len(sums.values) <= left:
            left -= len(sums.values)
            found.append(pb.MetricSums(name=name, kind=kind_of(sums.metric), values=sums.values))
    return found


class _Kept(NamedTuple):
    """A step whose gradient is recomputed at newer weights, with its gradients, and the versions of its weights."""

    step: int
    batch: Batch
    gradients: dict[str, Float32s]
    versions: tuple[int, ...]
    incarnations: tuple[int, ...]


class Probe:
    """One worker's measurements of drift, one at a time.

    Drift = |g' - g| / |g|: g is the gradient of a step as it was pushed, and g' that of the same examples at weights
    that are at least one update newer. Nothing is pushed, and random numbers in a step follow from its number, so a
    probe does not change any step. A probe that fails is logged, and its drift stays unknown.
    """

    def __init__(self, task: Task, transfers: Transfers, leasing: Leasing) -> None:
        self._task, self._transfers, self._leasing = task, transfers, leasing
        self._kept: _Kept | None = None

    def keep(self, grant: pb.Grant, batch: Batch, gradients: Gradients | None, pulled: Pulled) -> None:
        """Keep a step's gradient if its grant asks for the drift."""
        if grant.probe and gradients:
            own = {name: array.copy() for name, array in wait_for_gradients(gradients).items() if self._counts(name)}
            self._kept = _Kept(grant.step, batch, own, pulled.versions, pulled.incarnations)

    def measure(self, grant: pb.Grant, pulled: Pulled | None) -> None:
        """Compute the kept gradient again if the weights of the next step are newer, and report the drift."""
        kept = self._kept
        if kept is None or pulled is None:
            return
        same = pulled.incarnations == kept.incarnations  # else a shard was restored, and versions cannot be compared
        updates = min(after - before for before, after in zip(kept.versions, pulled.versions, strict=True))
        if same and updates < 1:
            return  # the next pull may have an update
        self._kept = None
        if not same:
            return
        try:
            with self._leasing.reading(grant):
                again = self._again(grant, kept.batch, pulled)
                drift = drift_of(kept.gradients, {} if again is None else wait_for_gradients(again))
        except BaseException as error:  # noqa: BLE001  # any error of a user's model
            log.warning("probe-failed", step=kept.step, error=repr(error))
            return
        if math.isfinite(drift):
            self._leasing.drifted(pb.StepDrift(step=kept.step, drift=drift, updates=updates))

    def _again(self, grant: pb.Grant, batch: Batch, pulled: Pulled) -> Gradients | None:
        if not self._task.tables:
            return self._task.gradients(batch, pulled.variables)[2]
        rows = self._transfers.pull(grant, batch.keys)
        assert rows is not None
        try:
            return self._task.gradients(batch, rows.values)[2]
        finally:
            rows.release()

    def _counts(self, name: str) -> bool:
        """Tell whether a gradient counts for the drift: not rows of tables, and not state without a gradient."""
        return name in self._task.plan.variables and not self._task.plan.variables[name].state


def drift_of(before: Mapping[str, Float32s], after: Mapping[str, Float32s]) -> float:
    """Return |after - before| / |before| over the variables of `before`; NaN if |before| is zero."""
    changed = sum(float(np.square(after[name] - g, dtype=np.float64).sum()) for name, g in before.items())
    whole = sum(float(np.square(g, dtype=np.float64).sum()) for g in before.values())
    return math.sqrt(changed / whole) if whole else math.nan


def evaluate(
    grant: pb.EvaluationGrant,
    task: Task,
    client: ShardClient,
    leasing: Leasing,
    keep: Keep,
    *,
    ends_process: bool = False,
) -> None:
    """Evaluate the weights that the grant names, store them if the grant says so, and report the result."""
    # Raises Unavailable as `StepLoop.run` does.
    round_ = grant.round if grant.for_round else None
    try:
        with leasing.reading(grant):
            keys = task.held_out_keys()
    except BaseException as error:  # noqa: BLE001  # the model's code
        _failed(grant, leasing, error, ends_process=ends_process)
        return
    try:
        pulled = client.pull(round_=round_, keys=keys)
        if pulled.incarnations != tuple(grant.incarnations):
            raise StaleIncarnation("a shard has another incarnation than the one whose weights are to be judged")
    except (InvalidRequest, StaleRequest, RetryLater) as error:  # not the model's fault: another attempt may succeed
        log.info("evaluation-dropped", evaluation=grant.evaluation, error=str(error))
        leasing.evaluation_dropped(grant.evaluation)
        client.refresh()
        return
    try:
        metrics = task.metrics(pulled.values, lambda: leasing.computing(grant), keys)
    except BaseException as error:  # noqa: BLE001  # the model's code
        _failed(grant, leasing, error, ends_process=ends_process)
        return
    weights = keep(grant.evaluation, pulled.variables) if grant.store else ""
    judged_steps = 0 if grant.for_round else min(pulled.versions) * task.steps.parts  # a version is a batch
    pulled.release()
    leasing.evaluated(result_of(grant, metrics=metrics, weights=weights, judged_steps=judged_steps))


def _failed(grant: pb.EvaluationGrant, leasing: Leasing, error: BaseException, *, ends_process: bool) -> None:
    log.warning("evaluation-failed", evaluation=grant.evaluation, exc_info=error)
    lost = fault_of(error) is GpuFault.LOST_CONTEXT
    said = lost_context(error) if lost else described(error)
    wrong = isinstance(error, WrongResult | WrongModel)  # a retry would fail, too
    if lost and not ends_process:
        wrong, said = True, f"{said}; {PROCESS_MUST_END}"
    kind = pb.FAILURE_KIND_WRONG_RESULT if wrong else pb.FAILURE_KIND_MODEL
    leasing.evaluated(result_of(grant, error=said[:REASON_CHARACTERS_MAX], kind=kind))
    if lost and ends_process:
        raise Unavailable(f"the evaluation after step {grant.evaluation:,}: {said}") from error


def keep_evaluated(
    checkpoint_url: str, run_id: str, variables: Mapping[str, Variable], evaluation: int, values: Mapping[str, Float32s]
) -> str:
    """Store weights under a unique name and return it; if that fails (P21), log the error and return ""."""
    # Nothing is written if the store is not the run's, such as a folder of the same name on another machine. Counters
    # are whole numbers in the file, as in `weights.safetensors`.
    name = evaluated_name(evaluation, os.urandom(4).hex())
    arrays = {variable: np.ascontiguousarray(value) for variable, value in as_exported(values, variables).items()}
    try:
        store = open_store(checkpoint_url)
        Catalogue(store).of_run(run_id)
        store.create(name, to_bytes(arrays))
    except ParashardError as error:
        log.warning("evaluated-not-stored", evaluation=evaluation, error=str(error))
        return ""
    return name


def check_store(reply: pb.GetJobReply) -> None:
    """Raise ConfigurationError if this worker cannot store the evaluated weights that the run's callbacks need."""
    if reply.stores_evaluated:
        Catalogue(open_store(reply.checkpoint_url)).of_run(reply.run_id)
