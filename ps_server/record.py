"""What a shard counts about itself. Pure; read by `Inspect` and by the metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

STALENESS_MAX = 4095
"""Greater values are counted here, so that the histogram has a bound."""


@dataclass
class Record:
    """Counters since the shard's start; every one only grows."""

    applied_pushes: int = 0
    buffered_pushes: int = 0
    duplicate_pushes: int = 0
    skipped_steps: int = 0
    refused_pushes: int = 0
    push_bytes: int = 0
    push_float32_bytes: int = 0  # what they would have been, had every slice been float32
    pull_bytes: int = 0
    pull_unmoved_bytes: int = 0  # not sent, because the asker had it
    push_s: float = 0.0  # time inside the shard, measured by its service
    pull_s: float = 0.0
    unknown_staleness: int = 0
    uncompensated_pushes: int = 0  # delay compensation was asked for and the pulled weights were not kept
    step_lag_max: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    def saw_staleness(self, staleness: int | None) -> None:
        """Count one push's staleness; None is unknown (P16)."""
        if staleness is None:
            self.unknown_staleness += 1
        else:
            self.staleness[min(staleness, STALENESS_MAX)] += 1
