"""Leasing: keeps a worker supplied with leased steps and tells the coordinator what became of them.

One thread makes every call, one at a time: it asks when few steps are left, reports what is complete with the same
call, and renews on a timer (P5). The step loop only takes from a queue and puts into lists. A call whose answer is lost
is made again with everything in it: all of it is safe to say twice.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from parashard.coordinator_client import CoordinatorClient
from parashard.errors import Fenced, ParashardError, RetryLater
from protos import coordinator_pb2 as pb

IDLE_WAIT_S = 1.0  # how long the coordinator may hold a call of an idle worker
PATIENCE_S = 60.0  # how long the coordinator may be away before the worker gives up
RETRY_PAUSE_S = 0.1
BATCH_TARGET_S = 0.25  # lease about as many steps as this long takes, so that a slow worker hoards none
SMOOTHING = 0.2

log = structlog.get_logger("worker")


@dataclass(frozen=True)
class Joined:
    """A worker's membership: its name, its life, and the time it may be silent."""

    run_id: str
    name: str
    incarnation: int
    lease_ttl_s: float


Work = pb.Grant | pb.EvaluationGrant


class Leasing:
    """The worker's side of leases.

    Parameters
    ----------
    client : CoordinatorClient
        Whom to ask.
    joined : Joined
        Who asks.
    batch : int
        Most steps to hold at once.
    ahead : int
        Ask for more when no more than so many steps wait in the queue.
    step_timeout_s : float
        A step in the works for longer is taken for hung: renewals stop and `failure` is set.
    """

    def __init__(
        self, client: CoordinatorClient, joined: Joined, *, batch: int, ahead: int, step_timeout_s: float
    ) -> None:
        self._client = client
        self._joined = joined
        self._batch = batch
        self._ahead = ahead
        self._step_timeout_s = step_timeout_s
        self._changed = threading.Condition()
        self._queue: deque[Work] = deque()
        self._working: dict[int, float] = {}  # step -> when it was taken from the queue
        self._evaluating: set[int] = set()
        self._completed: list[pb.CompletedStep] = []
        self._failed: list[pb.FailedStep] = []
        self._evaluated: list[pb.EvaluationResult] = []
        self._ask_again = True
        self._leaving = False
        self._sequence = 0
        self._step_s = 0.0  # smoothed time per step
        self._last_done_s = 0.0
        self.phases_s: dict[str, float] = {}
        self.view = 0
        self.state = pb.JOB_STATE_STARTING
        self.reason = ""
        self.failure: ParashardError | None = None
        self._thread = threading.Thread(target=self._run, name="leasing", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    @property
    def over(self) -> bool:
        """There will be no more work for this worker."""
        return self._leaving or self.failure is not None or self.state in (pb.JOB_STATE_DONE, pb.JOB_STATE_FAILED)

    def take(self, timeout_s: float) -> Work | None:
        """Return the next piece of work, waiting for it at most so long; None if there is none."""
        with self._changed:
            if not self._queue and timeout_s > 0 and not self.over:
                self._changed.wait_for(lambda: self._queue or self.over, timeout_s)
            if self.over or not self._queue:
                return None
            work = self._queue.popleft()
            if isinstance(work, pb.Grant):
                self._working[work.step] = time.monotonic()
            else:
                self._evaluating.add(work.evaluation)
            self._changed.notify_all()
            return work

    def completed(self, step: pb.CompletedStep) -> None:
        """Report a step that every shard acknowledged."""
        with self._changed:
            self._end_work(step.step)
            self._completed.append(step)
            self._changed.notify_all()

    def failed(self, step: int, reason: str) -> None:
        """Report a step that could not be computed."""
        with self._changed:
            self._end_work(step)
            self._failed.append(pb.FailedStep(step=step, reason=reason[:500]))
            self._changed.notify_all()

    def dropped(self, step: int) -> None:
        """Give a step back: it is in already, or must be leased again."""
        with self._changed:
            self._end_work(step)
            self._changed.notify_all()

    def evaluated(self, number: int, metrics: Mapping[str, float], error: str = "") -> None:
        """Report an evaluation's outcome."""
        with self._changed:
            self._evaluating.discard(number)
            self._evaluated.append(pb.EvaluationResult(evaluation=number, metrics=dict(metrics), error=error[:500]))
            self._ask_again = True
            self._changed.notify_all()

    def leave(self, timeout_s: float) -> None:
        """Report what is done, give back what is held, and end the thread."""
        with self._changed:
            self._leaving = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # --- the thread ---

    def _run(self) -> None:
        silent_since_s = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(self._must_call, self._joined.lease_ttl_s / 3)
                hung = self._hung()
                if hung is not None:
                    self._stop(RetryLater(f"step {hung} has taken over {self._step_timeout_s:.0f} s"))
                    return
                request = self._request()
                leaving = self._leaving
            try:
                reply = self._client.lease(request)
            except RetryLater as error:
                if leaving or time.monotonic() - silent_since_s > PATIENCE_S:
                    self._stop(error)
                    return
                log.warning("coordinator-away", error=str(error))
                time.sleep(RETRY_PAUSE_S)
                continue
            except ParashardError as error:
                self._stop(error)
                return
            silent_since_s = time.monotonic()
            self._accept(request, reply)
            if leaving or self.over:
                return

    def _must_call(self) -> bool:
        if self._leaving or self._failed or self._evaluated:
            return True
        if len(self._queue) > self._ahead:
            return False
        idle = not self._queue and not self._working and not self._evaluating
        return self._ask_again or idle or bool(self._completed)

    def _request(self) -> pb.LeaseRequest:
        idle = not self._queue and not self._working and not self._evaluating
        self._sequence += 1
        held = [work.step for work in self._queue if isinstance(work, pb.Grant)] + list(self._working)
        waiting = [work.evaluation for work in self._queue if isinstance(work, pb.EvaluationGrant)]
        return pb.LeaseRequest(
            run_id=self._joined.run_id,
            worker=self._joined.name,
            incarnation=self._joined.incarnation,
            sequence=self._sequence,
            held=[] if self._leaving else held,
            held_evaluations=[] if self._leaving else [*waiting, *self._evaluating],
            completed=self._completed,
            failed=self._failed,
            evaluated=self._evaluated,
            want=0 if self._leaving else max(0, self._wanted() - len(self._queue)),
            wait_s=min(IDLE_WAIT_S, self._joined.lease_ttl_s / 4) if idle and not self._leaving else 0.0,
            leaving=self._leaving,
            phases=pb.PhaseSeconds(**self.phases_s),
        )

    def _wanted(self) -> int:
        if self._step_s <= 0:
            return min(self._batch, self._ahead + 1)
        return max(self._ahead + 1, min(self._batch, round(BATCH_TARGET_S / self._step_s)))

    def _accept(self, request: pb.LeaseRequest, reply: pb.LeaseReply) -> None:
        with self._changed:
            del self._completed[: len(request.completed)]
            del self._failed[: len(request.failed)]
            del self._evaluated[: len(request.evaluated)]
            if reply.revoked:
                gone = set(reply.revoked)
                self._queue = deque(w for w in self._queue if isinstance(w, pb.EvaluationGrant) or w.step not in gone)
            if not self._leaving:
                self._queue.extend(reply.evaluations)
                self._queue.extend(reply.granted)
            self._ask_again = bool(reply.granted or reply.evaluations)
            self.state, self.view, self.reason = reply.state, reply.view, reply.reason
            self._changed.notify_all()

    def _end_work(self, step: int) -> None:
        self._working.pop(step, None)
        now_s = time.monotonic()
        if self._last_done_s:
            took_s = now_s - self._last_done_s
            self._step_s = took_s if not self._step_s else self._step_s + SMOOTHING * (took_s - self._step_s)
        self._last_done_s = now_s

    def _hung(self) -> int | None:
        now_s = time.monotonic()
        return next((s for s, taken_s in self._working.items() if now_s - taken_s > self._step_timeout_s), None)

    def _stop(self, error: ParashardError) -> None:
        with self._changed:
            if not (self._leaving and not isinstance(error, Fenced)):
                self.failure = error
            self._changed.notify_all()
