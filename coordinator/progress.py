"""Progress: throughput and training loss over time, and the warning when it rises. Pure: `now_s` is an argument."""

from __future__ import annotations

import math
from collections import deque

from parashard.figures import metric

RATE_WINDOW_S = 5.0
RATE_BUCKET_S = 0.25
LOSS_SMOOTHING = 0.05  # weight of the newest step in the smoothed loss
RUNAWAY_FACTOR = 4.0  # the smoothed loss is this far above its best
RUNAWAY_SHARE = 0.5  # and at least this share of the first loss: far below it, four times next to nothing is nothing
RUNAWAY_AFTER_STEPS = 20  # the first steps are not judged
WARNINGS_MAX = 5


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
    """What the job has done and how its loss goes."""

    def __init__(self) -> None:
        self.examples = 0
        self.steps = 0
        self.loss = math.nan
        self.first_lease_s: float | None = None
        self.last_step_s: float | None = None
        self._earlier_s = 0.0
        self._best_loss = math.inf
        self._first_loss = 0.0
        self._warnings = 0
        self._rate = Rate()
        self._rate_by_worker: dict[str, Rate] = {}

    def resume(self, examples: int, training_s: float) -> None:
        """Go on from what earlier coordinators counted; the time in which none lived is not in it."""
        self.examples, self._earlier_s = examples, training_s

    def step_completed(self, worker: str, examples: int, loss: float | None, now_s: float) -> str | None:
        """Count a step; return a warning when its loss is not finite or the smoothed loss rises far."""
        self.examples += examples
        self.steps += 1
        self.last_step_s = now_s
        self._rate.add(examples, now_s)
        self._rate_by_worker.setdefault(worker, Rate()).add(examples, now_s)
        if loss is None:  # a skipped step has none
            return None
        if not math.isfinite(loss):
            return self._warning("the training loss of a step is not finite")
        if math.isnan(self.loss):
            self._first_loss = abs(loss)
        self.loss = loss if math.isnan(self.loss) else self.loss + LOSS_SMOOTHING * (loss - self.loss)
        if self.loss < self._best_loss:
            self._best_loss = self.loss
        elif self.steps > RUNAWAY_AFTER_STEPS and self.loss > self._runaway_bound():
            best = metric(self._best_loss)
            warning = self._warning(f"the training loss rises: {metric(self.loss)} after a best of {best}")
            self._best_loss = self.loss  # warn again only when it grows as much once more
            return warning
        return None

    def _runaway_bound(self) -> float:
        return max(RUNAWAY_FACTOR * abs(self._best_loss), RUNAWAY_SHARE * self._first_loss) + 0.1

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

    def _warning(self, text: str) -> str | None:
        self._warnings += 1
        return text if self._warnings <= WARNINGS_MAX else None
