"""ExclusiveCore: the core of one job and the lock around it. Nothing else references the core.

Owns the lock, the clock, and the actions after every call: decisions are stored before they are visible to other
processes, events are logged, and waiting calls are woken. Knows no specific call: the service, the main loop, the
metrics and the pod watch pass functions, which must not return a mutable part of the core.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from parashard.process.logs import log
from parashard.process.shell import AwakeClock
from parashard_coordinator.core.core import Core

STALL_S = 2.0  # the main loop calls many times a second: a longer gap means that the process was suspended

_Result = TypeVar("_Result")


class ExclusiveCore:
    """A core with mutual exclusion.

    The caller must keep no reference to the core. The clock does not count time in which this process was suspended.
    `on_decision` stores the core's decisions, under the lock, so that no other call intervenes.
    """

    def __init__(self, core: Core, clock: Callable[[], float] | None = None) -> None:
        self.__core = core
        self._clock = clock or AwakeClock(STALL_S, time.monotonic).now_s
        self._changed = threading.Condition()
        self._waiting = 0
        self.on_decision: Callable[[Core], None] = lambda core: None

    def run_exclusive(self, call: Callable[[Core, float], _Result]) -> _Result:
        """Run a call on the core under the lock, then store and log its decisions and wake waiters."""
        with self._changed:
            try:
                return self._run(call)
            finally:
                self._wake()

    def run_until(
        self, call: Callable[[Core, float], _Result], enough: Callable[[_Result], bool], wait_s: float
    ) -> _Result:
        """Run a call now, and again when it may get an answer, until `enough(result)` or the time is up."""
        # The longest-waiting calls are woken, at most as many as the core has openings.
        with self._changed:
            deadline_s = time.monotonic() + wait_s
            self._waiting += 1
            try:
                while True:  # test before waiting: something may have changed since the caller's last call
                    result = self._run(call)
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0 or enough(result):
                        return result
                    self._changed.wait(left_s)
            finally:
                self._waiting -= 1
                self._wake()  # wake another call, in case this one was woken and took nothing

    def _run(self, call: Callable[[Core, float], _Result]) -> _Result:
        """Run a call, then store and log its decisions; the caller has the lock."""
        decisions = self.__core.job.decisions
        try:
            return call(self.__core, self._clock())
        finally:
            if self.__core.job.decisions != decisions:
                self.on_decision(self.__core)
            for event in self.__core.job.new_events:
                log.info(event)
            self.__core.job.new_events.clear()

    def _wake(self) -> None:
        """Wake as many waiting calls as the core may be able to answer; the caller has the lock."""
        if self._waiting:
            self._changed.notify(min(self._waiting, self.__core.openings(self._clock())))
