"""Session: a worker's leased steps: pulled ahead, handed out, pushed, and reported or given back.

    for step in session.steps():
        with session.computing(step):
            loss, gradients = mine(step.values, session.read(step))
        session.push(step, gradients, loss=loss, examples=32)

With a pipeline depth of d, the weights of up to d following steps are pulled, and up to d pushes are in progress, while
a gradient is computed; with 0 everything is sequential. The coordinator may lower the depth temporarily. Invariant: a
leased step is completed, failed or given back, exactly once. Knows no policy and no model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from parashard._proto import coordinator_pb2 as pb
from parashard.client.pulled import Pulled
from parashard.client.shard_client import ShardClient
from parashard.errors import InvalidRequest, NonFiniteGradient, ParashardError
from parashard.models.user_errors import described
from parashard.plan.variables import Float32s
from parashard.process import failpoints
from parashard_worker.gpu_copies import PendingGradients
from parashard_worker.leasing import Leasing
from parashard_worker.transfers import Arrived, Transfers

POLL_S = 0.2

_Result = TypeVar("_Result")


class Inline(Executor):
    """Runs each submitted call at once, in the caller's thread: the pipeline of depth 0."""

    def submit(self, fn: Callable[..., _Result], /, *args: object, **kwargs: object) -> Future[_Result]:
        """Run the call and return its outcome."""
        try:
            return _Finished(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # the future raises it when its result is read
            return _Finished(error=error)


class _Finished(Future[_Result]):
    """A future that has its outcome, and so needs no locks."""

    def __init__(self, value: _Result | None = None, error: BaseException | None = None) -> None:
        self._value, self._error = value, error

    def result(self, timeout: float | None = None) -> _Result:
        """Return the value, or raise the error."""
        if self._error is not None:
            raise self._error
        return cast(_Result, self._value)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error."""
        return self._error

    def done(self) -> bool:
        """Return True."""
        return True


INLINE = Inline()


class Reading(NamedTuple):
    """How a session reads the examples of its steps."""

    read: Callable[[int], Any]  # step -> examples; in a job with tables their `keys` name the rows that they need
    has_tables: bool = False
    ahead: bool = False  # a second thread may read examples of the next steps
    meanwhile: bool = False  # the session's thread may read the next examples before a model's results are computed


@dataclass(slots=True)
class LeasedStep:
    """A leased step, with its weights once `Session.steps` hands it out."""

    grant: pb.Grant
    examples: Future[Any] | None = None  # None: read on demand
    pulling: Future[Pulled | None] | None = None  # None: once the examples are read
    pulled: Pulled | None = None  # released after the push: a model may return views of its variables as gradients

    @property
    def number(self) -> int:
        """The step's number, which is its identity."""
        return self.grant.step

    @property
    def may_be_read(self) -> bool:
        """Whether its examples may be read ahead; a step that must be announced is announced first."""
        return not self.grant.announce and not self.grant.skip

    @property
    def values(self) -> Mapping[str, Float32s]:
        """Every variable, and of each table the rows that its examples need."""
        assert self.pulled is not None
        return self.pulled.values


class Session:
    """The steps of one worker.

    `phases_s` has the loop's time by phase: "pull" and "push" count only waiting, and evaluations do not count.
    `steps_done` counts steps that every shard has, `examples` their examples, `computed` all computed steps.
    """

    def __init__(
        self,
        client: ShardClient,
        leasing: Leasing,
        reading: Reading,
        *,
        round_steps: int | None,
        depth: int = 0,  # maximum steps pulled ahead, and pushes in progress, while a gradient is computed
        evaluate: Callable[[pb.EvaluationGrant], None],
        arrived: Arrived | None = None,  # called with the variables of each pull; see `Transfers`
    ) -> None:
        self.leasing = leasing
        self._reading = reading
        self._evaluate = evaluate
        self._depth_max = depth
        self.transfers = Transfers(client, leasing, round_steps, arrived)
        # A thread for each concurrent transfer: the pulls of this step and of `depth` more, and `depth` pushes.
        self._threads: Executor | None = ThreadPoolExecutor(2 * depth + 1, "transfer") if depth else None
        self._reader: Executor | None = ThreadPoolExecutor(1, "data") if depth and reading.ahead else None
        self._waiting: deque[LeasedStep] = deque()
        self._present: LeasedStep | None = None  # handed out, and not yet pushed, failed or given back
        self._pushing: deque[tuple[LeasedStep, pb.CompletedStep, Future[tuple[int, ...]]]] = deque()
        self._ahead: tuple[int, Future[Any]] | None = None  # the expected next step, and its examples
        self._evaluation: pb.EvaluationGrant | None = None
        self.phases_s = dict.fromkeys(("lease", "pull", "compute", "push"), 0.0)
        leasing.phases = lambda: {**self.phases_s, "transfer": self.transfers.transfer_s}
        self.steps_done = self.examples = self.computed = 0

    @property
    def _depth(self) -> int:
        return self._depth_max and min(self._depth_max, self.leasing.depth)

    @property
    def _executor(self) -> Executor:
        return self._threads if self._threads is not None and self._depth else INLINE

    def steps(self, stopping: Callable[[], bool]) -> Iterator[LeasedStep]:
        """Lease steps, with their weights, until the job is over or `stopping()`; then settle pushes and give back."""
        # A step that is not pushed when the next one is requested is given back. Evaluations and skipped steps are
        # processed here.
        while not stopping():
            self.give_back()
            self._fill()
            if self._waiting:
                step = self._waiting.popleft()
                if not self._begin(step):
                    continue
                self._present = step
                if step.grant.skip:
                    self.push(step, {}, loss=0.0, examples=0)
                else:
                    yield step
            elif self._evaluation is not None:
                self._evaluate(self._evaluation)
                self._evaluation = None
            elif self._pushing:
                self._settle()
            elif self.leasing.over:
                break
        self.give_back()
        while self._pushing:
            self._settle()
        for step in self._waiting:
            self.leasing.dropped(step.number)
        self._waiting.clear()

    def read(self, step: LeasedStep) -> Any:
        """Return a step's examples, or raise the error of the user's code that reads them."""
        return self._reading.read(step.number) if step.examples is None else step.examples.result()

    @contextmanager
    def computing(self, step: LeasedStep) -> Iterator[None]:
        """Time the computation of a step; one that takes too long is reported as failed."""
        started_s = time.perf_counter()
        try:
            with self.leasing.computing(step.grant):
                yield
        finally:
            self.phases_s["compute"] += time.perf_counter() - started_s

    def read_next(self) -> Any:
        """Read the next step's examples, unless another thread does, and return them, or None if they are not ready."""
        # Called while a model's results may still be computed. Without a waiting step, the expected one is read.
        reads, examples = self._reader is None and self._reading.meanwhile, None
        if self._waiting:
            following = self._waiting[0]
            if reads and following.examples is None and following.may_be_read:
                following.examples = INLINE.submit(self._reading.read, following.number)
            examples = following.examples
        elif reads and self._present is not None:
            number = self.leasing.expected(self._present.number)
            if number is not None:
                examples = INLINE.submit(self._reading.read, number)
                self._ahead = number, examples
        is_there = examples is not None and examples.done() and examples.exception() is None
        return examples.result() if examples is not None and is_there else None

    def push(
        self,
        step: LeasedStep,
        gradients: Mapping[str, Float32s] | PendingGradients | None,
        *,
        loss: float | None,
        examples: int,
        metrics: Sequence[pb.MetricSums] = (),
    ) -> ParashardError | None:
        """Push the present step to all shards; return the error if the push has failed already, else None."""
        # With a depth above 0 it completes during later steps. None for `gradients`: the step changes nothing.
        done = pb.CompletedStep(
            step=step.number, loss=loss, examples=examples, skipped=step.grant.skip, metrics=metrics
        )
        self._present = None
        self.computed += 1
        failpoints.hit("worker.compute.done")
        while len(self._pushing) >= max(1, self._depth):
            self._settle()
        started_s = time.perf_counter()
        pushed = self._executor.submit(self.transfers.push, step.grant, gradients, step.pulled)
        self._pushing.append((step, done, pushed))
        self.phases_s["push"] += time.perf_counter() - started_s
        error = None
        while self._pushing and not self._depth:
            error = self._settle()
        return error

    def failed(self, step: LeasedStep, error: BaseException | str, kind: pb.FailureKind | None = None) -> None:
        """Report the present step as failed; the coordinator decides on another attempt."""
        self._end(step)
        if kind is None:
            kind = pb.FAILURE_KIND_NOT_FINITE if isinstance(error, NonFiniteGradient) else pb.FAILURE_KIND_MODEL
        self.leasing.failed(step.number, error if isinstance(error, str) else described(error), kind)

    def give_back(self) -> None:
        """Give the present step back, if there is one: it is leased again, to this worker or another."""
        step = self._present
        if step is not None:
            self._end(step)
            self.leasing.dropped(step.number)

    def close(self) -> None:
        """Start no more transfers."""
        for executor in filter(None, (self._threads, self._reader)):
            executor.shutdown(wait=False, cancel_futures=True)

    # --- before a step is handed out ---

    def _fill(self) -> None:
        """Start pulls until the pipeline is full or no leased step is available."""
        while len(self._waiting) <= self._depth and self._evaluation is None:
            idle = not self._waiting and not self._pushing
            started_s = time.perf_counter()
            work = self.leasing.take(POLL_S if idle else 0.0)
            self.phases_s["lease"] += time.perf_counter() - started_s
            if work is None:
                return
            if isinstance(work, pb.EvaluationGrant):
                self._evaluation = work  # after the steps that wait with pulled weights, which would become stale
            else:
                started_s = time.perf_counter()
                self._waiting.append(self._leased(work))
                self.phases_s["pull"] += time.perf_counter() - started_s

    def _leased(self, grant: pb.Grant) -> LeasedStep:
        """Start the pull of a step, and the reading of its examples, as far as both may happen ahead."""
        step = LeasedStep(grant)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step.number and step.may_be_read:
            step.examples = ahead[1]
        if self._reader is not None and self._depth and step.may_be_read:
            step.examples = self._reader.submit(self._reading.read, step.number)
        if not self._reading.has_tables or grant.skip:
            step.pulling = self._executor.submit(self.transfers.pull, grant)
        elif step.may_be_read:
            self._pull_with_rows(step)
        return step

    def _pull_with_rows(self, step: LeasedStep) -> None:
        """Read a step's examples, unless that is in progress, and start a pull with the rows that they need."""
        with self.leasing.reading(step.grant):
            step.examples = examples = step.examples or INLINE.submit(self._reading.read, step.number)
            if self._executor is INLINE:
                examples.exception()  # waits for a thread that reads
        step.pulling = self._executor.submit(self._pull_rows, step.grant, examples)

    def _pull_rows(self, grant: pb.Grant, examples: Future[Any]) -> Pulled | None:
        """Pull for examples; None if they could not be read or looked up: `read` raises the error."""
        return None if examples.exception() else self.transfers.pull(grant, examples.result().keys)

    def _begin(self, step: LeasedStep) -> bool:
        """Wait for a step's weights, and announce it if requested; return False if it was given up."""
        announced = step.pulling is None
        if announced:
            if not self._announced(step.grant):
                return False
            self._pull_with_rows(step)
        started_s = time.perf_counter()
        try:
            step.pulled = self._pulled_of(step)
        except InvalidRequest as error:
            self.transfers.pull_refused(step.number, error)
            return False
        except ParashardError as error:
            self.transfers.report_failure(step.number, error)
            return False
        finally:
            pull_s = time.perf_counter() - started_s
            self.phases_s["pull"] += pull_s
        self._count_wait(step.pulled, pull_s)
        if announced or self._announced(step.grant):
            return True
        self._end(step)
        return False

    def _pulled_of(self, step: LeasedStep) -> Pulled | None:
        """Wait for a step's pull, and before that, with the time limit of `reading`, for its keys."""
        assert step.pulling is not None
        if self._reading.has_tables and step.examples is not None:
            with self.leasing.reading(step.grant):
                step.examples.exception()
        return step.pulling.result()

    def _count_wait(self, pulled: Pulled | None, pull_s: float) -> None:
        """Count a shard's wait for other workers' parts as "lease" time, not as a transfer."""
        if pulled is not None:
            waited_s = pulled.waited_s if self._executor is INLINE else min(pulled.waited_s, pull_s)
            self.phases_s["pull"] -= waited_s
            self.phases_s["lease"] += waited_s

    def _announced(self, grant: pb.Grant) -> bool:
        """Announce a step if its grant asks for it; if that fails, give the step back and return False."""
        if not grant.announce or self.leasing.announce(grant.step):
            return True
        self.leasing.dropped(grant.step)
        return False

    # --- after it was computed ---

    def _settle(self) -> ParashardError | None:
        """Wait for the oldest push and report its step as completed; on an error, report and return that."""
        step, done, pushed = self._pushing.popleft()
        started_s = time.perf_counter()
        try:
            done.incarnations.extend(pushed.result())
        except ParashardError as error:
            self._end(step)  # its transfers have ended
            self.transfers.report_failure(step.number, error)
            error.__traceback__ = None  # it keeps the gradients alive, by a cycle
            return error
        finally:
            self.phases_s["push"] += time.perf_counter() - started_s
        self._end(step)
        self.steps_done += 1
        self.examples += done.examples
        self.leasing.completed(done)
        return None

    def _end(self, step: LeasedStep) -> None:
        if step is self._present:
            self._present = None
        if step.pulled is not None:
            step.pulled.release()
            step.pulled = None
