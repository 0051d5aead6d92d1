"""StepTimes: how long each worker takes for a step, from the grant to the last receipt. Pure: `now_s` is an argument.

The time of a step that waited behind another one of its worker begins when that one was done. Several steps that a
worker reports at once share the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

KEPT = 8
"""Reports of each worker that are kept, the newest."""


@dataclass
class _Worker:
    done_s: float  # when it last reported a step
    reports: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=KEPT))  # seconds, steps


class StepTimes:
    """Each worker's latest times."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def took(self, worker: str, granted_s: float, now_s: float) -> None:
        """Count a step that a worker was granted then, and reports now."""
        known = self._workers.setdefault(worker, _Worker(granted_s))
        if known.reports and known.done_s == now_s:
            seconds, steps = known.reports[-1]
            known.reports[-1] = seconds, steps + 1
            return
        known.reports.append((now_s - max(granted_s, known.done_s), 1))
        known.done_s = now_s

    def of(self, worker: str) -> list[float]:
        """Return a worker's latest times of a step, the oldest first."""
        known = self._workers.get(worker)
        return [] if known is None else [seconds / steps for seconds, steps in known.reports]

    def forget(self, worker: str) -> None:
        """Forget a worker's times: it is measured anew."""
        self._workers.pop(worker, None)


def median(values: Collection[float]) -> float:
    """Return the median; the standard library's loads fractions and decimals with it."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
