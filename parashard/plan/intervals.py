"""IntervalSet: integers as disjoint half-open intervals, such as the steps that a shard has applied. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class IntervalSet:
    """A mutable set of integers >= 0.

    Invariant: starts[i] < stops[i] < starts[i + 1]; that is, intervals are non-empty, sorted, and never touch.

    Examples
    --------
    >>> steps = IntervalSet([(0, 3)])
    >>> steps.add(3)
    True
    >>> steps.add(2)
    False
    >>> list(steps.intervals()), steps.lowest_missing()
    ([(0, 4)], 4)
    """

    __slots__ = ("_starts", "_stops", "size")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.size = 0
        for start, stop in intervals:
            self.add_range(start, stop)

    def __contains__(self, value: int) -> bool:
        i = bisect_right(self._starts, value) - 1
        return i >= 0 and value < self._stops[i]

    def __len__(self) -> int:
        return self.size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntervalSet):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"IntervalSet({list(self.intervals())})"

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Yield the half-open intervals in ascending order."""
        return zip(self._starts, self._stops, strict=True)

    def copy(self) -> IntervalSet:
        """Return an independent copy."""
        twin = IntervalSet()
        twin._starts, twin._stops, twin.size = list(self._starts), list(self._stops), self.size
        return twin

    def add(self, value: int) -> bool:
        """Add one integer; return True if it was not there before."""
        if self._stops and value == self._stops[-1]:  # the usual case
            self._stops[-1] += 1
            self.size += 1
            return True
        if value in self:
            return False
        self.add_range(value, value + 1)
        return True

    def add_range(self, start: int, stop: int) -> None:
        """Add every integer of [start, stop)."""
        if not 0 <= start <= stop:
            raise ValueError(f"an interval needs 0 <= start <= stop, found [{start}, {stop})")
        if start == stop:
            return
        left = bisect_left(self._stops, start)  # first interval that ends at or after `start`
        right = bisect_right(self._starts, stop)  # first interval that begins after `stop`
        if left < right:
            start = min(start, self._starts[left])
            stop = max(stop, self._stops[right - 1])
        swallowed = sum(self._stops[i] - self._starts[i] for i in range(left, right))
        self._starts[left:right] = [start]
        self._stops[left:right] = [stop]
        self.size += stop - start - swallowed

    def discard(self, value: int) -> None:
        """Remove one integer, if it is there."""
        i = bisect_right(self._starts, value) - 1
        if i < 0 or value >= self._stops[i]:
            return
        start, stop = self._starts[i], self._stops[i]
        left = [(start, value)] if start < value else []
        right = [(value + 1, stop)] if value + 1 < stop else []
        self._starts[i : i + 1] = [first for first, _ in left + right]
        self._stops[i : i + 1] = [last for _, last in left + right]
        self.size -= 1

    def lowest_missing(self) -> int:
        """Return the lowest integer >= 0 that is not in the set."""
        return self._stops[0] if self._starts and self._starts[0] == 0 else 0

    def stop(self) -> int:
        """Return the first integer after all that are in the set; 0 if it is empty."""
        return self._stops[-1] if self._stops else 0

    def missing(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the half-open intervals of [start, stop) that are not in the set, ascending."""
        position = start
        for i in range(bisect_right(self._stops, start), len(self._starts)):
            if self._starts[i] >= stop:
                break
            if position < self._starts[i]:
                yield position, self._starts[i]
            position = self._stops[i]
        if position < stop:
            yield position, stop

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of intervals that are in [start, stop), ascending."""
        for i in range(bisect_right(self._stops, start), len(self._starts)):
            first = max(start, self._starts[i])
            if first >= stop:
                break
            yield first, min(stop, self._stops[i])

    def intersection(self, other: IntervalSet) -> IntervalSet:
        """Return the integers that are in both sets."""
        both, i, j = IntervalSet(), 0, 0
        while i < len(self._starts) and j < len(other._starts):
            start = max(self._starts[i], other._starts[j])
            stop = min(self._stops[i], other._stops[j])
            if start < stop:
                both.add_range(start, stop)
            if self._stops[i] < other._stops[j]:
                i += 1
            else:
                j += 1
        return both
