"""Figures of metrics' states by name, for processes that have neither the model nor its metrics.

Pure, without NumPy. Called by `parashard.metrics` and by the coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

VALUES_MAX = 4096
"""Most numbers of a step's metrics together; metrics with longer states are of evaluations only."""
METRICS_MAX = 64


def mean(values: Sequence[float]) -> float:
    """Return a sum divided by its count; of nothing NaN."""
    return values[0] / values[1] if values[1] else math.nan


def total(values: Sequence[float]) -> float:
    """Return a sum."""
    return values[0]


def area(values: Sequence[float]) -> float:
    """Return the share of pairs of a 1 and a 0 that are in order, of the histogram of 1s and then that of 0s."""
    bins = len(values) // 2
    ones, zeros = values[:bins], values[bins:]
    pairs = sum(ones) * sum(zeros)
    if not pairs:
        return math.nan
    ordered = (one * (up_to - zero / 2) for one, zero, up_to in zip(ones, zeros, accumulate(zeros), strict=True) if one)
    return sum(ordered) / pairs


def entropy_ratio(values: Sequence[float]) -> float:
    """Return the mean cross-entropy divided by that of the share of 1: of their sum, the 1s and all examples."""
    entropies, ones, examples = values
    if not 0 < ones < examples:
        return math.nan
    share = ones / examples
    return entropies / examples / -(share * math.log(share) + (1 - share) * math.log1p(-share))


FIGURES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": mean,
    "sum": total,
    "auc": area,
    "normalized_entropy": entropy_ratio,
}


def figure(kind: str, values: Sequence[float]) -> float | None:
    """Return the figure of a state; NaN: a number of it is not finite. None: only the metric itself has the figure."""
    make = FIGURES.get(kind)
    if make is None:
        return None
    try:
        return make(values) if values and all(map(math.isfinite, values)) else math.nan
    except (ValueError, IndexError, OverflowError):
        return math.nan
