"""Failures: whether a job goes on or stops after failed attempts at steps, and which cause is reported.

Pure. A single failed attempt does not stop the job; failures without any success do.
`parashard_coordinator.core.leases` counts a step's attempts. Also records which shards have a given-up step as an empty
push, and the present problems of a job. Implements rules P6 and P24 of docs/protocol.md.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.calls import FailedStep, FailureKind
from parashard_coordinator.core.leases import Failed

FIRST_FAILURES_MIN = 5
GIVEN_UP_IN_A_ROW_MAX = 10


class Verdict(NamedTuple):
    """The reason why the job stops, and whether its model or its data must be fixed before it can go on."""

    reason: str
    must_be_fixed: bool


class Failures:
    """The failed attempts of a job."""

    def __init__(self, max_attempts: int, *, skip: bool, against_divergence: str) -> None:
        self._skip = skip
        self._against_divergence = against_divergence
        self._first_failures_max = max(FIRST_FAILURES_MIN, max_attempts)
        self._raised = 0  # attempts in which the model raised an error before any step succeeded
        self._raised_at: set[int] = set()
        self._given_up_in_a_row = 0
        self._succeeded = 0
        self._not_finite: dict[int, tuple[int, int]] = {}  # step -> successes at its first, last failure

    def succeeded(self) -> None:
        """Record a step that is complete with its gradient."""
        self._raised = self._given_up_in_a_row = 0
        self._succeeded += 1
        self._raised_at.clear()

    def failed(self, failed: FailedStep, result: Failed, examples: str, *, any_succeeded: bool) -> Verdict | None:
        """Record a failed attempt; return why the job stops, or None."""
        if failed.kind is FailureKind.NOT_FINITE:
            first, _ = self._not_finite.get(failed.step, (self._succeeded, 0))
            self._not_finite[failed.step] = first, self._succeeded
        reason, users = self.named(failed, any_succeeded=any_succeeded), failed.kind is FailureKind.MODEL
        if failed.kind is FailureKind.WRONG_RESULT:
            return Verdict(reason, must_be_fixed=True)
        if users and not any_succeeded:
            self._raised += 1
            self._raised_at.add(failed.step)
            if self._raised >= self._first_failures_max and len(self._raised_at) > 1:
                return Verdict(f"{reason}; the first {self._raised} attempts at steps all failed", must_be_fixed=True)
        if not result.given_up:
            return None
        often = "once" if result.attempts == 1 else f"{result.attempts} times"
        attempts = f"step {failed.step:,} failed {often}{examples}"
        if not self._skip:
            return Verdict(f"{reason}; {attempts}", must_be_fixed=users)
        self._given_up_in_a_row += 1
        if self._given_up_in_a_row < GIVEN_UP_IN_A_ROW_MAX:
            return None
        row = f"{GIVEN_UP_IN_A_ROW_MAX} steps in a row were given up, none succeeded between them; the last one,"
        return Verdict(f"{reason}; {row} {attempts}", must_be_fixed=users)

    def named(self, failed: FailedStep, *, any_succeeded: bool) -> str:
        """Return the cause in words: a loss that is not finite after finite ones is a divergence."""
        # If only this step fails so while others succeed, the cause is in its examples.
        if failed.kind is not FailureKind.NOT_FINITE:
            return failed.reason
        if not any_succeeded:
            return f"{failed.reason}, and no step was in before it; check the model and its first values"
        if self._fails_alone(failed.step):
            return f"{failed.reason}, while other steps succeed; check its examples and what the model makes of them"
        return f"training diverged: {failed.reason}; {self._against_divergence}"

    def _fails_alone(self, step: int) -> bool:
        first, _ = self._not_finite[step]
        others = any(last >= first for other, (_, last) in self._not_finite.items() if other != step)
        return self._succeeded > first and not others


class SkippedSteps:
    """The skipped steps of every shard's present incarnation."""

    def __init__(self, shards: int) -> None:
        self._applied = [IntervalSet() for _ in range(shards)]
        self._skipped = [IntervalSet() for _ in range(shards)]
        self._told = IntervalSet()  # partly skipped steps that were reported

    def update(
        self, shard: int, applied: IntervalSet, skipped: IntervalSet, *, new_incarnation: bool = False
    ) -> list[int]:
        """Record a shard's steps; return the steps newly found to be skipped on some shards only."""
        # An incarnation never loses applied steps, so a message that arrives late removes nothing.
        if new_incarnation:
            self._applied[shard], self._skipped[shard] = IntervalSet(), IntervalSet()
        for known, reported in ((self._applied[shard], applied), (self._skipped[shard], skipped.intersection(applied))):
            for start, stop in reported.intervals():
                known.add_range(start, stop)
        return [
            step for start, stop in self.partly().intervals() for step in range(start, stop) if self._told.add(step)
        ]

    def everywhere(self) -> IntervalSet:
        """Return the steps that every shard has applied as an empty push."""
        return _common(self._skipped)

    def partly(self) -> IntervalSet:
        """Return the steps that some shards have applied as an empty push, and all others as a gradient."""
        if not any(len(skipped) for skipped in self._skipped):  # as nearly always
            return IntervalSet()
        applied, everywhere = _common(self._applied), self.everywhere()
        either = IntervalSet(interval for skipped in self._skipped for interval in skipped.intervals())
        partly = either.intersection(applied)
        for start, stop in everywhere.intervals():
            for step in range(start, stop):
                partly.discard(step)
        return partly


def _common(sets: list[IntervalSet]) -> IntervalSet:
    return reduce(IntervalSet.intersection, sets) if sets else IntervalSet()


PROBLEMS_MAX = 64  # at a time; further ones are reported only as events


class Problems:
    """The present problems, by key."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._texts

    @property
    def texts(self) -> list[str]:
        """The texts of all problems, the oldest first."""
        return list(self._texts.values())

    def text(self, key: str) -> str:
        """Return a problem's present text, "" if there is none."""
        return self._texts.get(key, "")

    def begin(self, key: str, text: str) -> bool:
        """Record a problem with its present text; return whether it is new."""
        is_new = key not in self._texts
        if not is_new or len(self._texts) < PROBLEMS_MAX:
            self._texts[key] = text
        return is_new

    def end(self, key: str) -> str:
        """Remove a problem; return its text, or "" if there was none."""
        return self._texts.pop(key, "")
