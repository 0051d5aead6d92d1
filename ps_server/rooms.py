"""Rooms: the memory that pushes are received into, kept for the next push, within a budget (P19).

Knows sizes, not pushes. Called by `ps_server.tcp_service`, from many threads. A room that is used again costs nothing,
while the kernel clears each fresh page, which takes longer than to receive it
(docs/decisions/0013-three-transports-one-seam.md).
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable

from parashard.errors import QueueFull
from parashard.security.shares import Shares

GRAIN_BYTES = 64 << 10  # sizes of rooms are multiples of it, so that their number is bounded as well


class Room:
    """Page-aligned, writable memory of the size asked for; what is in it is left from before."""

    def __init__(self, view: memoryview, leave: Callable[[], None]) -> None:
        self._view = view
        self._leave = leave

    def __enter__(self) -> memoryview:
        return self._view

    def __exit__(self, *_: object) -> None:
        self._leave()


class Rooms:
    """Receive buffers.

    Invariant: rooms in use and kept hold at most the budget, or one room in use alone is larger.

    Parameters
    ----------
    budget_bytes : int
        Greatest sum of all rooms, and each peer has its share. A push alone is always admitted, however large it is.
    clock : callable
        Monotonic seconds.

    Attributes
    ----------
    shares : Shares
        Whose the rooms in use are.
    """

    def __init__(self, budget_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget_bytes = budget_bytes
        self._clock = clock
        self.shares = Shares(budget_bytes)
        self._lock = threading.Lock()
        self._kept: list[mmap.mmap] = []  # the one used last comes last
        self.kept_bytes = 0
        """Bytes of the rooms that wait for the next push."""
        self.held_bytes_max = 0
        """The most that has been in use at once."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the rooms in use."""
        return self.shares.held

    def take(self, size_bytes: int, peer: str = "") -> Room:
        """Lend a peer a room; it comes back at the end of its `with`.

        Raises
        ------
        QueueFull
            If the rooms in use leave too little of the budget, or of the peer's share, or the machine has no memory;
            nothing is reserved.
        """
        memory = self._taken(size_bytes, peer)
        return Room(memoryview(memory)[:size_bytes], lambda: self._keep(memory, peer))

    def _taken(self, size_bytes: int, peer: str) -> mmap.mmap:
        room_bytes = max(GRAIN_BYTES, -(-size_bytes // GRAIN_BYTES) * GRAIN_BYTES)
        with self._lock:
            for index in reversed(range(len(self._kept))):
                if room_bytes <= len(self._kept[index]) <= 2 * room_bytes:  # a larger one would be wasted on it
                    self._hold(len(self._kept[index]), size_bytes, peer)
                    room = self._kept.pop(index)
                    self.kept_bytes -= len(room)
                    return room
            self._hold(room_bytes, size_bytes, peer)
            self._unkeep(self._budget_bytes - self.held_bytes)
        try:
            return mmap.mmap(-1, room_bytes)
        except (OSError, MemoryError, OverflowError):
            with self._lock:
                self.shares.give_back(peer, room_bytes)
            raise QueueFull(f"this machine has no memory for a push of {size_bytes} bytes now") from None

    def _hold(self, room_bytes: int, size_bytes: int, peer: str) -> None:
        if not self.shares.take(peer, room_bytes, self._clock()):
            raise QueueFull(
                f"pushes that are being received hold {self.held_bytes} bytes; one of {size_bytes} would pass "
                f"{self.shares.bound(room_bytes)}"
            )
        self.held_bytes_max = max(self.held_bytes_max, self.held_bytes)

    def _keep(self, room: mmap.mmap, peer: str) -> None:
        with self._lock:
            self.shares.give_back(peer, len(room))
            self._kept.append(room)
            self.kept_bytes += len(room)
            self._unkeep(self._budget_bytes - self.held_bytes)

    def _unkeep(self, left_bytes: int) -> None:
        """Give kept rooms back to the kernel, those first that were used longest ago, until so many bytes are kept."""
        while self._kept and self.kept_bytes > left_bytes:
            self.kept_bytes -= len(self._kept.pop(0))  # unmapped with the last reference
