"""LeasedWork: a worker's leased steps, its pending reports, and the time of its next call to the coordinator.

Pure: `now_s` is an argument, nothing here waits, sends or locks. One call is in progress at a time; it reports
completed steps, renews leases and asks for more when few steps are left. A call whose answer is lost is repeated with
all its content, which is idempotent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import Fenced, ParashardError, RetryLater, UnknownWorker

IDLE_WAIT_S = 1.0  # how long the coordinator may hold a call of an idle worker
RETRY_PAUSE_S = 0.1
BATCH_TARGET_S = 0.25  # lease about as many steps as take this long, so that a slow worker holds few
SMOOTHING = 0.2
REPORTS_MAX = 4096  # completed steps in one call; the coordinator accepts no more
REPORT_BYTES_MAX = 1 << 20  # size of these in one call
REASON_CHARACTERS_MAX = 500  # of a failure
UNSTORED_MAX = 16384  # reported steps that are kept for a restarted coordinator

Work = pb.Grant | pb.EvaluationGrant


class Joined(NamedTuple):
    """A worker's membership: its name, its incarnation, and how long it may be silent."""

    run_id: str
    name: str
    incarnation: int
    lease_ttl_s: float


class LeaseLimits(NamedTuple):
    """Limits of a worker's leases and waits.

    A step or an evaluation that exceeds `step_timeout_s` counts as hung: it is reported as failed, the worker leaves,
    and `hung` has the reason; the step loop is stuck and cannot react.
    """

    batch: int  # maximum queue length that is asked for
    ahead: int  # ask for more when at most this many are queued; the coordinator may change the number
    step_timeout_s: float
    retry_budget_s: float = 60.0  # how long the coordinator may be unreachable before the worker gives up


def result_of(grant: pb.EvaluationGrant, **found: Any) -> pb.EvaluationResult:
    """Return the outcome of a granted evaluation, with the incarnations that the grant names."""
    return pb.EvaluationResult(evaluation=grant.evaluation, incarnations=grant.incarnations, **found)


class LeasedWork:
    """The state of a worker's leases.

    Invariant: a step is in `_queue`, in `_working`, or in one of the lists of reports, never in two of them.
    """

    def __init__(self, joined: Joined, limits: LeaseLimits, now_s: float, *, evaluates: bool = True) -> None:
        self._evaluates = evaluates
        self._joined = joined
        self._limits = limits
        self.ahead = limits.ahead
        self.depth = limits.ahead
        self._queue: deque[Work] = deque()
        self._working: dict[int, float] = {}  # step -> when it was taken from the queue
        self._evaluating: set[int] = set()
        self._computing: tuple[Work, float] | None = None  # the work being computed or read, and since when
        self._announcing: int | None = None  # a step that the coordinator must know of before it is computed
        self.announced = False
        """The coordinator has acknowledged the announced step."""
        self.retracting = False
        """The model has returned from an announced step, and the coordinator has not acknowledged that yet."""
        self._completed: list[pb.CompletedStep] = []
        self._unstored: deque[tuple[int, pb.CompletedStep]] = deque(maxlen=UNSTORED_MAX)
        """Reported steps that the coordinator has not stored yet, with the number of the call."""
        self._failed: list[pb.FailedStep] = []
        self._evaluated: list[pb.EvaluationResult] = []
        self._drifts: list[pb.StepDrift] = []
        self._warnings: list[str] = []
        self._ask_again = True
        self._unanswered = False
        self._leaving = False
        self._left = False
        self._sequence = 0
        self._step_s = 0.0  # smoothed time per step
        self._last_done_s = now_s
        self._called_s = now_s
        self._silent_since_s = now_s  # the first call since the last answer
        self._not_before_s = now_s  # earliest time of a call that only asks for work
        self.view = 0
        self.state = pb.JOB_STATE_STARTING
        self.reason = ""
        self.failure: ParashardError | None = None
        self.hung = ""
        self._rejoin_at_once = False
        self.must_rejoin = False
        """The coordinator does not know this worker: it has to join again before the next call."""

    @property
    def over(self) -> bool:
        """This worker gets no more work."""
        return self._leaving or self.ended

    @property
    def ended(self) -> bool:
        """No more calls are made."""
        return self._left or self.failure is not None or self.state in (pb.JOB_STATE_DONE, pb.JOB_STATE_FAILED)

    @property
    def waiting(self) -> int:
        """Pieces of work in the queue."""
        return len(self._queue)

    # --- the step loop's side ---

    def take(self, now_s: float) -> Work | None:
        """Return the next piece of work; None if there is none now."""
        if self.over or not self._queue:
            return None
        work = self._queue.popleft()
        if isinstance(work, pb.Grant):
            self._working[work.step] = now_s
        else:
            self._evaluating.add(work.evaluation)
        return work

    def announce(self, step: int) -> None:
        """Announce the step that is computed next, in all calls until the model has returned."""
        self._announcing, self.announced = step, False

    def computing(self, work: Work | None, now_s: float) -> None:
        """Record the work that the model computes from now on; None: it has returned."""
        self.reading(work, now_s)
        if work is None and self._announcing is not None:
            self._announcing, self.retracting = None, self.announced

    def reading(self, work: Work | None, now_s: float) -> None:
        """Record the work whose examples are being read; None: done. Unlike `computing`, keep an announcement."""
        self._computing = None if work is None else (work, now_s)

    def completed(self, step: pb.CompletedStep, now_s: float) -> None:
        """Report a step that every shard acknowledged."""
        self._end_work(step.step, now_s)
        self._completed.append(step)

    def failed(self, step: int, reason: str, now_s: float, kind: pb.FailureKind = pb.FAILURE_KIND_UNSPECIFIED) -> None:
        """Report a step that could not be computed."""
        self._end_work(step, now_s)
        self._failed.append(pb.FailedStep(step=step, reason=reason[:REASON_CHARACTERS_MAX], kind=kind))

    def dropped(self, step: int, now_s: float, *, queue_too: bool = False) -> None:
        """Give a step back: it is applied already, or must be leased again; `queue_too`: with all queued steps."""
        self._end_work(step, now_s)
        if queue_too:
            self._empty_queue()
            self._ask_again = True

    def evaluated(self, result: pb.EvaluationResult) -> None:
        """Report the outcome of an evaluation."""
        self._evaluating.discard(result.evaluation)
        self._evaluated.append(result)
        self._ask_again = True

    def evaluation_dropped(self, number: int) -> None:
        """Give an evaluation back."""
        self._evaluating.discard(number)

    def warned(self, text: str) -> None:
        """Report a warning with the next call."""
        self._warnings.append(text)

    def drifted(self, drift: pb.StepDrift) -> None:
        """Report a measured drift with the next call."""
        self._drifts.append(drift)

    def leave(self) -> None:
        """Take no more work; the next call reports completed steps and gives back all leases."""
        self._leaving = True

    # --- the calls ---

    def due_in_s(self, now_s: float) -> float:
        """Return the time until the next call; 0: make it now."""
        if self.ended:
            return 0.0
        due_s = self._called_s + self._joined.lease_ttl_s / 3  # the renewal
        if self._unanswered:
            due_s = self._called_s + (0.0 if self._rejoin_at_once else RETRY_PAUSE_S)
        elif self._leaving or self._failed or self._evaluated or self._must_announce:
            due_s = now_s
        elif len(self._queue) <= self.ahead:
            if self._completed or self._ask_again:
                due_s = now_s
            elif self._idle:
                due_s = min(due_s, self._not_before_s)
        return max(0.0, due_s - now_s)

    def request(
        self, now_s: float, phases_s: Mapping[str, float], gpu_memory: pb.GpuMemory | None = None
    ) -> pb.LeaseRequest | None:
        """Return the call to make now, with all reports; None: no more calls are made."""
        self._check_hung(now_s)
        self._free_what_waits(now_s)
        if self.ended:
            return None
        if not self._unanswered:
            self._silent_since_s = now_s
        self._called_s = now_s
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
            completed=self._completed[: self._fitting()],
            failed=self._failed,
            evaluated=self._evaluated,
            want=0 if self._leaving else max(0, self._wanted() - len(self._queue)),
            wait_s=min(IDLE_WAIT_S, self._joined.lease_ttl_s / 4) if self._idle and not self._leaving else 0.0,
            leaving=self._leaving,
            computing=[] if self._leaving or self._announcing is None else [self._announcing],
            phases=pb.PhaseSeconds(**phases_s),
            steps_only=not self._evaluates,
            warnings=self._warnings,
            drifts=self._drifts,
            gpu_memory=gpu_memory,
        )

    def accept(self, request: pb.LeaseRequest, reply: pb.LeaseReply, now_s: float) -> None:
        """Process the answer to a call: drop the reports that it acknowledges, and queue its grants."""
        self._unanswered = False
        self._called_s = now_s
        del self._completed[: len(request.completed)]
        self._unstored.extend((request.sequence, step) for step in request.completed)
        while self._unstored and self._unstored[0][0] <= reply.stored:
            self._unstored.popleft()
        del self._failed[: len(request.failed)]
        del self._evaluated[: len(request.evaluated)]
        del self._warnings[: len(request.warnings)]
        del self._drifts[: len(request.drifts)]
        if reply.HasField("ahead"):
            self.ahead = reply.ahead
        if reply.HasField("depth"):
            self.depth = reply.depth
        self.announced |= self._announcing in request.computing
        self.retracting &= bool(request.computing)
        if reply.revoked:
            gone = set(reply.revoked)
            self._queue = deque(w for w in self._queue if isinstance(w, pb.EvaluationGrant) or w.step not in gone)
        self._queue.extend(reply.evaluations)
        self._queue.extend(reply.granted)
        self._ask_again = bool(reply.granted or reply.evaluations)
        self._not_before_s = now_s if self._ask_again else now_s + reply.retry_after_s
        self._left = request.leaving
        self.state, self.view, self.reason = reply.state, reply.view, reply.reason

    def lost(self, error: ParashardError, now_s: float) -> None:
        """Record the failure of a call."""
        # A call that failed by `RetryLater` is retried after a pause, within the retry budget; a leaving worker does
        # not retry. A coordinator that does not know the worker was restarted: the worker joins again, at once. Any
        # other error ends the worker.
        unknown = isinstance(error, UnknownWorker)
        self._rejoin_at_once = unknown and not self.must_rejoin  # the coordinator has answered, so no pause is needed
        self.must_rejoin = unknown and not self._leaving
        patient = now_s - self._silent_since_s <= self._limits.retry_budget_s
        if (isinstance(error, RetryLater) or unknown) and not self._leaving and patient:
            self._unanswered = True
            self._called_s = now_s
        elif self._leaving and not isinstance(error, Fenced):
            self._left = True
        else:
            self.failure = error

    def joined_again(self, joined: Joined) -> None:
        """Continue with a new coordinator: repeat the reports that its predecessor has not stored."""
        self._joined = joined
        self._completed = [step for _, step in self._unstored] + self._completed
        self._unstored.clear()
        self.must_rejoin = False

    def _fitting(self) -> int:
        """Return how many of the completed steps fit into a call."""
        left_bytes, fitting = REPORT_BYTES_MAX, 0
        for step in self._completed[:REPORTS_MAX]:
            left_bytes -= step.ByteSize()
            if left_bytes < 0 and fitting:
                break
            fitting += 1
        return fitting

    @property
    def _idle(self) -> bool:
        return not self._queue and not self._working and not self._evaluating

    @property
    def _must_announce(self) -> bool:
        return self.retracting or (self._announcing is not None and not self.announced)

    def _wanted(self) -> int:
        if self._step_s <= 0:
            return min(self._limits.batch, self.ahead + 1)
        return max(self.ahead + 1, min(self._limits.batch, round(BATCH_TARGET_S / self._step_s)))

    def _end_work(self, step: int, now_s: float) -> None:
        if self._announcing == step:
            self._announcing = None
        began_s = max(self._working.pop(step, now_s), self._last_done_s)  # without idle time before the step
        took_s = now_s - began_s
        self._step_s = took_s if not self._step_s else self._step_s + SMOOTHING * (took_s - self._step_s)
        self._last_done_s = now_s

    def _free_what_waits(self, now_s: float) -> None:
        """Release the queued steps behind a computation that takes longer than a lease."""
        if self._computing is not None and now_s - self._computing[1] > self._joined.lease_ttl_s:
            self._empty_queue()

    def _empty_queue(self) -> None:
        self._queue = deque(work for work in self._queue if isinstance(work, pb.EvaluationGrant))

    def _check_hung(self, now_s: float) -> None:
        """Report work that has been computed for too long as failed, and leave: the step loop is stuck."""
        if self._computing is None or self.hung:
            return
        work, since_s = self._computing
        if now_s - since_s <= self._limits.step_timeout_s:
            return
        too_long = f"has taken over {self._limits.step_timeout_s:.0f} s"
        if isinstance(work, pb.Grant):
            self.hung = f"step {work.step:,} {too_long}"
            self.failed(work.step, self.hung, now_s)
        else:
            self.hung = f"an evaluation {too_long}"
            self.evaluated(result_of(work, error=self.hung))
        self._leaving = True
