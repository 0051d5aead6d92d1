"""Owner: the one at a time that may touch a shard.

gRPC's threads take turns here. The line is bounded in length and in time, and an error that is not one of ours ends the
process at once: the weights may be half changed, so nobody may see or save them (P14).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import structlog

from parashard.errors import ParashardError, QueueFull

_Result = TypeVar("_Result")
BROKEN_EXIT_CODE = 70  # sysexits.h: internal software error

log = structlog.get_logger(__name__)


def end_process(error: BaseException) -> None:
    """Log a broken invariant and end the process without a checkpoint."""
    log.critical("shard-broke", error=repr(error), exc_info=error)
    os._exit(BROKEN_EXIT_CODE)


class Owner:
    """A bounded line before a critical section.

    Parameters
    ----------
    waiting_max : int
        How many calls may stand in line; one more is answered QueueFull.
    broken : callable
        Called with an error that is not a ParashardError, while the section is still held.
    """

    def __init__(self, waiting_max: int, broken: Callable[[BaseException], None] = end_process) -> None:
        self._turn = threading.Lock()
        self._places = threading.BoundedSemaphore(waiting_max)
        self._waiting_max = waiting_max
        self._broken = broken

    def run(self, call: Callable[[], _Result], timeout_s: float) -> _Result:
        """Run `call` alone and return its result.

        Raises
        ------
        QueueFull
            If the line is full, or the turn does not come within `timeout_s`; `call` has not run.
        """
        if not self._places.acquire(blocking=False):
            raise QueueFull(f"{self._waiting_max} requests are waiting for this shard already")
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
            self._places.release()
