"""StepTimes: how long each worker takes for a step, from the grant to the last ack. Pure: `now_s` is an argument.

The time of a step that waited behind another one of its worker begins when that one was done, and what the worker
waited for others meanwhile does not count. Several steps that a worker reports at once share the time.
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
    waited_s: float  # for others, by then
    reports: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=KEPT))  # seconds, steps


class StepTimes:
    """Each worker's latest times."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._waited_s: dict[str, float] = {}

    def waited(self, worker: str, waited_s: float) -> None:
        """Take how long a worker's process has waited so far, in all, for leases and for others' steps."""
        self._waited_s[worker] = waited_s

    def took(self, worker: str, granted_s: float, now_s: float) -> None:
        """Count a step that a worker was granted then, and reports now."""
        waited_s = self._waited_s.get(worker, 0.0)
        known = self._workers.setdefault(worker, _Worker(granted_s, waited_s))
        if known.reports and known.done_s == now_s:
            seconds, steps = known.reports[-1]
            known.reports[-1] = seconds, steps + 1
            return
        busy_s = now_s - known.done_s - max(0.0, waited_s - known.waited_s)
        known.reports.append((max(0.0, min(now_s - granted_s, busy_s)), 1))
        known.done_s, known.waited_s = now_s, waited_s

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
