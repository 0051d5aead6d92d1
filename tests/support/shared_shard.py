"""A shard of shared memory in this process: a fake plane behind the real service and a real socket."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from parashard.plan.partition import Partition
from parashard.protocol.messages import Buffers, PullRun, Push, PushResult, Slice
from parashard.transports.base import ShardAddress
from parashard.transports.shared_weights import SharedWeights
from parashard.transports.shm import ShmTransport
from parashard_server.push_memory import PushMemory, Slots
from parashard_server.serving.listeners import LocalSocket
from parashard_server.serving.stream_server import StreamServer
from parashard_server.serving.stream_services import ShmService
from support.fake_plane import GREETING, TARGET, FakePlane
from support.waiting import DEADLINE_S

OFFSETS = (0, 6, 6, 1000, 3000)
"""Of partitions, one of them empty."""
ELEMENTS = OFFSETS[-1]


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

    def __init__(self, root: Path, *, slots_bytes: int = 1 << 20) -> None:
        self.plane = FakePlane(OFFSETS, SharedWeights)
        self.memory = PushMemory(slots_bytes)
        self.slots = WatchedSlots(self.memory)
        self.shared = True
        self.socket = LocalSocket("r", TARGET.shard, TARGET.incarnation, root=root)
        service = ShmService(self.plane, self._memory, self.slots)
        self._server = StreamServer(self.socket.listening, service.serve, connections_max=8, name="shm")
        self._server.start()
        self.where = ShardAddress("127.0.0.1:1", TARGET.incarnation, local_path=self.socket.path)

    def connect(self) -> ShmTransport:
        return ShmTransport(self.where, GREETING)

    def _memory(self) -> SharedWeights | None:
        assert isinstance(self.plane.memory, SharedWeights)
        return self.plane.memory if self.shared else None

    def stop(self) -> None:
        self._server.stop()
        self.socket.close()


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
    return transport.pull(run or pull_of(), Buffers([into]), DEADLINE_S).result().version


def mappings(name: str) -> list[tuple[int, int]]:
    """Return where this process has memory of this name mapped."""
    gc.collect()  # errors of other tests may keep theirs
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split(maxsplit=1)[0].split("-") for line in lines if f"/memfd:{name} " in line]
    return [(int(begin, 16), int(end, 16)) for begin, end in spans]


def mapped_bytes(name: str) -> int:
    """Return how many bytes of memory with this name this process has mapped."""
    return sum(end - begin for begin, end in mappings(name))
