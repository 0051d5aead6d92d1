"""PushMemory: the one budget for the memory of pushes on their way to a shard, whichever transport carries them.

Counts bytes, and each peer's share of them; the memory itself belongs to its users: receive buffers of TCP and
gRPC (`parashard_server.serving.receive_buffers`) and slots of shared memory (`parashard_server.serving.shm_service`).
Thread-safe; its lock is held for nothing else. Made by `parashard_server.build`, one for a process, for all
incarnations of its shard. Implements rule P19 of docs/protocol.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parashard.errors import QueueFull
from parashard.security.shares import Shares


class PushMemory:
    """What pushes hold, within a budget.

    Invariant: `held_bytes <= total_bytes`, or one push alone is larger.

    Parameters
    ----------
    total_bytes : int
        The budget. A job whose largest push does not fit is refused at its start (`parashard_coordinator.run.resolve`);
        here a push alone is always admitted, so that rounding to pages keeps none out.
    clock : callable
        Monotonic seconds; an attribute too.

    Attributes
    ----------
    shares : Shares
        Whose the bytes are.
    held_bytes_max : int
        The most that was held at once.
    refused : int
        How often something was refused for want of this memory.
    caches : list of callable
        Each gives back what it keeps for later pushes beyond `free_bytes`; called after more has been taken.
    """

    def __init__(self, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_bytes = total_bytes
        self.shares = Shares(total_bytes)
        self.held_bytes_max = 0
        self.refused = 0
        self.caches: list[Callable[[], None]] = []
        self.clock = clock
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes that pushes hold now."""
        return self.shares.held

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that are free."""
        return max(0, self.total_bytes - self.shares.held)

    def has_room(self, peer: str, size_bytes: int, now_s: float) -> bool:
        """Return whether a peer may take so much now."""
        with self._lock:
            return self.shares.has_room(peer, size_bytes, now_s)

    def took(self, peer: str, size_bytes: int, now_s: float) -> bool:
        """Take so much for a peer if it may; return whether it did."""
        with self._lock:
            if not self.shares.take(peer, size_bytes, now_s):
                return False
            self.held_bytes_max = max(self.held_bytes_max, self.shares.held)
        for trim in self.caches:
            trim()
        return True

    def take(self, peer: str, size_bytes: int) -> None:
        """Take so much for a peer.

        Raises
        ------
        QueueFull
            If the budget has not so much left, or the peer's share; nothing is taken.
        """
        if not self.took(peer, size_bytes, self.clock()):
            raise self._full(size_bytes)

    def _full(self, size_bytes: int) -> QueueFull:
        """Count a refusal, and return the error that says so."""
        with self._lock:
            self.refused += 1
            return QueueFull(
                f"pushes on their way hold {self.held_bytes} bytes; another {size_bytes} would pass "
                f"{self.shares.bound(size_bytes)}"
            )

    def give_back(self, peer: str, size_bytes: int) -> None:
        """Return what a peer took."""
        with self._lock:
            self.shares.give_back(peer, size_bytes)

    @contextmanager
    def lent(self, peer: str, size_bytes: int) -> Iterator[None]:
        """Take so much for as long as the context lasts; raises as `take`."""
        self.take(peer, size_bytes)
        try:
            yield
        finally:
            self.give_back(peer, size_bytes)
