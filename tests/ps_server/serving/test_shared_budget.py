"""gRPC, TCP and shared memory at once, over their real ports: one budget for all; what is refused comes again."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parashard.client.proto_conversion import plan_message
from parashard.errors import QueueFull, RetryLater, Unreachable
from parashard.job import sections
from parashard.job.sections import QUEUE_GRAIN_BYTES, ClusterOptions
from parashard.plan.partition import Partition
from parashard.plan.variables import Variable
from parashard.protocol import rpc, wire
from parashard.protocol.messages import Ack, Buffers, PullRun, Push, PushResult, Slice
from parashard.security import grpc_admission
from parashard.transports.base import Greeting, ShardAddress
from parashard.transports.grpc import SERVICE, GrpcTransport
from parashard.transports.shared_weights import can_share
from parashard.transports.shm import ShmTransport
from parashard.transports.stream import Kind, Stream, receive_answer
from parashard.transports.tcp import TcpTransport
from parashard_server.durability.checkpointer import CheckpointRecord
from parashard_server.metrics import shard_families
from parashard_server.serving.grpc_service import ShardService
from parashard_server.serving.listeners import Listeners
from support.in_process import plan_of, use_small_messages, variables_of
from support.shard_process import ShardProcess
from support.shown_metrics import shown_value
from support.store_fakes import MemoryStore
from support.waiting import DEADLINE_S, eventually

PUSH_BYTES = 2 * QUEUE_GRAIN_BYTES
PLAN = plan_of(variables_of(Variable("w", (PUSH_BYTES // 4,))))

pytestmark = pytest.mark.skipif(not can_share(), reason="this machine shares no memory between processes")


class Halfway:
    """A push over gRPC whose second message waits."""

    def __init__(self, address: str) -> None:
        self.go_on = threading.Event()
        self.call: Any = None
        self._address = address

    def messages(self, first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
        yield first
        self.go_on.wait(DEADLINE_S)
        yield from rest

    def ack(self) -> Ack:
        with rpc.our_errors(self._address):
            return wire.decode_ack(self.call.result())


class Ports:
    """A shard behind all of its ports."""

    def __init__(self, pushes: int, stack: ExitStack) -> None:
        """Serve a shard whose budget holds so many pushes."""
        self._stack = stack
        process = ShardProcess(MemoryStore(), queue_bytes=pushes * PUSH_BYTES, plan=plan_message(PLAN))
        self.shard, self.memory = process.shard, process.builder.push_memory
        job = SimpleNamespace(cluster=SimpleNamespace(transport="auto", workers=1))
        self.ports = Listeners(process.plane, process.host, job, self.memory, "127.0.0.1", 0)  # type: ignore[arg-type]
        server = rpc.Server("127.0.0.1:0")
        ShardService(process.plane, process.host, process.checkpointer, process.lifecycle, self.memory).add_to(server)
        server.start()
        stack.callback(server.stop, grace_s=0.0)
        self.ports.start()
        stack.callback(self.ports.stop)
        self.where = ShardAddress(server.address, 1, data_address=self.ports.address, local_path=self.ports.local_path)
        self.greeting = Greeting(self.shard.identity, "worker-0")
        channel = stack.enter_context(rpc.connect(server.address))
        self._push = channel.stream_unary(f"/{SERVICE}/Push")
        self._host = process.host

    def transport(self, kind: type[GrpcTransport] | type[TcpTransport] | type[ShmTransport]) -> Any:
        transport = kind(self.where, self.greeting)
        self._stack.callback(transport.close)
        return transport

    def push(self, step: int) -> Push:
        whole = Slice(Partition("w", 0, PUSH_BYTES // 4), 1)
        ones = Buffers([np.ones(PUSH_BYTES // 4, np.float32)])
        return Push(self.shard.identity, "worker-0", step, (whole,), False, None, ones)

    def begin_over_grpc(self, step: int) -> Halfway:
        """Send the first of the two messages of a push."""
        halfway = Halfway(self.where.address)
        self._stack.callback(halfway.go_on.set)
        first, rest = wire.encode_push(self.push(step))
        halfway.call = self._push.future(halfway.messages(first, rest), timeout=DEADLINE_S)
        return halfway

    def metric(self, name: str) -> float | None:
        return shown_value(shard_families(self._host, self.memory, CheckpointRecord()), f"parashard_shard_{name}")


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    use_small_messages(monkeypatch, QUEUE_GRAIN_BYTES)  # a push over gRPC has two messages
    monkeypatch.setattr("support.shard_process.RUN", f"budgets-{os.getpid()}")  # its local socket is no other process's
    with ExitStack() as stack:
        yield stack


def begin_over_tcp(ports: Ports, step: int) -> Stream:
    """Return a connection whose push has sent half of its payload."""
    stream: Stream = ports.transport(TcpTransport)._connections.take(time.monotonic() + DEADLINE_S)
    header = wire.push_header(ports.push(step)).SerializeToString()
    prefix = struct.pack("<4sB3sIQ", b"PSS1", Kind.PUSH, b"", len(header), PUSH_BYTES)
    half = ports.push(step).payload.pieces[0][: PUSH_BYTES // 2]
    stream._connection.sendall(prefix + header + bytes(half))
    return stream


def test_pushes_by_all_ports_share_one_budget(stack: ExitStack) -> None:  # P19
    ports = Ports(4, stack)
    shm, tcp, grpc = (ports.transport(kind) for kind in (ShmTransport, TcpTransport, GrpcTransport))
    shm.greet(DEADLINE_S)
    halfway, slot_bytes = begin_over_tcp(ports, 0), ports.ports.slots.held_bytes
    eventually(lambda: ports.memory.held_bytes == slot_bytes + PUSH_BYTES, "the push is being received")
    streaming = ports.begin_over_grpc(1)
    eventually(lambda: ports.memory.held_bytes == slot_bytes + 2 * PUSH_BYTES, "both are being received")
    second = ports.transport(ShmTransport)
    second.greet(DEADLINE_S)
    assert ports.ports.slots.held_bytes == 2 * PUSH_BYTES
    for refused in (
        ports.begin_over_grpc(2).ack,
        lambda: tcp.push(ports.push(2), DEADLINE_S).result(),
        lambda: ports.transport(ShmTransport).greet(DEADLINE_S),
    ):
        with pytest.raises(RetryLater) as told:
            refused()
        assert isinstance(told.value, QueueFull)
    assert ports.metric("queue_bytes") == ports.metric("queue_budget_bytes") == 4 * PUSH_BYTES
    assert ports.metric("queue_refusals_total") == 3
    assert shm.push(ports.push(3), DEADLINE_S).result().result is PushResult.APPLIED, "it has its slot"

    half = ports.push(0).payload.pieces[0][PUSH_BYTES // 2 :]
    halfway._connection.sendall(bytes(half))
    ack = wire.ack(receive_answer(halfway, Kind.ACK, deadline_s=time.monotonic() + DEADLINE_S).header)
    assert ack.result is PushResult.APPLIED
    streaming.go_on.set()
    assert streaming.ack().result is PushResult.APPLIED
    assert tcp.push(ports.push(2), DEADLINE_S).result().result is PushResult.APPLIED, "what was refused came again"
    assert grpc.push(ports.push(4), DEADLINE_S).result().result is PushResult.APPLIED
    shm.close()
    second.close()
    eventually(lambda: ports.memory.held_bytes == 0, "nothing is held")
    assert ports.memory.held_bytes_max == 4 * PUSH_BYTES
    assert ports.shard.storage.weights[0] == 5.0


def test_where_the_budget_is_one_push_all_get_their_turn(stack: ExitStack) -> None:  # P19
    ports = Ports(1, stack)
    with pytest.raises(QueueFull, match="would pass 0, what others leave them"):
        ports.transport(ShmTransport).greet(DEADLINE_S)  # it would be held for good: no push could come another way
    halfway = begin_over_tcp(ports, 0)
    eventually(lambda: ports.memory.held_bytes >= ports.memory.total_bytes, "the push is being received")
    with pytest.raises(QueueFull):
        ports.begin_over_grpc(1).ack()
    halfway.close()
    eventually(lambda: ports.memory.held_bytes == 0, "the push was given up")
    for step, kind in enumerate((GrpcTransport, TcpTransport, GrpcTransport)):
        assert ports.transport(kind).push(ports.push(step), DEADLINE_S).result().result is PushResult.APPLIED


@pytest.mark.parametrize("depth", [0, 1])
def test_the_default_lets_a_pull_pass_a_push_where_steps_overlap(
    depth: int, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:  # P19
    monkeypatch.setattr(sections, "QUEUE_BYTES_LEAST", 0)  # the push is large
    budget_bytes = ClusterOptions(workers=1).push_memory_bytes(PUSH_BYTES, depth)
    ports = Ports(budget_bytes // PUSH_BYTES, stack)
    shm = ports.transport(ShmTransport)
    pushing = shm.push(ports.push(0), DEADLINE_S)
    if depth:
        into = Buffers([np.empty(PUSH_BYTES // 4, np.float32)])
        pulling = shm.pull(PullRun(ports.shard.identity, None, 1, 0, PUSH_BYTES), into, DEADLINE_S)
        assert pulling.result().version <= 1, "while the push has its connection"
    else:
        with pytest.raises(QueueFull):
            ports.transport(ShmTransport).greet(DEADLINE_S)
    assert pushing.result().result is PushResult.APPLIED
    assert ports.ports.slots.held_bytes == (depth + 1) * PUSH_BYTES


def test_a_push_that_is_cancelled_half_way_keeps_no_other_transport_out(stack: ExitStack) -> None:  # P4, P19
    ports = Ports(1, stack)
    tcp = ports.transport(TcpTransport)
    halfway = ports.begin_over_grpc(0)
    eventually(lambda: ports.memory.held_bytes == PUSH_BYTES, "the push is being received")
    with pytest.raises(QueueFull):
        tcp.push(ports.push(1), DEADLINE_S).result()
    halfway.call.cancel()
    eventually(lambda: ports.memory.held_bytes == 0, "the push was given up")
    assert tcp.push(ports.push(1), DEADLINE_S).result().result is PushResult.APPLIED
    assert len(ports.shard.updates.applied) == 1, "nothing of the other"


def test_a_push_whose_sender_stops_half_way_is_given_up(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:  # P4, P19
    monkeypatch.setattr(grpc_admission, "LOOK_S", 0.01)
    monkeypatch.setattr(grpc_admission, "MESSAGE_DEADLINE_S", 0.2)
    ports = Ports(1, stack)
    halfway = ports.begin_over_grpc(0)
    with pytest.raises(Unreachable):
        halfway.ack()
    eventually(lambda: ports.memory.held_bytes == 0, "the push was given up")
    assert ports.transport(GrpcTransport).push(ports.push(0), DEADLINE_S).result().result is PushResult.APPLIED
