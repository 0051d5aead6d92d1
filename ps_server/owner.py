"""Owner: the one at a time that may touch a shard.

The threads of all transports take turns here. The line is bounded in length and in time, and an error that is not one
of ours ends the process at once: the weights may be half changed, so nobody may see or save them (P14).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from parashard.errors import ParashardError, QueueFull

_Result = TypeVar("_Result")
BROKEN_EXIT_CODE = 70  # sysexits.h: internal software error

log = structlog.get_logger(__name__)


def end_process(error: BaseException) -> None:
    """Log a broken invariant and end the process without a checkpoint."""
    try:
        log.critical("shard-broke", error=repr(error), exc_info=error)
    finally:
        os._exit(BROKEN_EXIT_CODE)  # P21


class Owner:
    """A bounded line before a critical section.

    Parameters
    ----------
    waiting_max : int
        How many calls may stand in line; one more is answered QueueFull.
    broken : callable
        Called with an error that is not a ParashardError, while the section is still held.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        waiting_max: int,
        broken: Callable[[BaseException], None] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._turn = threading.Lock()
        self._waiting_max = waiting_max
        self._broken = broken
        self._clock = clock
        self._counting = threading.Lock()
        self._present = 0  # who is served or stands in line; <= waiting_max
        self._busy_s = 0.0  # of the times with somebody present that are over
        self._busy_since_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds with somebody present: also those in which one hands the turn on and the next has not woken up."""
        with self._counting:
            return self._busy_s + (self._clock() - self._busy_since_s if self._present else 0.0)

    def run(self, call: Callable[[], _Result], timeout_s: float) -> _Result:
        """Run `call` alone and return its result.

        Raises
        ------
        QueueFull
            If the line is full, or the turn does not come within `timeout_s`; `call` has not run.
        """
        self._enter()
        try:
            if not self._turn.acquire(timeout=timeout_s):
                raise QueueFull(f"this shard was busy for {timeout_s:.1f} s")
            try:
                return call()
            except ParashardError:
                raise
            except BaseException as error:
                self._broken(error)
                raise
            finally:
                self._turn.release()
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._counting:
            if self._present >= self._waiting_max:
                raise QueueFull(f"{self._waiting_max} requests are waiting for this shard already")
            if not self._present:
                self._busy_since_s = self._clock()
            self._present += 1

    def _leave(self) -> None:
        with self._counting:
            self._present -= 1
            if not self._present:
                self._busy_s += self._clock() - self._busy_since_s
