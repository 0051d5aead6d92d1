"""What a shard counts about itself. Pure; read by `Inspect` and by the metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

STALENESS_MAX = 4095
"""Greater values are counted here, so that the histogram has a bound."""
APPLY_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds of the histogram of apply times: a small SGD takes 0.1 ms, Adam on a gigabyte a second."""


@dataclass
class ShardCounters:
    """Counters since the shard's start; every one only grows."""

    applied_pushes: int = 0
    buffered_pushes: int = 0
    duplicate_pushes: int = 0
    skipped_steps: int = 0
    refused_pushes: int = 0
    failed_announcements: int = 0  # that the coordinator answered with an internal error
    push_bytes: int = 0
    push_float32_bytes: int = 0  # what they would have been, had every slice been float32
    pull_bytes: int = 0
    pull_unmoved_bytes: int = 0  # not sent, because the asker had it
    push_s: float = 0.0  # time inside the shard, measured by its service
    pull_s: float = 0.0
    unknown_staleness: int = 0
    step_lag_max: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    apply_s: float = 0.0  # time of the requests that moved the weights
    applies: list[int] = field(default_factory=lambda: [0] * (len(APPLY_BOUNDS_S) + 1))
    """How many of them took at most so long, by APPLY_BOUNDS_S, and those that took longer."""

    def saw_staleness(self, staleness: int | None) -> None:
        """Count one push's staleness; None is unknown."""
        if staleness is None:
            self.unknown_staleness += 1
        else:
            self.staleness[min(staleness, STALENESS_MAX)] += 1

    def applied_in(self, seconds: float) -> None:
        """Count a request that moved the weights."""
        self.apply_s += seconds
        self.applies[bisect_left(APPLY_BOUNDS_S, seconds)] += 1
