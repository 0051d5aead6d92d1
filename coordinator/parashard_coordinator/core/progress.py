"""Progress: throughput and training loss over time, and whether training diverges. Pure: `now_s` is an argument."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from parashard.display.figures import metric

RATE_WINDOW_S = 5.0
RATE_BUCKET_S = 0.25
LOSS_SMOOTHING = 0.05  # weight of the newest step in the smoothed loss
RUNAWAY_FACTOR = 4.0  # the smoothed loss is this far above its best
RUNAWAY_SHARE = 0.5  # and at least this share of the first loss: far below it, four times next to nothing is nothing
RUNAWAY_AFTER_STEPS = 20  # the first steps are not judged
RECOVERED_STEPS = 20  # with a finite loss, one after the other, after one that was not
WARNINGS_MAX = 5
NOT_FINITE, RISES = "loss-not-finite", "loss-rises"  # problems' keys


class Change(NamedTuple):
    """A problem that begins, with its text, or that is over, with what holds now."""

    key: str
    text: str
    over: bool = False


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
    """What the job has done and how its loss goes.

    Parameters
    ----------
    against_divergence : str
        What a warning advises.
    """

    def __init__(self, against_divergence: str = "lower optimizer.learning_rate") -> None:
        self._advice = against_divergence
        self.steps = 0
        self.loss = math.nan
        self.first_lease_s: float | None = None
        self.last_step_s: float | None = None
        self._earlier_s = 0.0
        self.goes_on = False
        """An earlier coordinator has leased steps, which workers may be computing: time counts from the first call."""
        self._best_loss = math.inf
        self._first_loss = 0.0
        self._told = 0
        self._finite_due = 0  # steps until the warning of a loss that was not finite is withdrawn; 0: there is none
        self._recovered_below: float | None = None  # the loss at which the warning that it runs away is withdrawn
        self._rate = Rate()
        self._rate_by_worker: dict[str, Rate] = {}

    def resume(self, training_s: float, losses: Sequence[float]) -> None:
        """Go on from what earlier coordinators measured."""
        self._earlier_s, self.goes_on = training_s, training_s > 0
        if losses:
            self.loss, self._first_loss, self._best_loss = losses

    def begin(self, now_s: float) -> None:
        """Take note of the first call, from which on time counts where the training goes on."""
        if self.goes_on and self.first_lease_s is None:
            self.first_lease_s = now_s

    def losses(self) -> tuple[float, ...]:
        """Return the smoothed loss, the first and the best one; empty before the first step."""
        seen = not math.isnan(self.loss)
        return (self.loss, self._first_loss, min(self._best_loss, self.loss)) if seen else ()

    def step_completed(self, worker: str, step: int, examples: int, loss: float | None, now_s: float) -> list[Change]:
        """Take note of a step that every shard has; return which problems its loss shows, and which are over."""
        self.steps += 1
        self.last_step_s = now_s
        self._rate.add(examples, now_s)
        if worker not in self._rate_by_worker:
            self._rate_by_worker[worker] = Rate()
        self._rate_by_worker[worker].add(examples, now_s)
        if loss is None:  # a skipped step has none, and a program's own loop need not tell
            return []
        if not math.isfinite(loss):
            stands = self._finite_due > 0
            what = f"diverged: loss became {in_words(loss)} at step {step:,}"
            changes = [] if stands else self._diverged(NOT_FINITE, what)
            self._finite_due = RECOVERED_STEPS if stands or changes else 0
            return changes
        if math.isnan(self.loss):
            self._first_loss = abs(loss)
        self.loss = loss if math.isnan(self.loss) else self.loss + LOSS_SMOOTHING * (loss - self.loss)
        return self._not_finite_is_over(step) + self._rise(step)

    def _not_finite_is_over(self, step: int) -> list[Change]:
        if not self._finite_due:
            return []
        self._finite_due -= 1
        recovered = f"the training loss has been finite for {RECOVERED_STEPS} steps, at step {step:,}"
        return [] if self._finite_due else [Change(NOT_FINITE, recovered, over=True)]

    def _rise(self, step: int) -> list[Change]:
        if self._recovered_below is not None:
            if self.loss > self._recovered_below:
                return []
            self._recovered_below = None
            back = f"the training loss has come back to {metric(self.loss)}, at step {step:,}"
            return [Change(RISES, back, over=True)]
        self._best_loss = min(self._best_loss, self.loss)
        bound = self._runaway_bound()
        if self.steps <= RUNAWAY_AFTER_STEPS or self.loss <= bound:
            return []
        best = metric(self._best_loss)
        what = f"diverges: loss has risen to {metric(self.loss)} at step {step:,}, best {best}"
        changes = self._diverged(RISES, what)
        self._recovered_below = bound / 2 if changes else None
        return changes

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

    def _diverged(self, key: str, what: str) -> list[Change]:
        if self._told >= WARNINGS_MAX:
            return []
        self._told += 1
        return [Change(key, f"training {what}; {self._advice}")]


def in_words(value: float) -> str:
    """Return a number that is not finite as it is called."""
    return "NaN" if math.isnan(value) else "infinite"
