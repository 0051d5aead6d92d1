"""SkippedSteps: the steps that each shard has as empty pushes, and whether all shards agree.

Pure. Knows what shards say of themselves, once a second and of their checkpoints; no lease. In `async` and `ssp` a step
that is given up may be in some shards' weights already: those keep the gradient, the others get the empty push.
Implements rule P24 of docs/protocol.md.
"""

from __future__ import annotations

from functools import reduce

from parashard.plan.intervals import IntervalSet


class SkippedSteps:
    """The skipped steps of every shard's present incarnation.

    Parameters
    ----------
    shards : int
        How many there are; one that has said nothing yet has nothing.
    """

    def __init__(self, shards: int) -> None:
        self._applied = [IntervalSet() for _ in range(shards)]
        self._skipped = [IntervalSet() for _ in range(shards)]
        self._told = IntervalSet()  # partly skipped ones

    def update(
        self, shard: int, applied: IntervalSet, skipped: IntervalSet, *, new_incarnation: bool = False
    ) -> list[int]:
        """Take what a shard says; return the steps that are now seen to be skipped on a part of the shards only.

        What an incarnation has applied it keeps: a message that was overtaken by a later one takes nothing back.
        """
        if new_incarnation:
            self._applied[shard], self._skipped[shard] = IntervalSet(), IntervalSet()
        for known, reported in ((self._applied[shard], applied), (self._skipped[shard], skipped.intersection(applied))):
            for start, stop in reported.intervals():
                known.add_range(start, stop)
        return [
            step for start, stop in self.partly().intervals() for step in range(start, stop) if self._told.add(step)
        ]

    def everywhere(self) -> IntervalSet:
        """Return the steps that every shard has as an empty push."""
        return _common(self._skipped)

    def partly(self) -> IntervalSet:
        """Return the steps that every shard has, some as an empty push and some as a gradient."""
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
