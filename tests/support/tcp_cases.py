"""A fake shard behind a real socket, and requests to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from parashard.plan.partition import Partition
from parashard.protocol.messages import Ack, Buffers, PullRun, Push, Slice, Target
from parashard.transports.base import ShardAddress
from parashard.transports.stream import Stream, greet
from parashard.transports.tcp import TcpTransport
from parashard_server.push_memory import PushMemory
from parashard_server.serving.stream_server import StreamServer
from parashard_server.serving.stream_services import TcpService
from support.fake_plane import GREETING, TARGET, FakePlane
from support.stream_cases import DEADLINE_S, serving, soon

ELEMENTS = 1000


def push_of(values: np.ndarray, target: Target = TARGET) -> Push:
    slices = (Slice(Partition("w", 0, values.size), 1),) if values.size else ()
    half = values.size // 2
    return Push(target, "worker-0", 3, slices, False, None, Buffers([values[:half], values[half:]]))


def pull_of(
    length_bytes: int = 4 * ELEMENTS, offset_bytes: int = 0, known_version: int | None = None, target: Target = TARGET
) -> PullRun:
    return PullRun(target, None, 3, offset_bytes, length_bytes, known_version)


class Served:
    """A fake shard behind a real socket."""

    def __init__(
        self,
        server: StreamServer,
        plane: FakePlane,
        memory: PushMemory,
        connect: Callable[[], Stream],
    ) -> None:
        self.server = server
        self.plane = plane
        self.memory = memory
        self.connect = connect  # a bare stream
        self.transport = TcpTransport(ShardAddress("", 7, data_address=server.address), GREETING)

    def push(self, push: Push) -> Ack:
        return self.transport.push(push, DEADLINE_S).result()

    def pull(self, run: PullRun) -> tuple[int, np.ndarray]:
        """Return the version, and the values; -1 where nothing came."""
        into = np.full(run.length_bytes // 4, -1, "<f4")
        return self.transport.pull(run, Buffers([into]), DEADLINE_S).result().version, into

    def greeted(self) -> Stream:
        """Return a bare stream that may say anything now."""
        stream = self.connect()
        greet(stream, GREETING, deadline_s=soon())
        return stream


@contextmanager
def shard(*ends: int, budget_bytes: int = 1 << 20) -> Iterator[Served]:
    """Yield a shard whose partitions end at these elements; by default one of all ELEMENTS."""
    plane, memory = FakePlane([0, *(ends or [ELEMENTS])]), PushMemory(budget_bytes)
    with serving(TcpService(plane, memory).serve) as (server, connect):
        served = Served(server, plane, memory, connect)
        try:
            yield served
        finally:
            served.transport.close()


def ramp(elements: int = ELEMENTS) -> np.ndarray:
    return np.arange(elements, dtype="<f4")
