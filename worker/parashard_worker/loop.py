"""The step loop: take a leased step, pull, compute its gradient, push, report.

With a pipeline depth of d, the weights of up to d following steps are pulled, and up to d pushes settle, while a
gradient is computed; with 0 everything happens strictly one after the other. The coordinator may lower the depth for a
while. Knows no policy: what it holds a lease for
it does; nor arithmetic, which is `parashard_worker.computing`'s.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar

from parashard._proto import coordinator_pb2 as pb
from parashard.client.pulled import Pulled
from parashard.client.shard_client import ShardClient
from parashard.data.base import Batch, any_thread, reads_ahead
from parashard.errors import (
    ConfigurationError,
    InvalidRequest,
    NonFiniteGradient,
    ParashardError,
)
from parashard.metrics import VALUES_MAX, Sums, kind_of
from parashard.models.user_errors import described
from parashard.plan.variables import Float32s
from parashard.process import failpoints
from parashard.process.logs import log
from parashard_worker.computing import Task, WrongResult
from parashard_worker.evaluating import Keep, evaluate
from parashard_worker.leasing import Leasing
from parashard_worker.probing import Probe
from parashard_worker.transfers import Transfers

POLL_S = 0.2

_Result = TypeVar("_Result")


class _Leased(NamedTuple):
    """A step whose weights are pulled, and whose examples may be read meanwhile."""

    grant: pb.Grant
    pulled: Future[Pulled | None] | None  # None: once its batch is read, which says what rows it needs
    batch: Future[Batch] | None  # None: read as it is computed


class _Computed(NamedTuple):
    """A step whose push is under way."""

    step: int
    loss: float | None
    examples: int
    metrics: Sequence[pb.MetricSums]
    skipped: bool
    pulled: Pulled | None  # released after the push: a model may return views of its variables as gradients


class Inline(Executor):
    """Runs what is submitted at once, in the caller: the pipeline of depth 0."""

    def submit(self, fn: Callable[..., _Result], /, *args: object, **kwargs: object) -> Future[_Result]:
        """Run and return the outcome as a finished future."""
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # the future raises it where its result is read
            future.set_exception(error)
        return future


class StepLoop:
    """One worker's work.

    Parameters
    ----------
    task : Task
        What to compute.
    client : ShardClient
        Where weights come from and gradients go.
    leasing : Leasing
        Where steps come from and reports go.
    depth : int
        Most steps pulled ahead, and pushes that may be under way, while a gradient is computed.
    keep : callable
        Stores evaluated weights, and returns their file in the store; "" where it could not.

    Attributes
    ----------
    phases_s : dict of str to float
        Where the time went: of "pull" and "push" only what was waited for; evaluations are in none.
    computed : int
        Steps whose gradient was computed, whatever became of it.
    """

    def __init__(
        self,
        task: Task,
        client: ShardClient,
        leasing: Leasing,
        *,
        depth: int,
        keep: Keep = lambda evaluation, values: "",
    ) -> None:
        self._keep = keep
        self._task = task
        self._client = client
        self._leasing = leasing
        self._depth_max = depth
        self._transfers = Transfers(client, leasing, task.round_steps)
        self._probe = Probe(task, self._transfers, leasing)
        # A thread for whatever may be under way: the pulls of this step and of `depth` more, and `depth` pushes.
        self._threads: Executor | None = ThreadPoolExecutor(2 * depth + 1, "transfer") if depth else None
        self._inline = Inline()
        ahead = depth and reads_ahead(task.source)
        self._reader: Executor | None = ThreadPoolExecutor(1, "data") if ahead else None
        self._draws_nothing = any_thread(task.source)  # so that its examples may be read when a model has just drawn
        self._pulling: deque[_Leased] = deque()
        self._pushing: deque[tuple[_Computed, Future[tuple[int, ...]]]] = deque()
        self._evaluation: pb.EvaluationGrant | None = None
        self.phases_s = dict.fromkeys(("lease", "pull", "compute", "push"), 0.0)
        leasing.phases = lambda: {**self.phases_s, "transfer": self._transfers.transfer_s}
        self.steps = 0
        self.examples = 0
        self.computed = 0

    @property
    def _depth(self) -> int:
        return min(self._depth_max, self._leasing.depth)

    @property
    def _executor(self) -> Executor:
        return self._threads if self._threads is not None and self._depth else self._inline

    @property
    def transfer_s(self) -> float:
        """Duration of every step's pull and push, added up, waited for or not."""
        return self._transfers.transfer_s

    @property
    def staleness_pushes(self) -> int:
        """Staleness of every push, the greatest of its shards', added up."""
        return self._transfers.staleness_pushes

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until the job is over or `stopping` says so; what is half done then is finished or given back."""
        try:
            self._work_until(stopping)
        finally:
            for executor in filter(None, (self._threads, self._reader)):
                executor.shutdown(wait=False, cancel_futures=True)

    def _work_until(self, stopping: Callable[[], bool]) -> None:
        while not stopping():
            self._fill()
            if self._pulling:
                self._compute(self._pulling.popleft())
            elif self._evaluation is not None:
                evaluate(self._evaluation, self._task, self._client, self._leasing, self._keep)
                self._evaluation = None
            elif self._pushing:
                self._settle()
            elif self._leasing.over:
                break
        while self._pushing:
            self._settle()
        for leased in self._pulling:
            self._leasing.dropped(leased.grant.step)
        self._pulling.clear()

    def _fill(self) -> None:
        """Start pulls until the pipeline is full or no step is at hand."""
        while len(self._pulling) <= self._depth and self._evaluation is None:
            idle = not self._pulling and not self._pushing
            started_s = time.perf_counter()
            work = self._leasing.take(POLL_S if idle else 0.0)
            self.phases_s["lease"] += time.perf_counter() - started_s
            if work is None:
                return
            if isinstance(work, pb.EvaluationGrant):
                self._evaluation = work  # done once nothing pulled waits: those weights would grow stale meanwhile
            else:
                started_s = time.perf_counter()
                self._pulling.append(self._begun(work))
                self.phases_s["pull"] += time.perf_counter() - started_s

    def _begun(self, grant: pb.Grant) -> _Leased:
        """Begin the pull of a step, and the reading of its examples, where these may come before its turn."""
        batch = self._reading(grant)
        if not self._task.tables or grant.skip:
            return _Leased(grant, self._executor.submit(self._transfers.pull, grant), batch)
        if not _may_be_read(grant):
            return _Leased(grant, None, None)
        return self._with_rows(grant, batch)

    def _with_rows(self, grant: pb.Grant, batch: Future[Batch] | None = None) -> _Leased:
        """Read a step's examples, unless that is under way, and begin a pull with the rows that they need."""
        with self._leasing.reading(grant):
            batch = batch or _caught(self._task.batch_of, grant.step)
            if self._executor is self._inline:
                wait([batch])
        return _Leased(grant, self._executor.submit(self._pull_rows, grant, batch), batch)

    def _pull_rows(self, grant: pb.Grant, batch: Future[Batch]) -> Pulled | None:
        """Pull for a batch; None if it could not be read or looked up, which is told as it is computed."""
        return None if batch.exception() else self._transfers.pull(grant, batch.result().keys)

    def _reading(self, grant: pb.Grant) -> Future[Batch] | None:
        """Have the examples of a step read by another thread, if there is one."""
        if self._reader is None or not self._depth or not _may_be_read(grant):
            return None
        return self._reader.submit(self._task.batch_of, grant.step)

    def _compute(self, leased: _Leased) -> None:
        grant = leased.grant
        announced = leased.pulled is None
        if announced:
            if not self._announced(grant):
                return
            leased = self._with_rows(grant)
        started_s = time.perf_counter()
        try:
            pulled = self._pulled_of(leased)
        except InvalidRequest as error:
            self._transfers.pull_refused(grant.step, error)
            return
        except ParashardError as error:
            self._transfers.gave_up(grant.step, error)
            return
        finally:
            pull_s = time.perf_counter() - started_s
            self.phases_s["pull"] += pull_s
        self._count_wait(pulled, pull_s)
        if not announced and not self._announced(grant):
            return
        self._probe.measure(grant, pulled)
        started_s = time.perf_counter()
        try:
            with self._leasing.computing(grant):
                loss, examples, gradients = self._gradients(leased, pulled)
                metrics = metric_sums(self._task.step_metrics(examples)) if examples else []
        except ConfigurationError as error:
            if not isinstance(error, WrongResult):
                raise
            self._leasing.failed(grant.step, str(error), pb.FAILURE_KIND_WRONG_RESULT)
            return
        except BaseException as error:  # whatever a user's model raises fails the step
            log.warning("step-failed", step=grant.step, exc_info=error)
            kind = pb.FAILURE_KIND_NOT_FINITE if isinstance(error, NonFiniteGradient) else pb.FAILURE_KIND_MODEL
            self._leasing.failed(grant.step, described(error), kind)
            return
        finally:
            self.phases_s["compute"] += time.perf_counter() - started_s
        self.computed += 1
        failpoints.hit("worker.compute.done")
        while len(self._pushing) >= max(1, self._depth):
            self._settle()
        computed = _Computed(grant.step, loss, examples, metrics, grant.skip, pulled)
        started_s = time.perf_counter()
        self._pushing.append((computed, self._executor.submit(self._transfers.push, grant, gradients, pulled)))
        self.phases_s["push"] += time.perf_counter() - started_s
        while self._pushing and not self._depth:
            self._settle()

    def _pulled_of(self, leased: _Leased) -> Pulled | None:
        """Wait for a step's pull, and first, under watch, for the keys that it needs."""
        assert leased.pulled is not None
        if self._task.tables and leased.batch is not None:
            with self._leasing.reading(leased.grant):
                wait([leased.batch])
        return leased.pulled.result()

    def _count_wait(self, pulled: Pulled | None, pull_s: float) -> None:
        """Count what a shard waited for other workers' parts as waiting for a lease: it is no transfer."""
        if pulled is not None:
            waited_s = pulled.waited_s if self._executor is self._inline else min(pulled.waited_s, pull_s)
            self.phases_s["pull"] -= waited_s
            self.phases_s["lease"] += waited_s

    def _announced(self, grant: pb.Grant) -> bool:
        """Say that what killed a worker before begins, where that is so; if that fails, give it back: False."""
        if not grant.announce or self._leasing.announce(grant.step):
            return True
        self._leasing.dropped(grant.step)
        return False

    def _gradients(
        self, leased: _Leased, pulled: Pulled | None
    ) -> tuple[float | None, int, dict[str, Float32s] | None]:
        if leased.grant.skip:
            return 0.0, 0, {}
        batch = self._task.batch_of(leased.grant.step) if leased.batch is None else leased.batch.result()
        assert pulled is not None
        values = {**pulled.variables, **pulled.rows} if pulled.rows else pulled.variables
        loss, examples, gradients = self._task.gradients(batch, values, self._read_next)
        self._probe.keep(leased.grant, batch, gradients, pulled)
        return loss, examples, gradients

    def _read_next(self) -> None:
        """Read the next step's examples, unless another thread does: a model's results may still be on their way."""
        if self._pulling and self._reader is None and self._draws_nothing:
            leased = self._pulling[0]
            if leased.batch is None and _may_be_read(leased.grant):
                batch = Inline().submit(self._task.batch_of, leased.grant.step)
                self._pulling[0] = leased._replace(batch=batch)

    def _settle(self) -> None:
        """Wait for the oldest push and report its step."""
        computed, push = self._pushing.popleft()
        started_s = time.perf_counter()
        try:
            incarnations = push.result()
        except ParashardError as error:
            self._transfers.gave_up(computed.step, error)
            return
        finally:
            self.phases_s["push"] += time.perf_counter() - started_s
        if computed.pulled is not None:
            computed.pulled.release()
        self.steps += 1
        self.examples += computed.examples
        self._leasing.completed(
            pb.CompletedStep(
                step=computed.step,
                incarnations=incarnations,
                loss=computed.loss,
                examples=computed.examples,
                skipped=computed.skipped,
                metrics=computed.metrics,
            )
        )


def _caught(read: Callable[[int], Batch], step: int) -> Future[Batch]:
    """Return a batch, or whatever a user's code raised as it was read and looked up, as a finished future."""
    future: Future[Batch] = Future()
    try:
        future.set_result(read(step))
    except BaseException as error:  # noqa: BLE001  # SystemExit, too, fails the step
        future.set_exception(error)
    return future


def metric_sums(metrics: Mapping[str, Sums]) -> list[pb.MetricSums]:
    """Return a step's metrics as they are reported, without those whose states are too long for that."""
    found, left = [], VALUES_MAX
    for name, sums in metrics.items():
        if len(sums.values) <= left:
            left -= len(sums.values)
            found.append(pb.MetricSums(name=name, kind=kind_of(sums.metric), values=sums.values))
    return found


def _may_be_read(grant: pb.Grant) -> bool:
    """Tell whether a step's examples may be read ahead; what killed a worker before is announced first."""
    return not grant.announce and not grant.skip
