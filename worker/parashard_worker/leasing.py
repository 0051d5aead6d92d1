"""Leasing: keeps a worker supplied with leased steps and reports their outcomes to the coordinator.

One thread makes every call, one at a time; the step loop only takes from a queue and appends to lists.
`parashard_worker.leased` decides content and time of the calls; this module adds the lock, the clock and the thread.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import ParashardError, RetryLater
from parashard.process import failpoints
from parashard.process.logs import log
from parashard.process.run_files import short_path
from parashard.process.shell import AwakeClock, ExitCode
from parashard.protocol.coordinator_client import CoordinatorClient
from parashard.telemetry.tracing import NO_SPAN
from parashard_worker.leased import IDLE_WAIT_S, Joined, LeasedWork, LeaseLimits, Work

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer

SLACK_S = 1e-3  # a call that moves forward by less than this does not wake the thread
REPLY_DEADLINE_MIN_S = 1.0
STACK_LINES_MAX = 20
STALL_S = 2.0  # if a call is late by more than its bound plus this, the process was suspended


def end_process(reason: str) -> None:
    """End this process, whose step loop is stuck in a model, so that it is restarted."""
    try:
        log.critical("hung", reason=reason)
    finally:
        os._exit(ExitCode.RETRY)  # even if the log cannot be written


def log_stacks() -> None:
    """Log the stack of each thread of this process, the innermost lines first: one of them hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():
        lines = [f"{short_path(at.filename)}:{at.lineno} {at.name}" for at in reversed(traceback.extract_stack(frame))]
        log.critical("stack", thread=names.get(number, number), lines=" < ".join(lines[:STACK_LINES_MAX]))


class Leasing:
    """The worker's side of leases.

    `join` joins the job again after a restart of the coordinator; `on_hung` is called with the reason once a hung
    step was reported, and ends the process by default.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        joined: Joined,
        limits: LeaseLimits,
        *,
        join: Callable[[], Joined],
        on_hung: Callable[[str], None] | None = None,
        tracer: Tracer | None = None,
        evaluates: bool = True,
    ) -> None:
        self._client = client
        self._join = join
        self._on_hung = on_hung or end_process
        self._tracer = tracer
        self._run_id, self.worker = joined.run_id, joined.name
        self._retry_budget_s = limits.retry_budget_s
        self._changed = threading.Condition()
        self._reply_deadline_s = max(
            REPLY_DEADLINE_MIN_S, joined.lease_ttl_s / 3
        )  # a lost reply costs less than a lease
        # This worker's clock for all waits. It is read around every call, which the coordinator may hold.
        self.clock = AwakeClock(self._reply_deadline_s + IDLE_WAIT_S + STALL_S, time.monotonic)
        self.work = LeasedWork(joined, limits, self.clock.now_s(), evaluates=evaluates)
        """Its `hung`, `state`, `reason` and `failure` tell how the worker ended."""
        self.phases: Callable[[], Mapping[str, float]] = dict
        """Returns the step loop's time, in seconds by phase; every call reports it."""
        self.gpu_memory: Callable[[], pb.GpuMemory | None] = lambda: None
        """Returns the GPU's memory as its driver reports it; every call reports it."""
        self._pausing_until_s = -math.inf  # until when the leasing thread sleeps; -inf: it does not
        self._thread = threading.Thread(target=self._run, name="leasing", daemon=True)

    def start(self) -> None:
        """Start the leasing thread."""
        self._thread.start()

    @property
    def over(self) -> bool:
        """This worker gets no more work."""
        return self.work.over

    @property
    def depth(self) -> int:
        """Steps whose pulls and pushes may overlap with computing, as of the last answer."""
        return self.work.depth

    @property
    def view(self) -> int:
        """Number of the shards' view, as of the last answer."""
        return self.work.view

    def expected(self, step: int) -> int | None:
        """Return the step that is probably leased next, or None; a worker with its own process does not know it."""
        return None

    def take(self, timeout_s: float) -> Work | None:
        """Return the next piece of work, waiting for it at most `timeout_s`; None if there is none."""
        with self._changed:
            work = self.work.take(self.clock.now_s())
            if work is None and timeout_s > 0 and not self.work.over:
                self._changed.wait_for(lambda: self.work.over or self.work.waiting, timeout_s)
                work = self.work.take(self.clock.now_s())
            self._wake()
        if self._tracer is not None and isinstance(work, pb.Grant):
            self._tracer.begin_step(self._run_id, self.worker, work)
        return work

    @contextmanager
    def computing(self, work: Work) -> Iterator[None]:
        """Apply the step timeout to a model's computation: a hung one is reported, and `on_hung` is called."""
        # For an announced step this waits at its end until the coordinator knows that the model has returned, so that a
        # later death does not count against the step.
        with self._changed:
            self.work.computing(work, self.clock.now_s())
        try:
            step = work.step if isinstance(work, pb.Grant) else None
            with NO_SPAN if self._tracer is None else self._tracer.phase("compute", self.worker, step):
                yield
        finally:
            with self._changed:
                self.work.computing(None, self.clock.now_s())
                self._wake()
                self._changed.wait_for(lambda: not self.work.retracting or self.work.over, self._retry_budget_s)

    @contextmanager
    def reading(self, work: Work) -> Iterator[None]:
        """Apply the step timeout to the reading of examples and their keys, before `computing`."""
        with self._changed:
            self.work.reading(work, self.clock.now_s())
        try:
            yield
        finally:
            with self._changed:
                self.work.reading(None, self.clock.now_s())

    def announce(self, step: int) -> bool:
        """Tell the coordinator that a step is computed now, and wait for its ack; False: it gave none."""
        # From here until `computing` is left, this process's death counts as a failed attempt at the step.
        with self._changed:
            self.work.announce(step)
            self._wake()
            self._changed.wait_for(lambda: self.work.announced or self.work.over, self._retry_budget_s)
            return self.work.announced and not self.work.over

    def completed(self, step: pb.CompletedStep) -> None:
        """Report a step that every shard acknowledged."""
        with self._changed:
            self.work.completed(step, self.clock.now_s())
            self._wake()
        if self._tracer is not None:
            self._tracer.end_step(step.step, "completed", loss=step.loss, examples=step.examples)

    def failed(self, step: int, reason: str, kind: pb.FailureKind = pb.FAILURE_KIND_UNSPECIFIED) -> None:
        """Report a step that could not be computed."""
        with self._changed:
            self.work.failed(step, reason, self.clock.now_s(), kind)
            self._wake()
        if self._tracer is not None:
            self._tracer.end_step(step, "failed", reason)

    def dropped(self, step: int, *, queue_too: bool = False) -> None:
        """Give a step back: it is applied already, or must be leased again; `queue_too`: with all queued steps."""
        with self._changed:
            self.work.dropped(step, self.clock.now_s(), queue_too=queue_too)
            self._wake()
        if self._tracer is not None:
            self._tracer.end_step(step, "dropped")

    def evaluated(self, result: pb.EvaluationResult) -> None:
        """Report the outcome of an evaluation."""
        with self._changed:
            self.work.evaluated(result)
            self._wake()

    def evaluation_dropped(self, number: int) -> None:
        """Give an evaluation back."""
        with self._changed:
            self.work.evaluation_dropped(number)
            self._wake()

    def drifted(self, drift: pb.StepDrift) -> None:
        """Report a measured drift, with the next call."""
        with self._changed:
            self.work.drifted(drift)

    def warned(self, text: str) -> None:
        """Report a Python warning, with the next call."""
        with self._changed:
            self.work.warned(text)

    def leave(self, timeout_s: float) -> None:
        """Report completed steps, give back all leases, and end the thread, within `timeout_s`."""
        with self._changed:
            self.work.leave()
            self._changed.notify_all()  # the step loop, too, if it waits
        self._thread.join(timeout_s)

    def _wake(self) -> None:
        """Wake the leasing thread if the next call is due earlier now; most changes do not need that."""
        now_s = self.clock.now_s()
        if now_s + self.work.due_in_s(now_s) < self._pausing_until_s - SLACK_S:
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._ask_until_over()
        except BaseException as error:  # a bug: the step loop must not wait for this thread
            with self._changed:
                self.work.failure = RetryLater(f"the thread that leases steps has died: {error!r}")
                self._changed.notify_all()
            raise

    def _ask_until_over(self) -> None:
        unanswered = ""
        while True:
            gpu_memory = self.gpu_memory()  # without the lock: a driver may be slow
            with self._changed:
                while (pause_s := self.work.due_in_s(now_s := self.clock.now_s())) > 0:
                    self._pausing_until_s = now_s + pause_s
                    self._changed.wait(pause_s)
                    self._pausing_until_s = -math.inf
                request = self.work.request(self.clock.now_s(), self.phases(), gpu_memory)
                self._changed.notify_all()
            if request is None:
                if self.work.hung:
                    log_stacks()
                    self._on_hung(self.work.hung)
                return
            failpoints.hit("worker.lease.reporting")
            try:
                if self.work.must_rejoin:
                    joined = self._join()
                    log.info("joined-again", worker=joined.name, incarnation=joined.incarnation)
                    with self._changed:
                        self.work.joined_again(joined)
                    continue  # the request had the worker's earlier name and incarnation
                reply = self._client.lease(request, self._reply_deadline_s)
            except ParashardError as error:
                if str(error) != unanswered:  # once, and not with each attempt
                    log.warning("no-lease-reply", error=str(error))
                unanswered = str(error)
                with self._changed:
                    self.work.lost(error, self.clock.now_s())
                    self._changed.notify_all()
            else:
                unanswered = ""
                if reply.granted:
                    failpoints.hit("worker.lease.granted")
                with self._changed:
                    self.work.accept(request, reply, self.clock.now_s())
                    self._changed.notify_all()
