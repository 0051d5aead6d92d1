"""Quantiles, mean and maximum of the staleness, from the shards' exact counts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


def quantile(counts: Counter[int], fraction: float) -> int:
    """Return the least value that at least `fraction` of the counted pushes do not exceed; 0 where there are none."""
    needed = fraction * sum(counts.values())
    reached = 0
    for value in sorted(counts):
        reached += counts[value]
        if reached >= needed:
            return value
    return 0


def merged(shards: Iterable[Iterable[tuple[int, int]]]) -> Counter[int]:
    """Return the counts of all shards together."""
    total: Counter[int] = Counter()
    for counts in shards:
        for value, pushes in counts:
            total[value] += pushes
    return total


class Staleness(NamedTuple):
    """Staleness of the pushes so far."""

    pushes: int = 0
    mean: float = 0.0
    most: int = 0

    @classmethod
    def of(cls, counts: Counter[int]) -> Staleness:
        """Return the staleness of counted pushes."""
        pushes = counts.total()
        total = sum(value * times for value, times in counts.items())
        return cls(pushes, total / max(1, pushes), max(counts, default=0))

    def __str__(self) -> str:
        return f"staleness mean {self.mean:.1f}, max {self.most:,}" if self.most else "no staleness"
