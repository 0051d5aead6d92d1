"""Progress: steps, throughput, staleness and each worker's time per step. Pure: `now_s` is an argument."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

RATE_WINDOW_S = 5.0
RATE_BUCKET_S = 0.25


class Rate:
    """Amount per second over the last RATE_WINDOW_S, in constant memory."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[float, float]] = deque()
        self._since_s: float | None = None

    def add(self, amount: float, now_s: float) -> None:
        """Count an amount now."""
        if self._since_s is None:
            self._since_s = now_s
        bucket_s = now_s - now_s % RATE_BUCKET_S
        if self._buckets and self._buckets[-1][0] == bucket_s:
            amount += self._buckets.pop()[1]
        self._buckets.append((bucket_s, amount))
        self._trim(now_s)

    def per_s(self, now_s: float) -> float:
        """Return the amount per second."""
        self._trim(now_s)
        if self._since_s is None:
            return 0.0
        window_s = min(RATE_WINDOW_S, now_s - self._since_s)
        return sum(amount for _, amount in self._buckets) / max(window_s, RATE_BUCKET_S)

    def _trim(self, now_s: float) -> None:
        while self._buckets and self._buckets[0][0] < now_s - RATE_WINDOW_S:
            self._buckets.popleft()


class Progress:
    """Completed steps, throughput and training time of a job."""

    def __init__(self) -> None:
        self.steps = 0
        self.first_lease_s: float | None = None
        self.last_step_s: float | None = None
        self._earlier_s = 0.0
        self.goes_on = False
        """An earlier coordinator has leased steps, which workers may be computing: time counts from the first tick."""
        self._rate = Rate()
        self._rate_by_worker: dict[str, Rate] = {}

    def resume(self, training_s: float) -> None:
        """Restore the training time that earlier coordinators measured."""
        self._earlier_s, self.goes_on = training_s, training_s > 0

    def begin(self, now_s: float) -> None:
        """Start the time at the first call, if the training continues an earlier coordinator's."""
        if self.goes_on and self.first_lease_s is None:
            self.first_lease_s = now_s

    def step_completed(self, worker: str, examples: int, now_s: float) -> None:
        """Count a step that every shard has."""
        self.steps += 1
        self.last_step_s = now_s
        self._rate.add(examples, now_s)
        if worker not in self._rate_by_worker:
            self._rate_by_worker[worker] = Rate()
        self._rate_by_worker[worker].add(examples, now_s)

    def examples_per_s(self, now_s: float, worker: str | None = None) -> float:
        """Return examples per second over the last seconds, of one worker or of all."""
        if worker is None:
            return self._rate.per_s(now_s)
        rate = self._rate_by_worker.get(worker)
        return rate.per_s(now_s) if rate else 0.0

    def elapsed_s(self, now_s: float) -> float:
        """Return the time since the first lease."""
        return self._earlier_s + (now_s - self.first_lease_s if self.first_lease_s is not None else 0.0)

    def training_s(self) -> float:
        """Return the time from the first lease to the last completed step."""
        if self.first_lease_s is None or self.last_step_s is None:
            return self._earlier_s
        return self._earlier_s + self.last_step_s - self.first_lease_s


def quantile(counts: Counter[int], fraction: float) -> int:
    """Return the `fraction` quantile of counted values: the least v with at least this share <= v; 0 if none."""
    needed = fraction * sum(counts.values())
    reached = 0
    for value in sorted(counts):
        reached += counts[value]
        if reached >= needed:
            return value
    return 0


class Staleness(NamedTuple):
    """Staleness of the pushes so far."""

    pushes: int = 0
    mean: float = 0.0
    most: int = 0

    @classmethod
    def of(cls, counts: Counter[int]) -> Staleness:
        """Return the staleness from the number of pushes by staleness."""
        pushes = counts.total()
        total = sum(value * times for value, times in counts.items())
        return cls(pushes, total / max(1, pushes), max(counts, default=0))

    def __str__(self) -> str:
        return f"staleness mean {self.mean:.1f}, max {self.most:,}" if self.most else "no staleness"


KEPT = 8
"""Number of reports kept per worker, the newest."""


@dataclass
class _Worker:
    done_s: float  # when it last reported a step
    waited_s: float  # total waiting time by then
    reports: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=KEPT))  # seconds, steps


class StepTimes:
    """Each worker's latest times for a step, from the grant to the report.

    The time of a step that was queued behind another step of its worker begins when that one was reported, and the
    worker's waiting time does not count. Several steps that a worker reports at once share the time.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._waited_s: dict[str, float] = {}
        self._changed: set[str] = set()  # workers whose median below may be out of date
        self._medians_s: dict[str, float] = {}
        self._ascending_s: list[float] = []  # the same medians, sorted

    def waited(self, worker: str, waited_s: float) -> None:
        """Record how long a worker's process has waited so far, in total, for leases and for others' steps."""
        self._waited_s[worker] = waited_s

    def took(self, worker: str, granted_s: float, now_s: float) -> None:
        """Count a step that was granted to a worker at `granted_s`, and is reported now."""
        self._changed.add(worker)
        waited_s = self._waited_s.get(worker, 0.0)
        known = self._workers.setdefault(worker, _Worker(granted_s, waited_s))
        if known.reports and known.done_s == now_s:
            seconds, steps = known.reports[-1]
            known.reports[-1] = seconds, steps + 1
            return
        busy_s = now_s - known.done_s - max(0.0, waited_s - known.waited_s)
        known.reports.append((max(0.0, min(now_s - granted_s, busy_s)), 1))
        known.done_s, known.waited_s = now_s, waited_s

    def of(self, worker: str) -> list[float]:
        """Return a worker's latest times of a step, the oldest first."""
        known = self._workers.get(worker)
        return [] if known is None else [seconds / steps for seconds, steps in known.reports]

    def of_others(self, worker: str) -> float | None:
        """Return the median of the other workers' median times, or None; only changed medians are recomputed."""
        for name in self._changed:
            self._update_median(name)
        self._changed.clear()
        own_s = self._medians_s.get(worker)
        count = len(self._ascending_s) - (own_s is not None)
        if not count:
            return None
        own = count if own_s is None else bisect_left(self._ascending_s, own_s)
        low, high = (count - 1) // 2, count // 2
        return (self._ascending_s[low + (low >= own)] + self._ascending_s[high + (high >= own)]) / 2

    def forget(self, worker: str) -> None:
        """Forget a worker's times, to measure it anew."""
        if self._workers.pop(worker, None) is not None:
            self._changed.add(worker)

    def _update_median(self, worker: str) -> None:
        before_s, times = self._medians_s.pop(worker, None), self.of(worker)
        if before_s is not None:
            del self._ascending_s[bisect_left(self._ascending_s, before_s)]
        if times:
            self._medians_s[worker] = median(times)
            insort(self._ascending_s, self._medians_s[worker])


def median(values: Collection[float]) -> float:
    """Return the median; `statistics.median` would import fractions and decimals."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
