"""Controller: the run-time decisions of `consistency.policy = "auto"`: which workers get parts, and the lag.

Pure: each decision is a function of measured figures and `now_s`, and comes with its reason in words, which event,
status and report repeat. Reads no job: `parashard_coordinator.core.auto_jobs` passes the figures, and applies the
decisions. Invariants: if any worker is live, at least one live worker gets parts; the lag is raised only if workers
wait, and stays above 0 only while the measured drift allows it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parashard_coordinator.core.policies import Auto

SLOW = 3.0
"""A worker that takes more than this many times the others' median gets no parts for a while."""
SLOW_MIN_S = 0.05  # a worker that takes less for a part is never slow
MEASURED = 5  # reports of a worker before it is judged; after a pause one is enough
PAUSE_S, PAUSE_MAX_S = 30.0, 600.0

AHEAD_S, AHEAD_MAX = 0.05, 8
"""Workers hold parts of the batches of the next 50 ms: of at least one batch, and at most eight."""
PACED_S = 0.5  # if a batch takes longer, none are leased ahead: the wait for a lease does not matter
PACE_BATCHES = 8  # the time of a batch is the mean over these

WAITING_MIN = 0.1
"""The lag is raised only if workers spend more than this share of their time waiting."""
DRIFT_MAX = 0.15
"""Bound of the drift, the share by which one update changes the gradient of the same examples.

In experiments (`benchmarks/statistics/`) gradients that were K updates old did no harm while K times the median
drift was at most 0.21, and cost 2.7 points of accuracy at 0.28 (ResNet) and all of it at 0.43 (MLP with momentum 0.9).
The bound is about three quarters of 0.21, a margin because few measurements represent the whole run.
"""
GAIN_MIN = 0.05  # a lag must save this share of a batch's time, or it is not tried again with these workers

WARM_UP = 8  # batches before figures count: processes start, and models are compiled
FIRST_POINT, POINTS_APART_MAX, POINTS_APART_LAGGING = 32, 1024, 128
PROBES = (0, 2, 4)  # offsets from a point of the batches in which one part's drift is measured
SETTLED = 8  # batches after a point at which its drifts are reported and the lag is decided
DRIFTS_NEEDED = 2  # at a point; the largest of them counts
DRIFTS_KEPT = 64


class Lag(NamedTuple):
    """A decided lag, the first step that it applies to, and the reason."""

    first_step: int
    lag: int
    reason: str


class Drift(NamedTuple):
    """A measured drift: |g' - g| / |g| for the examples of a step, and the updates between the two gradients."""

    step: int
    drift: float
    updates: int


class LagDecision(NamedTuple):
    """A lag, and the reason for it."""

    lag: int
    reason: str


NOT_LEARNING = LagDecision(0, "the training loss does not fall")


class LagInputs(NamedTuple):
    """Measurements since the last decision, at one lag."""

    lag: int
    waiting: float | None  # the share of the workers' time that is not computing; None: not known
    drift: float | None  # per update, at this point; `drift_before`: at the previous point
    drift_before: float | None = None
    batch_s: float = 0.0  # time per batch
    batch_before_s: float | None = None  # the same without a lag; None: not known
    gains: bool = True  # false if a lag is known to save too little


@dataclass
class _Pause:
    """A pause until which a worker gets no parts; its next pause lasts `next_s`."""

    until_s: float
    next_s: float
    reason: str


class Controller:
    """The decisions of one job.

    It sets the policy's `lag`, initially 0. Batch b has P = `parts` steps, [b P, (b + 1) P). Workers may hold parts of
    the next `ahead` batches; `lags` has every change of the lag.
    """

    def __init__(self, policy: Auto) -> None:
        self._policy = policy
        self.parts = policy.size
        self.lags: list[Lag] = []
        self.drifts: list[Drift] = []
        self.reason = "nothing is measured yet"
        self.ahead = 0
        self._pace: tuple[int, float] | None = None  # a batch, and when it became the lowest incomplete one
        self._pauses: dict[str, _Pause] = {}
        self._probed: dict[int, int] = {}  # by batch, the step at which the drift is measured
        self._point = FIRST_POINT
        self._window: _Window | None = None
        self._drift: float | None = None  # at the previous point
        self._batch_s: float | None = None  # the newest time of a batch without a lag
        self._gains = True

    @property
    def lag(self) -> int:
        """The lag of steps that are leased from now on."""
        return self._policy.lag

    def resume(self, lags: Sequence[Lag], drifts: Sequence[Drift]) -> None:
        """Restore an earlier coordinator's decisions and measurements."""
        self.lags, self.drifts = list(lags), list(drifts)
        if lags:
            _, self._policy.lag, self.reason = lags[-1]

    # --- slow workers ---

    def judge_worker(self, name: str, times: Sequence[float], others_s: float | None, now_s: float) -> str:
        """Pause a worker if it is slow, so that it gets no parts; return the event to report, or ""."""
        # `times` are its latest, in seconds; `others_s` is the median of the other workers' times, None: not known.
        before = self._pauses.get(name)
        if before is not None and before.until_s > now_s:
            return ""
        slow = slowness(times, others_s, MEASURED if before is None else 1)
        if not slow:
            if before is not None and len(times) >= MEASURED:
                del self._pauses[name]
            return ""
        pause_s = PAUSE_S if before is None else before.next_s
        self._pauses[name] = _Pause(now_s + pause_s, min(2 * pause_s, PAUSE_MAX_S), slow)
        return f"{name} gets no parts for {pause_s:.0f} s: {slow}"

    def paused_reason(self, name: str, live: Collection[str], now_s: float) -> str:
        """Return why a worker gets no parts now; "" if it gets some, also when all live workers are slow."""
        pause = self._pauses.get(name)
        if pause is None or pause.until_s <= now_s:
            return ""
        return self.slow_ones(live, now_s).get(name, "")

    def slow_ones(self, live: Collection[str], now_s: float) -> dict[str, str]:
        """Return the live workers that get no parts, with the reasons; none if all of them are slow."""
        slow = {name: pause.reason for name, pause in self._pauses.items() if pause.until_s > now_s and name in live}
        return slow if len(slow) < len(live) else {}

    def taking_part(self, live: Collection[str], now_s: float) -> list[str]:
        """Return the live workers that get parts: those that are not slow, or all if every one is slow."""
        slow = self.slow_ones(live, now_s)
        return [name for name in live if name not in slow]

    # --- leases ahead ---

    def keep_pace(self, batch: int, now_s: float) -> None:
        """Set how many batches ahead parts are leased, from the time of the latest batches."""
        first, since_s = self._pace or (batch, now_s)
        took_s = now_s - since_s
        if batch - first >= PACE_BATCHES:
            self.ahead = batches_ahead(took_s / (batch - first))
        elif took_s > PACE_BATCHES * PACED_S:
            self.ahead = 0
        elif self._pace is not None:
            return
        self._pace = batch, now_s

    def least_version(self, step: int) -> int:
        """Return the minimum number of updates in the weights for a step that is leased now."""
        return max(0, step // self.parts - self.lag)

    # --- the lag ---

    def measures_drift(self, step: int) -> bool:
        """Tell whether the drift is measured at a step that is leased now: one step of each batch in `PROBES`."""
        # A step that is leased again keeps its mark: its next holder measures.
        batch = step // self.parts
        return batch - self._point in PROBES and self._probed.setdefault(batch, step) == step

    def record_drift(self, drift: Drift) -> None:
        """Record a measurement."""
        self.drifts = [*self.drifts, drift][-DRIFTS_KEPT:]

    def is_due(self, batch: int, *, diverges: bool) -> bool:
        """Tell whether `decide_lag` has anything to do at this lowest incomplete batch."""
        if diverges and self.lag:
            return True
        return batch >= (WARM_UP if self._window is None else self._point + SETTLED)

    def decide_lag(
        self, batch: int, spent_s: Mapping[object, Mapping[str, float]], now_s: float, *, diverges: bool
    ) -> LagDecision | None:
        """Return the new lag and reason, or None if a decision is not due; `spent_s`: phase times by incarnation."""
        window = self._window
        if window is None and batch >= WARM_UP:  # at the start, and after a restart of the coordinator
            self._window, self._point = _Window(batch, now_s, copied(spent_s)), point_after(batch, self.lag)
        if diverges and self.lag:
            self._window = _Window(batch, now_s, copied(spent_s))
            return NOT_LEARNING
        if window is None or batch < self._point + SETTLED:
            return None
        if len(spent_s) != len(window.spent_s):
            self._gains = True  # with another number of workers, a lag may help that did not help before
        batch_s = (now_s - window.since_s) / max(1, batch - window.first)
        self._gains &= not self.lag or self._batch_s is None or batch_s <= (1 - GAIN_MIN) * self._batch_s
        found = [drift.drift / drift.updates for drift in self.drifts if drift.step >= self._point * self.parts]
        drift = max(found) if len(found) >= DRIFTS_NEEDED else None  # a single one may be small by chance
        waiting = waiting_share(window.spent_s, spent_s)
        figures = LagInputs(self.lag, waiting, drift, self._drift, batch_s, self._batch_s, self._gains)
        decision = NOT_LEARNING if diverges else choose_lag(figures)
        self._drift = drift
        if not self.lag:
            self._batch_s = batch_s
        self._point, self._probed = point_after(batch, decision.lag), {}
        self._window = _Window(batch, now_s, copied(spent_s))
        return decision

    def apply_decision(self, decision: LagDecision, first_step: int) -> bool:
        """Set the lag from `first_step` on, the first step of a batch; return whether the lag has changed."""
        self.reason = decision.reason
        if decision.lag == self.lag:
            return False
        self.lags.append(Lag(first_step, *decision))
        self._policy.lag = decision.lag
        return True

    def overlaps(self, spent_s: Mapping[str, float]) -> bool:
        """Tell whether a worker may hold one more part, to transfer it while it computes another."""
        busy_s = spent_s["transfer"] + spent_s["compute"]
        return self.lag > 0 and spent_s["transfer"] > WAITING_MIN * busy_s


@dataclass
class _Window:
    """Start of a measurement: the batch, the time, and the workers' phase times so far."""

    first: int
    since_s: float
    spent_s: Mapping[object, Mapping[str, float]] = field(default_factory=dict)


def batches_ahead(batch_s: float) -> int:
    """Return how many batches ahead parts are leased, given the time per batch."""
    if batch_s > PACED_S:
        return 0
    return min(AHEAD_MAX, math.ceil(AHEAD_S / batch_s)) if batch_s > 0 else AHEAD_MAX


def choose_lag(figures: LagInputs) -> LagDecision:
    """Raise the lag to 1 if workers wait and the drift was small twice; reset it if the drift grows or time is lost."""
    lag, waiting, drift, before, batch_s, batch_before_s, gains = figures
    waits = "" if waiting is None else f"workers wait {waiting:.0%} of their time"
    if lag == 0 and (waiting is None or waiting <= WAITING_MIN):
        return LagDecision(0, waits or "nothing is measured yet")
    if drift is None:
        return LagDecision(0, f"{waits}; how much an update changes a gradient is not known")
    if drift > DRIFT_MAX:
        return LagDecision(0, f"{waits}, but an update changes a gradient by {drift:.0%}, more than {DRIFT_MAX:.0%}")
    if not gains:
        times = f": {batch_s:.3g} s a batch, {batch_before_s:.3g} s without" if lag and batch_before_s else ""
        return LagDecision(0, f"{waits}, but a lag does not make batches quicker{times}")
    changes = f"{waits}, and an update changes a gradient by {drift:.0%}"
    if lag == 0 and (before is None or before > DRIFT_MAX):
        return LagDecision(0, f"{changes}, which must be so twice")
    return LagDecision(1, changes)


def slowness(times: Sequence[float], others_s: float | None, needed: int) -> str:
    """Describe how slow a worker is, judged by the least of its latest `needed` times; "" if it is not slow."""
    if len(times) < needed or others_s is None:
        return ""
    own_s = min(times[-needed:])
    if own_s <= max(SLOW_MIN_S, SLOW * others_s):
        return ""
    return f"a part takes it {own_s:.3g} s, the others {others_s:.3g} s"


def waiting_share(
    before: Mapping[object, Mapping[str, float]], after: Mapping[object, Mapping[str, float]]
) -> float | None:
    """Return the share of time that workers waited for leases, pulls and pushes; None if no time was reported."""
    waited_s = total_s = 0.0
    for worker in before.keys() & after.keys():
        spent = {phase: after[worker][phase] - before[worker][phase] for phase in after[worker]}
        waits_s = spent["lease"] + spent["pull"] + spent["push"]
        waited_s += waits_s
        total_s += waits_s + spent["compute"]
    return waited_s / total_s if total_s > 0 else None


def point_after(batch: int, lag: int) -> int:
    """Return the first point after a batch: powers of two from 32 to 1024, then each multiple of 1024."""
    # While the lag is above 0, points are at most 128 batches apart: the drift may grow.
    point = FIRST_POINT
    while point <= batch and point < POINTS_APART_MAX:
        point *= 2
    if point <= batch:
        point = (batch // POINTS_APART_MAX + 1) * POINTS_APART_MAX
    return min(point, batch + POINTS_APART_LAGGING) if lag else point


def copied(spent_s: Mapping[object, Mapping[str, float]]) -> dict[object, Mapping[str, float]]:
    """Return a copy that later reports do not change."""
    return {worker: dict(spent) for worker, spent in spent_s.items()}
