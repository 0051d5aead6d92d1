"""PushMemory: the memory budget of all pushes in transit to a shard, over any transport.

Owns the buffers that TCP and gRPC receive pushes into; slots of shared memory and gRPC's single messages are only
counted. Reusing a buffer costs nothing, while the kernel clears each fresh page, which takes longer than receiving it
(docs/decisions/0013-three-transports-one-seam.md). Thread-safe. Implements rule P19 of docs/protocol.md.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parashard.errors import QueueFull
from parashard.job.sections import received_bytes
from parashard.transports import memory
from parashard.transports.memory import Bytes


class PushMemory:
    """Memory of pushes, within a budget.

    Invariant: `held_bytes + kept_bytes <= total_bytes`, or one push alone is larger. A job whose largest push does not
    fit is refused at its start (`parashard_coordinator.run.resolve`); here a push alone is always admitted, so that
    rounding to pages keeps none out.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.held_bytes = 0  # by pushes, now
        self.held_bytes_max = 0  # the most at once
        self.kept_bytes = 0  # of the buffers that wait for the next push
        self.refused = 0  # pushes and slots refused for lack of this memory
        self._kept: list[mmap.mmap] = []  # the least recently used first
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        """Reserve bytes, or raise QueueFull, reserving nothing, if the budget has not enough left."""
        with self._lock:
            self._hold(size_bytes)

    def give_back(self, size_bytes: int) -> None:
        """Free bytes that `take` reserved."""
        with self._lock:
            assert size_bytes <= self.held_bytes, f"{size_bytes} bytes come back, and {self.held_bytes} are held"
            self.held_bytes -= size_bytes

    @contextmanager
    def lent(self, size_bytes: int) -> Iterator[None]:
        """Reserve bytes for a `with` block; raises as `take`."""
        self.take(size_bytes)
        try:
            yield
        finally:
            self.give_back(size_bytes)

    @contextmanager
    def buffer(self, size_bytes: int) -> Iterator[memoryview]:
        """Lend page-aligned, writable memory for a `with` block; its content is undefined."""
        # Raises QueueFull as `take`, and if the machine has no memory.
        length = received_bytes(size_bytes)
        with self._lock:
            kept = next((buffer for buffer in reversed(self._kept) if length <= len(buffer) <= 2 * length), None)
            if kept is not None and self._has_room(len(kept)):
                self._kept.remove(kept)
                self.kept_bytes -= len(kept)
                length = len(kept)
            else:
                kept = None
            self._hold(length)
        try:
            buffer = mmap.mmap(-1, length) if kept is None else kept
        except (OSError, MemoryError, OverflowError):
            self.give_back(length)
            raise QueueFull(f"this machine has no memory for a push of {size_bytes} bytes now") from None
        try:
            yield memoryview(buffer)[:size_bytes]
        finally:
            with self._lock:
                self.held_bytes -= length
                self._kept.append(buffer)
                self.kept_bytes += length
                self._trim()

    def _has_room(self, size_bytes: int) -> bool:
        return not self.held_bytes or self.held_bytes + size_bytes <= self.total_bytes

    def _hold(self, size_bytes: int) -> None:
        if not self._has_room(size_bytes):
            self.refused += 1
            raise QueueFull(
                f"pushes on their way hold {self.held_bytes} bytes; another {size_bytes} would pass {self.total_bytes}"
            )
        self.held_bytes += size_bytes
        self.held_bytes_max = max(self.held_bytes_max, self.held_bytes)
        self._trim()

    def _trim(self) -> None:
        """Return kept buffers to the kernel, the least recently used first, until the rest fits the free budget."""
        while self._kept and self.kept_bytes + self.held_bytes > self.total_bytes:
            self.kept_bytes -= len(self._kept.pop(0))  # unmapped with the last reference


class Slots:
    """Shared-memory slots of connections, within the shard's budget.

    A slot is held for as long as its connection, so two parts of the budget are reserved. Invariants: all slots
    together leave `left_bytes`, so that a push over another transport never waits for a connection to end; a slot
    beyond a worker's even share leaves room for the shares, at least a slot each, of the other ones of `workers`. A
    worker without a slot uses another transport until the shard's next incarnation, and with too few slots a worker's
    pulls wait for its pushes. `lock_pages` is called with each slot, which a GPU then reads in place.
    """

    def __init__(
        self,
        memory: PushMemory,
        *,
        left_bytes: int = 0,
        workers: int = 1,
        lock_pages: Callable[[Bytes], None] = lambda slot: None,
    ) -> None:
        self._memory = memory
        self._lock_pages = lock_pages
        self._left_bytes = left_bytes
        self._workers = workers
        self._lock = threading.Lock()
        self._holders: Counter[str] = Counter()
        self.held_bytes = 0  # of the slots in use

    @contextmanager
    def take(self, size_bytes: int, worker: str) -> Iterator[tuple[int, Bytes]]:
        """Lend a worker a new slot, as a descriptor and mapped; it is freed after the context with its last view."""
        # Raises QueueFull if too little of the budget is left, or the system has no memory; nothing is reserved.
        with self._held(size_bytes, worker), self._memory.lent(size_bytes):
            descriptor, slot = _created(size_bytes)
            try:
                self._lock_pages(slot)
                yield descriptor, slot
            finally:
                del slot  # its memory is freed with its last view, and an error may keep this frame alive
                os.close(descriptor)

    @contextmanager
    def _held(self, size_bytes: int, worker: str) -> Iterator[None]:
        with self._lock:
            room_bytes = max(0, self._memory.total_bytes - self._left_bytes)
            share = max(1, room_bytes // (max(1, size_bytes) * max(1, self._workers)))
            awaited = self._workers * share - sum(min(held, share) for held in self._holders.values())
            kept_bytes = max(0, awaited) * size_bytes if self._holders[worker] >= share else 0
            most_bytes = max(0, room_bytes - kept_bytes)
            if self.held_bytes + size_bytes > most_bytes:
                raise QueueFull(
                    f"connections over shared memory hold {self.held_bytes} bytes; another {size_bytes} would pass "
                    f"{most_bytes}, what others leave them of cluster.queue_bytes"
                )
            self._holders[worker] += 1
            self.held_bytes += size_bytes
        try:
            yield
        finally:
            with self._lock:
                self.held_bytes -= size_bytes
                self._holders -= Counter([worker])


def _created(size_bytes: int) -> tuple[int, Bytes]:
    """Return a new sealed slot: a descriptor, which the caller owns, and its mapping."""
    try:
        descriptor = memory.create("parashard-slot", size_bytes)
        try:
            memory.seal(descriptor, writable=True)
            return descriptor, memory.mapped(descriptor, writable=True)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise QueueFull(f"this machine gives no memory for a slot of {size_bytes} bytes: {error}") from None
