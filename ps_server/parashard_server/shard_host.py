"""ShardHost: the shard that this process serves, and the bounded lock that one call at a time holds while it uses it.

The threads of all transports take the lock in turn; the queue for it is bounded in length and in time. An error that is
not one of ours ends the process at once: the weights may be half changed, so no one may see or save them. The shard is
replaced between requests.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from parashard.errors import ParashardError, QueueFull
from parashard.process.logs import log
from parashard_server.core.shard import Shard

_Result = TypeVar("_Result")
TURN_S = 5.0
BROKEN_EXIT_CODE = 70  # sysexits.h: internal software error


def end_process(error: BaseException) -> None:
    """Log a broken invariant and end the process without a checkpoint."""
    try:
        log.critical("shard-broke", error=repr(error), exc_info=error)
    finally:
        os._exit(BROKEN_EXIT_CODE)  # even if the log cannot be written


class AdmissionLock:
    """A mutual-exclusion lock that at most `waiting_max` calls hold or wait for; one more is answered QueueFull.

    `broken` is called with an error that is not a ParashardError, while the lock is still held.
    """

    def __init__(
        self,
        waiting_max: int,
        broken: Callable[[BaseException], None] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._waiting_max = waiting_max
        self._broken = broken
        self._clock = clock
        self._counting = threading.Lock()
        self._present = 0  # calls that hold the lock or wait for it; <= waiting_max
        self._busy_s = 0.0  # of the finished spans with `_present` > 0
        self._busy_since_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which some call held the lock or waited for it."""
        with self._counting:
            return self._busy_s + (self._clock() - self._busy_since_s if self._present else 0.0)

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock for a `with` block. Raises QueueFull if the queue is full, or the lock is not free in time."""
        with self._counting:
            if self._present >= self._waiting_max:
                raise QueueFull(f"{self._waiting_max} requests are waiting for this shard already")
            if not self._present:
                self._busy_since_s = self._clock()
            self._present += 1
        acquired = False
        try:
            acquired = self._lock.acquire(timeout=timeout_s)
            if not acquired:
                raise QueueFull(f"this shard was busy for {timeout_s:.1f} s")
            yield
        except ParashardError:
            raise
        except BaseException as error:
            if acquired:
                self._broken(error)
            raise
        finally:
            if acquired:
                self._lock.release()
            with self._counting:
                self._present -= 1
                if not self._present:
                    self._busy_s += self._clock() - self._busy_since_s


class ShardHost:
    """A shard and its lock, which stays when the shard is replaced.

    `after_request` is called under the lock after each request that the shard has answered, with the seconds that it
    took.
    """

    def __init__(self, shard: Shard, lock: AdmissionLock, restored: str) -> None:
        self.shard = shard
        self.lock = lock
        self.restored = restored
        self.after_request: Callable[[Shard, float], None] = lambda shard, seconds: None
        self.changed = threading.Event()
        """Set by a new incarnation or a saved round, to announce it at once."""

    def run_exclusive(self, call: Callable[[Shard], _Result], timeout_s: float = TURN_S) -> _Result:
        """Run `call` under the lock, retrying while the queue is full; QueueFull after `timeout_s`: it has not run."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                with self.lock.held(max(0.0, deadline_s - time.monotonic())):
                    return call(self.shard)
            except QueueFull:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(0.001)  # the queue was full; requests leave it within milliseconds

    def replace(self, shard: Shard, restored: str, *, taking_over: Callable[[Shard], None]) -> None:
        """Serve another incarnation; `taking_over` is called with it, under the lock, before any request reaches it."""

        def swap(earlier: Shard) -> None:
            taking_over(shard)
            self.shard, self.restored = shard, restored

        self.run_exclusive(swap)
        self.changed.set()
