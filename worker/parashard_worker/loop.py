"""The step loop: take a leased step, pull, compute its gradient, push, report.

With a pipeline depth of d, the weights of up to d following steps are pulled, and up to d pushes settle, while a
gradient is computed; with 0 everything happens strictly one after the other. Knows no policy: what it holds a lease for
it does; nor arithmetic, which is `parashard_worker.computing`'s.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from parashard._proto import coordinator_pb2 as pb
from parashard.client.shard_client import Pulled, ShardClient
from parashard.errors import (
    ConfigurationError,
    InvalidRequest,
    NonFiniteGradient,
    ParashardError,
    Redo,
    RetryLater,
    StaleIncarnation,
)
from parashard.models.blame import described
from parashard.plan.variables import Float32s
from parashard.process import failpoints
from parashard.process.logs import log
from parashard_worker.computing import Task, WrongResult
from parashard_worker.leasing import Leasing

POLL_S = 0.2

_Result = TypeVar("_Result")


class _Computed(NamedTuple):
    """A step whose push is under way."""

    step: int
    loss: float
    examples: int
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
        Steps pulled ahead, and pushes that may be under way, while a gradient is computed.
    keep : callable
        Stores evaluated weights, and returns their file in the store; "" where it could not.

    Attributes
    ----------
    phases_s : dict of str to float
        Where the time went: of "pull" and "push" only what was waited for; evaluations are in none.
    transfer_s : float
        Duration of every step's pull and push, added up, waited for or not.
    computed : int
        Steps whose gradient was computed, whatever became of it.
    staleness_pushes : int
        Staleness of every push, the greatest of its shards', added up.
    """

    def __init__(
        self,
        task: Task,
        client: ShardClient,
        leasing: Leasing,
        *,
        depth: int,
        keep: Callable[[int, Mapping[str, Float32s]], str] = lambda evaluation, values: "",
    ) -> None:
        self._keep = keep
        self._task = task
        self._client = client
        self._leasing = leasing
        self._depth = depth
        # A thread for whatever may be under way: the pulls of this step and of `depth` more, and `depth` pushes.
        self._transfers: Executor = ThreadPoolExecutor(2 * depth + 1, "transfer") if depth else Inline()
        self._pulling: deque[tuple[pb.Grant, Future[Pulled | None]]] = deque()
        self._pushing: deque[tuple[_Computed, Future[tuple[int, ...]]]] = deque()
        self._evaluation: pb.EvaluationGrant | None = None
        self.phases_s = dict.fromkeys(("lease", "pull", "compute", "push"), 0.0)
        self.transfer_s = 0.0
        self._adding = threading.Lock()
        self.steps = 0
        self.examples = 0
        self.computed = 0
        self.staleness_pushes = 0

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until the job is over or `stopping` says so; what is half done then is finished or given back."""
        while not stopping():
            self._fill()
            if self._pulling:
                self._compute(*self._pulling.popleft())
            elif self._evaluation is not None:
                self._evaluate(self._evaluation)
                self._evaluation = None
            elif self._pushing:
                self._settle()
            elif self._leasing.over:
                break
            self._leasing.phases_s = {**self.phases_s, "transfer": self.transfer_s}
        while self._pushing:
            self._settle()
        for grant, _ in self._pulling:
            self._leasing.dropped(grant.step)
        self._pulling.clear()
        self._transfers.shutdown(wait=False, cancel_futures=True)

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
                self._pulling.append((work, self._transfers.submit(self._pull, work)))
                self.phases_s["pull"] += time.perf_counter() - started_s

    def _pull(self, grant: pb.Grant) -> Pulled | None:
        """Pull after the lease, which bounds the staleness; a step to skip needs no weights."""
        if self._leasing.view > self._client.view.number:
            # Receipts of a shard's earlier incarnation, which may not know that it is over, do not count.
            self._client.refresh()
        if grant.skip:
            return None
        with self._transferring():
            pulled = self._client.pull(step=grant.step, round_=self._round(grant.step))
        failpoints.hit("worker.pull.done")
        return pulled

    def _compute(self, grant: pb.Grant, pulling: Future[Pulled | None]) -> None:
        started_s = time.perf_counter()
        try:
            pulled = pulling.result()
        except InvalidRequest as error:  # the step is as good as before: something else answers where the shard was
            log.warning("pull-refused", step=grant.step, error=str(error))
            self._leasing.dropped(grant.step)
            self._client.refresh()
            return
        except ParashardError as error:
            self._gave_up(grant.step, error)
            return
        finally:
            self.phases_s["pull"] += time.perf_counter() - started_s
        if grant.announce and not self._leasing.announce(grant.step):
            self._leasing.dropped(grant.step)
            return
        started_s = time.perf_counter()
        try:
            with self._leasing.computing(grant):
                loss, examples, gradients = self._gradients(grant.step, pulled)
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
        computed = _Computed(grant.step, loss, examples, grant.skip, pulled)
        started_s = time.perf_counter()
        self._pushing.append((computed, self._transfers.submit(self._push, grant, gradients, pulled)))
        self.phases_s["push"] += time.perf_counter() - started_s
        if not self._depth:
            self._settle()

    def _gradients(self, step: int, pulled: Pulled | None) -> tuple[float, int, dict[str, Float32s]]:
        return self._task.gradients(step, pulled.variables) if pulled is not None else (0.0, 0, {})

    def _push(self, grant: pb.Grant, gradients: Mapping[str, Float32s], pulled: Pulled | None) -> tuple[int, ...]:
        with self._transferring():
            rate = grant.learning_rate or None
            pushed = self._client.push(grant.step, gradients, pulled, skipped=grant.skip, learning_rate=rate)
        with self._adding:
            self.staleness_pushes += max((r.staleness or 0 for r in pushed.receipts), default=0)
        failpoints.hit("worker.push.done")
        return pushed.incarnations

    def _settle(self) -> None:
        """Wait for the oldest push and report its step."""
        computed, push = self._pushing.popleft()
        started_s = time.perf_counter()
        try:
            incarnations = push.result()
        except ParashardError as error:
            self._gave_up(computed.step, error)
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
            )
        )

    def _gave_up(self, step: int, error: ParashardError) -> None:
        """Report a step that did not go through, by what the error asks for."""
        if isinstance(error, InvalidRequest):
            self._leasing.failed(step, str(error))
        elif isinstance(error, Redo | RetryLater):
            # The round is over, or the shard has another incarnation: the step will be leased again
            # with a newer view.
            log.info("step-dropped", step=step, error=str(error))
            self._leasing.dropped(step)
            self._client.refresh()
        else:
            raise error

    @contextmanager
    def _transferring(self) -> Iterator[None]:
        """Add how long a pull or a push took, over any retries; called from several threads."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            with self._adding:
                self.transfer_s += time.perf_counter() - started_s

    def _evaluate(self, grant: pb.EvaluationGrant) -> None:
        round_ = grant.round if grant.for_round else None
        try:
            pulled = self._client.pull(round_=round_)
            if pulled.incarnations != tuple(grant.incarnations):
                raise StaleIncarnation("a shard has another incarnation than the one whose weights are to be judged")
        except (InvalidRequest, Redo, RetryLater) as error:  # not the model's fault: another attempt may succeed
            log.info("evaluation-dropped", evaluation=grant.evaluation, error=str(error))
            self._leasing.evaluation_dropped(grant.evaluation)
            self._client.refresh()
            return
        try:
            metrics = self._task.metrics(pulled.variables, lambda: self._leasing.computing(grant))
        except BaseException as error:  # the model's code
            log.warning("evaluation-failed", evaluation=grant.evaluation, exc_info=error)
            self._leasing.evaluated(grant, {}, described(error))
            return
        weights = self._keep(grant.evaluation, pulled.variables) if grant.store else ""
        pulled.release()
        self._leasing.evaluated(grant, metrics, weights=weights)

    def _round(self, step: int) -> int | None:
        return step // self._task.round_steps if self._task.round_steps else None
