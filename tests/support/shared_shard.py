"""A shard of shared memory in this process: a data plane that counts, behind the real service and a real socket."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

from parashard.plan.partition import Partition
from parashard.protocol.buffers import Buffers
from parashard.protocol.messages import PullRun, Push, PushResult, Receipt, Run, Slice, Target, Weights
from parashard.transports.base import Greeting, ShardAddress
from parashard.transports.shared_weights import SharedWeights
from parashard.transports.shm import ShmTransport
from parashard_server.serving.local_socket import LocalSocket
from parashard_server.serving.push_memory import PushMemory
from parashard_server.serving.shm_service import ShmService, Slots
from parashard_server.serving.stream_server import StreamServer
from support.waiting import DEADLINE_S

TARGET = Target("run-1", "d" * 64, 5, 0, 1)
OFFSETS = (0, 6, 6, 1000, 3000)
"""Of partitions, one of them empty."""
ELEMENTS = OFFSETS[-1]

_Result = TypeVar("_Result")


class CountingPlane:
    """Adds every push to the weights, partition by partition; two hooks stand for what others do meanwhile.

    Pushes and reads take turns, as they do at the shard's lock; the hooks are called outside of it.

    Attributes
    ----------
    before_push : callable
        Called with each request before it moves anything.
    after_read : callable
        Called after a pull was read, before its answer leaves.
    """

    def __init__(self, offsets: tuple[int, ...] = OFFSETS) -> None:
        self.offsets = offsets
        self.memory = SharedWeights(offsets)
        self.version = 0
        self._turn = threading.Lock()
        self.greeted: list[Target] = []
        self.pulled: list[PullRun] = []
        self.check: Callable[[Target], None] = self.greeted.append
        self.before_push: Callable[[Push], None] = lambda request: None
        self.after_read: Callable[[PullRun], None] = lambda run: None

    @property
    def push_bytes_max(self) -> int:
        return self.memory.weights.nbytes

    def push(self, request: Push, timeout_s: float) -> Receipt:
        self.before_push(request)
        gradient = np.frombuffer(request.payload.whole(), np.float32)
        if gradient.size:
            self.move(gradient)
        return Receipt(PushResult.APPLIED, self.version, None)

    def move(self, gradient: object, *partitions: int) -> None:
        """Move these partitions, or all, to the next version."""
        change = np.broadcast_to(np.asarray(gradient, np.float32), self.memory.weights.shape)
        with self._turn:
            self.version += 1
            for index in partitions or range(len(self.offsets) - 1):
                run = slice(self.offsets[index], self.offsets[index + 1])
                self.memory.begun[index] = self.version
                self.memory.weights[run] += change[run]
                self.memory.done[index] = self.version

    def pull(self, run: PullRun, timeout_s: float, read: Callable[[Weights], _Result]) -> _Result:
        self.pulled.append(run)
        with self._turn:
            result = read(Weights(self.version, self.moved(run)))
        self.after_read(run)
        return result

    def moved(self, asked: PullRun) -> tuple[Run, ...]:
        """Return what a pull is answered with."""
        content = memoryview(self.memory.weights).cast("B")
        moved = []
        for (start, stop), version in zip(pairwise(self.offsets), self.memory.done.tolist(), strict=True):
            begin, end = max(asked.offset_bytes, 4 * start), min(asked.offset_bytes + asked.length_bytes, 4 * stop)
            if begin < end and (asked.known_version is None or version > asked.known_version):
                moved.append(Run(begin, content[begin:end]))
        return tuple(moved)


class WatchedSlots(Slots):
    """Slots that say when one has ended."""

    def __init__(self, memory: PushMemory) -> None:
        super().__init__(memory)
        self.ended = threading.Semaphore(0)

    @contextmanager
    def take(self, size_bytes: int, worker: str) -> Iterator[tuple[int, np.ndarray]]:
        try:
            with super().take(size_bytes, worker) as slot:
                yield slot
        finally:
            self.ended.release()


class SharedShard:
    """A shard that serves this host."""

    def __init__(self, root: Path, *, slots_bytes: int = 1 << 20, direct: bool = True) -> None:
        self.plane = CountingPlane()
        self.memory = PushMemory(slots_bytes)
        self.slots = WatchedSlots(self.memory)
        self.shared = True
        self.socket = LocalSocket("r", TARGET.shard, TARGET.incarnation, root=root)
        service = ShmService(self.plane, self._memory, self.slots, direct=direct)
        self._server = StreamServer(self.socket.listening, service.serve, connections_max=8, name="shm")
        self._server.start()
        self.where = ShardAddress("127.0.0.1:1", TARGET.incarnation, local_path=self.socket.path)

    def connect(self) -> ShmTransport:
        return ShmTransport(self.where, GREETING)

    def _memory(self) -> SharedWeights | None:
        return self.plane.memory if self.shared else None

    def stop(self) -> None:
        self._server.stop()
        self.socket.close()


GREETING = Greeting(TARGET, "worker-0")


def push_of(content: np.ndarray, step: int = 0) -> Push:
    """Return a push of float32 elements."""
    slices = (Slice(Partition("w", 0, content.size), 1),) if content.size else ()
    return Push(TARGET, "worker-0", step, slices, False, None, Buffers([content]))


def pull_of(begin: int = 0, end: int = ELEMENTS, *, known: int | None = None, round_: int | None = None) -> PullRun:
    """Return the pull of a run of elements."""
    return PullRun(TARGET, round_, None, 4 * begin, 4 * (end - begin), known)


GRADIENT = np.arange(ELEMENTS, dtype=np.float32)


def push(transport: ShmTransport, content: np.ndarray, step: int = 0) -> PushResult:
    """Push and return what became of it."""
    return transport.push(push_of(content, step), DEADLINE_S).result().result


def pull(transport: ShmTransport, into: np.ndarray, run: PullRun | None = None) -> int:
    """Pull and return the version."""
    return transport.pull(run or pull_of(), Buffers([into]), DEADLINE_S).result()


def mappings(name: str) -> list[tuple[int, int]]:
    """Return where this process has memory of this name mapped."""
    gc.collect()  # errors of other tests may keep theirs
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split(maxsplit=1)[0].split("-") for line in lines if f"/memfd:{name} " in line]
    return [(int(begin, 16), int(end, 16)) for begin, end in spans]


def mapped_bytes(name: str) -> int:
    """Return how many bytes of memory with this name this process has mapped."""
    return sum(end - begin for begin, end in mappings(name))
