"""ShardHost: the shard that this process serves, and the lock that one call at a time holds while it uses the shard.

Owns the lock, the replacement of the shard between requests, and what follows each request. Knows no
checkpoints. Requests come by `parashard_server.serving.request_handler`; saving, restoring and inspection run their own
calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from parashard.errors import QueueFull
from parashard_server.core.shard import Shard
from parashard_server.serving.admission_lock import AdmissionLock

_Result = TypeVar("_Result")
TURN_S = 5.0


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
        """Set by a rollback, so that the new incarnation is announced at once."""

    def run_exclusive(self, call: Callable[[Shard], _Result], timeout_s: float = TURN_S) -> _Result:
        """Run `call` on the shard while no request uses it; wait even while the queue of requests is full.

        Raises QueueFull if the lock was not free within `timeout_s`; `call` has not run.
        """
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
        """Serve another incarnation from now on; requests that name the earlier one are refused.

        `taking_over` is called with the new one, under the lock, before any request reaches it.
        """

        def swap(earlier: Shard) -> None:
            taking_over(shard)
            self.shard, self.restored = shard, restored

        self.run_exclusive(swap)
        self.changed.set()

    def go_on(self, begin: Callable[[Shard], None], restored: str) -> None:
        """Let the same shard go on as its next incarnation: run `begin` on it under the lock."""

        def change(shard: Shard) -> None:
            begin(shard)
            self.restored = restored

        self.run_exclusive(change)
        self.changed.set()
