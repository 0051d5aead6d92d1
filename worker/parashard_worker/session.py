"""Session: a worker's leased steps: pulled ahead, handed out, pushed, and reported or given back.

    for step in session.steps():
        with session.computing(step):
            loss, gradients = mine(step.values, session.read(step))
        session.push(step, gradients, loss=loss, examples=32)

With a pipeline depth of d, the weights of up to d following steps are pulled, and up to d pushes settle, while a
gradient is computed; with 0 everything happens strictly one after the other. The coordinator may lower the depth for a
while. Invariant: a step that was leased is completed, failed or given back, once. Knows no policy and no model.
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
    """Runs what is submitted at once, in the caller: the pipeline of depth 0."""

    def submit(self, fn: Callable[..., _Result], /, *args: object, **kwargs: object) -> Future[_Result]:
        """Run and return the outcome."""
        try:
            return _Finished(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # the future raises it where its result is read
            return _Finished(error=error)


class _Finished(Future[_Result]):
    """A future that has its outcome, and so none of the locks of others."""

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

    read: Callable[[int], Any]  # of a step; in a job with tables the result's `keys` are of the rows that it needs
    has_tables: bool = False
    ahead: bool = False  # a second thread may read examples of the next steps
    meanwhile: bool = False  # the session's thread may read the next ones before a model's results are there


@dataclass(slots=True)
class LeasedStep:
    """A leased step, with its weights once `Session.steps` hands it out."""

    grant: pb.Grant
    examples: Future[Any] | None = None  # None: read when they are asked for
    pulling: Future[Pulled | None] | None = None  # None: once the examples are read
    pulled: Pulled | None = None  # released after the push: a model may return views of its variables as gradients

    @property
    def number(self) -> int:
        """Its number, which is its identity."""
        return self.grant.step

    @property
    def may_be_read(self) -> bool:
        """Whether its examples may be read ahead; what killed a worker before is announced first."""
        return not self.grant.announce and not self.grant.skip

    @property
    def values(self) -> Mapping[str, Float32s]:
        """Every variable, and of each table the rows that its examples need."""
        assert self.pulled is not None
        return self.pulled.values


class Session:
    """The steps of one worker.

    `phases_s` is where the time went: of "pull" and "push" only what was waited for; evaluations are in none.
    `steps_done` counts steps that every shard has, `examples` those in them, `computed` also what came to nothing.
    """

    def __init__(
        self,
        client: ShardClient,
        leasing: Leasing,
        reading: Reading,
        *,
        round_steps: int | None,
        depth: int = 0,  # most steps pulled ahead, and pushes under way, while a gradient is computed
        evaluate: Callable[[pb.EvaluationGrant], None],
        arrived: Arrived | None = None,  # is told of the variables of each pull; see `Transfers`
    ) -> None:
        self.leasing = leasing
        self._reading = reading
        self._evaluate = evaluate
        self._depth_max = depth
        self.transfers = Transfers(client, leasing, round_steps, arrived)
        # A thread for whatever may be under way: the pulls of this step and of `depth` more, and `depth` pushes.
        self._threads: Executor | None = ThreadPoolExecutor(2 * depth + 1, "transfer") if depth else None
        self._reader: Executor | None = ThreadPoolExecutor(1, "data") if depth and reading.ahead else None
        self._waiting: deque[LeasedStep] = deque()
        self._present: LeasedStep | None = None  # handed out, and neither pushed nor given up
        self._pushing: deque[tuple[LeasedStep, pb.CompletedStep, Future[tuple[int, ...]]]] = deque()
        self._ahead: tuple[int, Future[Any]] | None = None  # a step that probably comes next, and its examples
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
        """Lease steps until the job is over or `stopping` says so; then finish or give back what is half done."""
        # A step that is not pushed when the next one is asked for is given back. Each comes with its weights;
        # evaluations and steps to skip are done on the way.
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
        """Return a step's examples, or raise what a user's code raised as they were read."""
        return self._reading.read(step.number) if step.examples is None else step.examples.result()

    @contextmanager
    def computing(self, step: LeasedStep) -> Iterator[None]:
        """Watch over the computation of a step: one that takes too long is reported as failed."""
        started_s = time.perf_counter()
        try:
            with self.leasing.computing(step.grant):
                yield
        finally:
            self.phases_s["compute"] += time.perf_counter() - started_s

    def read_next(self) -> Any:
        """Read the next step's examples, unless another thread does, and return them; None: they are not there."""
        # A model's results may still be on their way. With no leased step it is the one that is expected.
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
        """Push the present step to all shards; return why it did not go through, where that is known already."""
        # With a depth above 0 it settles beside later steps. None for `gradients`: the step moves nothing.
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
        """Report the present step as failed: another attempt is made, here or by another worker."""
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
        """Begin no more transfers."""
        for executor in filter(None, (self._threads, self._reader)):
            executor.shutdown(wait=False, cancel_futures=True)

    # --- before a step is handed out ---

    def _fill(self) -> None:
        """Start pulls until the pipeline is full or no step is at hand."""
        while len(self._waiting) <= self._depth and self._evaluation is None:
            idle = not self._waiting and not self._pushing
            started_s = time.perf_counter()
            work = self.leasing.take(POLL_S if idle else 0.0)
            self.phases_s["lease"] += time.perf_counter() - started_s
            if work is None:
                return
            if isinstance(work, pb.EvaluationGrant):
                self._evaluation = work  # done once nothing pulled waits: those weights would grow stale meanwhile
            else:
                started_s = time.perf_counter()
                self._waiting.append(self._leased(work))
                self.phases_s["pull"] += time.perf_counter() - started_s

    def _leased(self, grant: pb.Grant) -> LeasedStep:
        """Begin the pull of a step, and the reading of its examples, where these may come before its turn."""
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
        """Read a step's examples, unless that is under way, and begin a pull with the rows that they need."""
        with self.leasing.reading(step.grant):
            step.examples = examples = step.examples or INLINE.submit(self._reading.read, step.number)
            if self._executor is INLINE:
                examples.exception()  # waits for a thread that reads
        step.pulling = self._executor.submit(self._pull_rows, step.grant, examples)

    def _pull_rows(self, grant: pb.Grant, examples: Future[Any]) -> Pulled | None:
        """Pull for examples; None if they could not be read or looked up, which `read` tells."""
        return None if examples.exception() else self.transfers.pull(grant, examples.result().keys)

    def _begin(self, step: LeasedStep) -> bool:
        """Wait for a step's weights, and announce it where that is due; False: it was given up."""
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
            self.transfers.gave_up(step.number, error)
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
        """Wait for a step's pull, and first, under watch, for the keys that it needs."""
        assert step.pulling is not None
        if self._reading.has_tables and step.examples is not None:
            with self.leasing.reading(step.grant):
                step.examples.exception()
        return step.pulling.result()

    def _count_wait(self, pulled: Pulled | None, pull_s: float) -> None:
        """Count what a shard waited for other workers' parts as waiting for a lease: it is no transfer."""
        if pulled is not None:
            waited_s = pulled.waited_s if self._executor is INLINE else min(pulled.waited_s, pull_s)
            self.phases_s["pull"] -= waited_s
            self.phases_s["lease"] += waited_s

    def _announced(self, grant: pb.Grant) -> bool:
        """Say that what killed a worker before begins, where that is so; if that fails, give it back: False."""
        if not grant.announce or self.leasing.announce(grant.step):
            return True
        self.leasing.dropped(grant.step)
        return False

    # --- after it was computed ---

    def _settle(self) -> ParashardError | None:
        """Wait for the oldest push and report its step, or why it did not go through, which is returned."""
        step, done, pushed = self._pushing.popleft()
        started_s = time.perf_counter()
        try:
            done.incarnations.extend(pushed.result())
        except ParashardError as error:
            self._end(step)  # nothing of it is under way any more
            self.transfers.gave_up(step.number, error)
            error.__traceback__ = None  # it refers to the gradients, by a cycle
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
