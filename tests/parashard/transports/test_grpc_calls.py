"""Pushes and pulls of one gRPC message: who makes the call, and what ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parashard.errors import QueueFull, Unreachable
from parashard.plan.variables import Variable
from parashard.protocol import wire
from parashard.protocol.messages import Ack, Buffers, PullRun, Push, PushResult, Target
from parashard.transports.base import Greeting, ShardAddress
from parashard.transports.grpc import GrpcTransport
from support.in_process import plan_of, variables_of
from support.waiting import DEADLINE_S

PLAN = plan_of(variables_of(Variable("w", (4,))))
TARGET = Target("run-1", "d" * 64, PLAN.version, 0, 1)
PUSH = Push(TARGET, "worker-0", 7, (), True, None, Buffers([]))
ACK = Ack(PushResult.APPLIED, 1, None)


class Method:
    """A method of a channel, and what was asked of it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __call__(self, frame: bytes, timeout: float) -> bytes:
        self._channel.check("blocking", timeout)
        return self._channel.answer()

    def future(self, frame: bytes, timeout: float) -> Future:
        self._channel.check("future", timeout)
        return Future(self._channel)


class Future:
    """A call under way."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def result(self) -> bytes:
        return self._channel.answer()

    def cancel(self) -> None:
        self._channel.calls.append("cancelled")


class Channel:
    """A channel that notes its calls, and fails as a closed one does once it is closed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.timeouts_s: list[float] = []
        self.answer: Callable[[], bytes] = lambda: wire.encode_ack(ACK)
        self._closed = False

    def check(self, kind: str, timeout_s: float) -> None:
        if self._closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        self.calls.append(kind)
        self.timeouts_s.append(timeout_s)

    def unary_unary(self, path: str) -> Method:
        return Method(self)

    def stream_unary(self, path: str) -> Any:
        return None

    unary_stream = stream_unary

    def close(self) -> None:
        self._closed = True


@pytest.fixture
def channel() -> Channel:
    return Channel()


@pytest.fixture
def transport(channel: Channel) -> Iterator[GrpcTransport]:
    opened = GrpcTransport(ShardAddress("shard-0:1", 1), Greeting(TARGET, "worker-0"), connect=lambda address: channel)
    yield opened
    opened.close()


def test_who_waits_for_the_answer_makes_the_call(channel: Channel, transport: GrpcTransport) -> None:
    request = transport.push(PUSH, DEADLINE_S)
    assert channel.calls == []
    assert request.result() == ACK
    assert channel.calls == ["blocking"]
    assert 0 < channel.timeouts_s[0] <= DEADLINE_S


def test_a_started_request_is_under_way_meanwhile(channel: Channel, transport: GrpcTransport) -> None:
    request = transport.push(PUSH, DEADLINE_S)
    request.start()
    assert channel.calls == ["future"]
    assert request.result() == ACK
    assert channel.calls == ["future"]


def test_the_deadline_counts_from_when_the_request_was_made(channel: Channel, transport: GrpcTransport) -> None:
    assert transport.push(PUSH, -1.0).result() == ACK
    assert channel.timeouts_s == [0.001]


@pytest.mark.parametrize("started", [False, True])
def test_what_the_shard_refuses_is_raised(channel: Channel, transport: GrpcTransport, started: bool) -> None:
    def refuse() -> bytes:
        raise QueueFull("64 requests are waiting")

    channel.answer = refuse
    request = transport.push(PUSH, DEADLINE_S)
    if started:
        request.start()
    with pytest.raises(QueueFull, match="64 requests"):
        request.result()


def test_a_request_that_is_cancelled_before_it_is_waited_for_is_never_sent(
    channel: Channel, transport: GrpcTransport
) -> None:
    into = memoryview(bytearray(16))
    request = transport.pull(PullRun(TARGET, None, None, 0, 16), Buffers([into]), DEADLINE_S)
    request.cancel()
    with pytest.raises(Unreachable, match="cancelled"):
        request.result()
    assert channel.calls == []


def test_a_started_request_that_is_cancelled_is_ended(channel: Channel, transport: GrpcTransport) -> None:
    request = transport.push(PUSH, DEADLINE_S)
    request.start()
    request.cancel()
    with pytest.raises(Unreachable, match="cancelled"):
        request.result()
    assert channel.calls == ["future", "cancelled"]


def test_after_closing_nothing_is_sent(channel: Channel, transport: GrpcTransport) -> None:
    before = transport.push(PUSH, DEADLINE_S)
    transport.close()
    for request in (before, transport.push(PUSH, DEADLINE_S)):
        with pytest.raises(Unreachable, match="the connection is closed"):
            request.result()
        with pytest.raises(Unreachable, match="the connection is closed"):
            request.start()
