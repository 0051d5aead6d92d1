"""ReceiveBuffers: a pool of the memory that pushes are received into, within the shard's budget.

Knows sizes, not pushes. Called by `parashard_server.serving.tcp_service` and `parashard_server.serving.grpc_service`,
from many threads. A buffer that is used
again costs nothing, while the kernel clears each fresh page, which takes longer than to receive it
(docs/decisions/0013-three-transports-one-seam.md).
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parashard.errors import QueueFull
from parashard.job.sections import received_bytes
from parashard_server.serving.push_memory import PushMemory


class ReceiveBuffer:
    """Page-aligned, writable memory of the size asked for; what is in it is left from before."""

    def __init__(self, view: memoryview, leave: Callable[[], None]) -> None:
        self._view = view
        self._leave = leave

    def __enter__(self) -> memoryview:
        return self._view

    def __exit__(self, *_: object) -> None:
        self._leave()


class ReceiveBuffers:
    """Receive buffers.

    Invariant: buffers in use are held in the shard's memory for pushes; those that are kept fit into what is free.

    Parameters
    ----------
    memory : PushMemory
        Where buffers in use are counted; an attribute too.

    Attributes
    ----------
    held_bytes : int
        Bytes of the buffers in use.
    kept_bytes : int
        Bytes of the buffers that wait for the next push.
    """

    def __init__(self, memory: PushMemory) -> None:
        self.memory = memory
        self._lock = threading.Lock()  # never held while the memory is asked: it asks `_unkeep` in its turn
        self._kept: list[mmap.mmap] = []  # the one used last comes last
        self.kept_bytes = 0
        self.held_bytes = 0
        memory.caches.append(self._unkeep)

    def take(self, size_bytes: int) -> ReceiveBuffer:
        """Lend a buffer; it comes back at the end of its `with`.

        Raises
        ------
        QueueFull
            If pushes on their way leave too little of the budget, or the machine has no memory; nothing is reserved.
        """
        memory = self._used_again(size_bytes) or self._new(size_bytes)
        with self._lock:
            self.held_bytes += len(memory)
        return ReceiveBuffer(memoryview(memory)[:size_bytes], lambda: self._keep(memory))

    @contextmanager
    def lent(self, payload: memoryview) -> Iterator[memoryview]:
        """Count a payload that has memory of its own for as long as it is used; raises as `take`."""
        with self.memory.lent(payload.nbytes):
            yield payload

    def _used_again(self, size_bytes: int) -> mmap.mmap | None:
        """Return a kept buffer that is not wasted on so few bytes, if there is one and the budget has room for it."""
        least = received_bytes(size_bytes)
        with self._lock:
            found = [index for index, buffer in enumerate(self._kept) if least <= len(buffer) <= 2 * least]
            if not found:
                return None
            buffer = self._kept.pop(found[-1])
            self.kept_bytes -= len(buffer)
        if self.memory.took(len(buffer)):
            return buffer
        self._put_back(buffer)
        return None

    def _new(self, size_bytes: int) -> mmap.mmap:
        length = received_bytes(size_bytes)
        self.memory.take(length)
        try:
            return mmap.mmap(-1, length)
        except (OSError, MemoryError, OverflowError):
            self.memory.give_back(length)
            raise QueueFull(f"this machine has no memory for a push of {size_bytes} bytes now") from None

    def _keep(self, buffer: mmap.mmap) -> None:
        with self._lock:
            self.held_bytes -= len(buffer)
        self.memory.give_back(len(buffer))
        self._put_back(buffer)

    def _put_back(self, buffer: mmap.mmap) -> None:
        with self._lock:
            self._kept.append(buffer)
            self.kept_bytes += len(buffer)
        self._unkeep()

    def _unkeep(self) -> None:
        """Return kept buffers to the kernel, the least recently used first, until the rest fits the free budget."""
        with self._lock:
            while self._kept and self.kept_bytes > self.memory.free_bytes:
                self.kept_bytes -= len(self._kept.pop(0))  # unmapped with the last reference
