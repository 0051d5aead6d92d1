"""The step loop: take a leased step, pull, compute its gradient, push, report.

With a pipeline depth of d, the weights of up to d following steps are pulled, and up to d pushes settle, while a
gradient is computed; with 0 everything happens strictly one after the other. Knows no policy: what it holds a lease for
it does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import structlog
import tenacity

from parashard import failpoints
from parashard.client import Pulled, ShardClient, View
from parashard.data.base import Array, Batch, DataSource
from parashard.errors import (
    ConfigurationError,
    InvalidRequest,
    NonFiniteGradient,
    NotReady,
    ParashardError,
    Redo,
    RetryLater,
    StaleIncarnation,
    Unreachable,
)
from parashard.models.base import Model
from parashard.partition import Plan
from parashard.steps import StepPlan
from parashard.variables import Float32s
from protos import coordinator_pb2 as pb
from worker.device import Device
from worker.leasing import Leasing

POLL_S = 0.2
RIDING_PAUSE_S = 0.02
RIDING_PAUSE_MAX_S = 0.5
EVALUATION_EXAMPLES = 1000  # held-out examples that are judged at once

_Result = TypeVar("_Result")

log = structlog.get_logger("worker")


@dataclass(frozen=True)
class Task:
    """What a worker computes: the model over the data, on a device."""

    model: Model
    source: DataSource
    steps: StepPlan
    plan: Plan
    device: Device
    clip_norm: float | None
    round_steps: int | None  # sync mode: N


@dataclass(frozen=True)
class _Computed:
    """A step whose push is under way."""

    step: int
    loss: float
    examples: int
    skipped: bool


class Inline(Executor):
    """Runs what is submitted at once, in the caller: the pipeline of depth 0."""

    def submit(self, fn: Callable[..., _Result], /, *args: object, **kwargs: object) -> Future[_Result]:
        """Run and return the outcome as a finished future."""
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # the future carries it to whoever asks for the result
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
    refresh : callable
        Returns the shards' present view, or raises RetryLater.
    depth : int
        Steps pulled ahead, and pushes that may be under way, while a gradient is computed.
    patience_s : float
        How long a pull or a push waits for a shard that is away, or for its next life.
    giving_up : Event, optional
        Once set, nothing is waited for any more.
    """

    def __init__(
        self,
        task: Task,
        client: ShardClient,
        leasing: Leasing,
        refresh: Callable[[], View],
        *,
        depth: int,
        patience_s: float = 60.0,
        giving_up: threading.Event | None = None,
    ) -> None:
        self._task = task
        self._client = client
        self._leasing = leasing
        self._refresh = refresh
        self._depth = depth
        self._patience_s = patience_s
        self._giving_up = giving_up or threading.Event()
        self._transfers: Executor = ThreadPoolExecutor(2 * depth, "transfer") if depth else Inline()
        self._pulling: deque[tuple[pb.Grant, Future[Pulled | None]]] = deque()
        self._pushing: deque[tuple[_Computed, Future[tuple[int, ...]]]] = deque()
        self._evaluation: pb.EvaluationGrant | None = None
        self.phases_s = dict.fromkeys(("lease", "pull", "compute", "push"), 0.0)
        self.steps = 0
        self.examples = 0

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
            self._leasing.phases_s = dict(self.phases_s)
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
        """Pull after the lease (P9); a step to skip needs no weights."""
        if self._leasing.view > self._client.view.number:
            self._refresh_view()  # receipts of a shard's earlier life, which may not know that it is over, do not count
        if grant.skip:
            return None
        pulled = self._riding(lambda: self._client.pull(step=grant.step, round_=self._round(grant.step)))
        failpoints.hit("worker.pull.done")
        return pulled

    def _compute(self, grant: pb.Grant, pulling: Future[Pulled | None]) -> None:
        started_s = time.perf_counter()
        try:
            pulled = pulling.result()
        except ParashardError as error:
            self._gave_up(grant.step, error)
            return
        finally:
            self.phases_s["pull"] += time.perf_counter() - started_s
        started_s = time.perf_counter()
        try:
            with self._leasing.computing(grant):
                loss, examples, gradients = self._gradients(grant, pulled)
        except ConfigurationError:
            raise
        except Exception as error:  # a model is somebody else's code: whatever it raises is the step's failure (P6)
            log.warning("step-failed", step=grant.step, exc_info=error)
            self._leasing.failed(grant.step, f"{type(error).__name__}: {error}{self._examples_of(grant.step)}")
            return
        finally:
            self.phases_s["compute"] += time.perf_counter() - started_s
        failpoints.hit("worker.compute.done")
        while len(self._pushing) >= max(1, self._depth):
            self._settle()
        computed = _Computed(grant.step, loss, examples, grant.skip)
        started_s = time.perf_counter()
        self._pushing.append((computed, self._transfers.submit(self._push, grant, gradients, pulled)))
        self.phases_s["push"] += time.perf_counter() - started_s
        if not self._depth:
            self._settle()

    def _push(self, grant: pb.Grant, gradients: Mapping[str, Float32s], pulled: Pulled | None) -> tuple[int, ...]:
        pushed = self._riding(lambda: self._client.push(grant.step, gradients, pulled, skipped=grant.skip))
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
            self._leasing.failed(step, f"{error}{self._examples_of(step)}")
        elif isinstance(error, Redo | RetryLater):
            # The round is over, or the shard has another life: whoever leases the step next knows more than we do.
            log.info("step-dropped", step=step, error=str(error))
            self._leasing.dropped(step)
            self._refresh_view()
        else:
            raise error

    def _riding(self, operation: Callable[[], _Result]) -> _Result:
        """Run an operation; while a shard is away or has begun another life, learn where it is and run it again.

        The whole operation: shards that have a push already say so, and the step is its identity (P1).
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((Unreachable, NotReady, StaleIncarnation)),
            wait=tenacity.wait_random_exponential(RIDING_PAUSE_S, RIDING_PAUSE_MAX_S),
            stop=tenacity.stop_after_delay(self._patience_s) | tenacity.stop_when_event_set(self._giving_up),
            sleep=tenacity.sleep_using_event(self._giving_up),
            before_sleep=lambda _: self._refresh_view(),
            reraise=True,
        )
        return retrying(operation)

    def _refresh_view(self) -> None:
        try:
            self._client.use(self._refresh())
        except RetryLater as error:
            log.info("no-view", error=str(error))  # whoever needs one asks again

    # --- arithmetic ---

    def _gradients(self, grant: pb.Grant, pulled: Pulled | None) -> tuple[float, int, dict[str, Float32s]]:
        if pulled is None:
            return 0.0, 0, {}
        task = self._task
        indices = task.steps.indices(grant.step)
        inputs, targets = task.source.examples(indices)
        batch = task.device.batch_from_host(
            Batch(grant.step, task.steps.epoch_of(grant.step), indices, inputs, targets)
        )
        variables = task.device.variables_from_host(pulled.variables)
        loss, raw = task.model.loss_and_gradients(variables, batch, task.device.xp)
        gradients = task.device.to_host(self._trainable(raw))
        norm = _global_norm(gradients) if task.clip_norm is not None else 0.0
        if not all(
            _is_finite(gradient) for gradient in gradients.values()
        ):  # P6: before the first shard is sent anything
            raise NonFiniteGradient(f"step {grant.step}: the gradient has a value that is not finite (loss {loss:.3g})")
        if task.clip_norm is not None and norm > task.clip_norm:
            factor = np.float32(task.clip_norm / norm)
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        return float(loss), len(indices), gradients

    def _trainable(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Check a model's gradients against its variables, and leave out frozen ones."""
        variables = self._task.plan.variables
        for name, gradient in gradients.items():
            if name not in variables:
                raise ConfigurationError(f"the model returned a gradient for {name!r}, which is none of its variables")
            if tuple(gradient.shape) != variables[name].shape:
                raise ConfigurationError(
                    f"the model's gradient for {name!r} has shape {tuple(gradient.shape)}, the variable has "
                    f"{variables[name].shape}"
                )
        return {name: g for name, g in gradients.items() if not variables[name].frozen}

    def _evaluate(self, grant: pb.EvaluationGrant) -> None:
        task = self._task
        totals: dict[str, float] = {}
        examples = task.source.spec.held_out
        try:
            round_ = grant.round if grant.for_round else None
            pulled = self._riding(lambda: self._client.pull(round_=round_))
            variables = task.device.variables_from_host(pulled.variables)
            for start in range(0, examples, EVALUATION_EXAMPLES):
                stop = min(examples, start + EVALUATION_EXAMPLES)
                inputs, targets = task.source.held_out(start, stop)
                batch = task.device.batch_from_host(Batch(-1, -1, np.arange(start, stop), inputs, targets))
                with self._leasing.computing(grant):
                    metrics = task.model.evaluate(variables, batch, task.device.xp)
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + float(value) * (stop - start)
        except (Redo, RetryLater) as error:  # not the model's fault: whoever has it next knows more
            log.info("evaluation-dropped", evaluation=grant.evaluation, error=str(error))
            self._leasing.evaluation_dropped(grant.evaluation)
            self._refresh_view()
            return
        except Exception as error:  # the model's code
            log.warning("evaluation-failed", evaluation=grant.evaluation, exc_info=error)
            self._leasing.evaluated(grant.evaluation, {}, f"{type(error).__name__}: {error}")
            return
        self._leasing.evaluated(grant.evaluation, {name: total / examples for name, total in totals.items()})

    def _round(self, step: int) -> int | None:
        return step // self._task.round_steps if self._task.round_steps else None

    def _examples_of(self, step: int) -> str:
        indices = self._task.steps.indices(step)
        shown = ", ".join(str(i) for i in indices[:8])
        return f" (examples {shown}{', ...' if len(indices) > 8 else ''})"


def _is_finite(gradient: Float32s) -> bool:
    """Tell whether every value is finite: float32 values that are cannot sum to one in float64 that is not."""
    return bool(np.isfinite(gradient.sum(dtype=np.float64)))


def _global_norm(gradients: Mapping[str, Float32s]) -> float:
    """Return the Euclidean norm of all gradients together, in float64, in name order."""
    squares = (np.square(gradients[name], dtype=np.float64).sum() for name in sorted(gradients))
    return float(np.sqrt(sum(squares)))
