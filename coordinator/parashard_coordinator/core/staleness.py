"""Staleness quantiles over the shards' exact counts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


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
