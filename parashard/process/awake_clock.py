"""AwakeClock: monotonic seconds without those in which this process stood still.

A process that stood still received no message, which is no silence of its peers: coordinator, worker and launcher
judge silence, hung steps and retry budgets by such a clock. A suspended cluster then goes on where it was. Knows
nothing of what is timed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class AwakeClock:
    """A clock for a process that reads it often; safe from many threads.

    A reading later than `stall_s` after the one before shows that the process stood still (stopped by a signal, a
    paused machine): none of that time counts. Longer than any pause that it makes by itself.
    """

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._lock = threading.Lock()
        self._read_s = clock()
        self._stood_still_s = 0.0

    def now_s(self) -> float:
        """Return the time now."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._read_s > self._stall_s:
                self._stood_still_s += now_s - self._read_s
            self._read_s = now_s
            return now_s - self._stood_still_s
