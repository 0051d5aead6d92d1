"""PushMemory: the one budget for the memory of pushes on their way to a shard, whichever transport carries them.

Counts bytes; the memory itself belongs to its users: receive buffers of TCP and gRPC
(`parashard_server.serving.receive_buffers`) and slots of shared memory (`parashard_server.serving.shm_service`).
Thread-safe; its lock is held for nothing else. Made by `parashard_server.build`, one for a process, for all
incarnations of its shard. Implements rule P19 of docs/protocol.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parashard.errors import QueueFull


class PushMemory:
    """What pushes hold, within a budget.

    Invariant: `held_bytes <= total_bytes`, or one push alone is larger.

    Parameters
    ----------
    total_bytes : int
        The budget. A job whose largest push does not fit is refused at its start (`parashard_coordinator.run.resolve`);
        here a push alone is always admitted, so that rounding to pages keeps none out.

    Attributes
    ----------
    held_bytes : int
        Bytes that pushes hold now.
    held_bytes_max : int
        The most that was held at once.
    refused : int
        How often something was refused for want of this memory.
    caches : list of callable
        Each gives back what it keeps for later pushes beyond `free_bytes`; called after more has been taken.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.held_bytes = 0
        self.held_bytes_max = 0
        self.refused = 0
        self.caches: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that are free."""
        return max(0, self.total_bytes - self.held_bytes)

    def took(self, size_bytes: int) -> bool:
        """Take so much if it is free; return whether it was."""
        with self._lock:
            if self.held_bytes and self.held_bytes + size_bytes > self.total_bytes:
                return False
            self.held_bytes += size_bytes
            self.held_bytes_max = max(self.held_bytes_max, self.held_bytes)
        for trim in self.caches:
            trim()
        return True

    def take(self, size_bytes: int) -> None:
        """Take so much.

        Raises
        ------
        QueueFull
            If the budget has not so much left; nothing is taken.
        """
        if self.took(size_bytes):
            return
        with self._lock:
            self.refused += 1
            raise QueueFull(
                f"pushes on their way hold {self.held_bytes} bytes; another {size_bytes} would pass {self.total_bytes}"
            )

    def give_back(self, size_bytes: int) -> None:
        """Free bytes that `take` took."""
        with self._lock:
            assert size_bytes <= self.held_bytes, f"{size_bytes} bytes come back, and {self.held_bytes} are held"
            self.held_bytes -= size_bytes

    @contextmanager
    def lent(self, size_bytes: int) -> Iterator[None]:
        """Take so much for as long as the context lasts; raises as `take`."""
        self.take(size_bytes)
        try:
            yield
        finally:
            self.give_back(size_bytes)
