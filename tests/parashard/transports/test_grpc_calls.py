"""Pushes and pulls of one gRPC message: what ends the wait for the answer, and what the shard then may still do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from parashard.errors import QueueFull, Unreachable
from parashard.plan.variables import Variable
from parashard.protocol import wire
from parashard.protocol.buffers import Buffers
from parashard.protocol.messages import PullRun, Push, PushResult, Receipt, Target
from parashard.transports.base import Greeting, ShardAddress
from parashard.transports.grpc import CALLS_MAX, GrpcTransport
from support.in_process import plan_of, variables_of
from support.waiting import DEADLINE_S

PLAN = plan_of(variables_of(Variable("w", (4,))))
TARGET = Target("run-1", "d" * 64, PLAN.version, 0, 1)
PUSH = Push(TARGET, "worker-0", 7, (), True, None, Buffers([]))
RECEIPT = Receipt(PushResult.APPLIED, 1, None)


class Held:
    """A channel whose blocking calls are held until they may go on, or the channel is closed."""

    def __init__(self) -> None:
        self.answer: Callable[[], bytes] = lambda: wire.encode_receipt(RECEIPT)
        self.may_go_on = threading.Event()
        self.under_way = threading.Semaphore(0)
        self.timeouts_s: list[float] = []
        self.closed = False

    def unary_unary(self, path: str) -> Callable[..., bytes]:
        def call(frame: bytes, timeout: float) -> bytes:
            self.timeouts_s.append(timeout)
            self.under_way.release()
            assert self.may_go_on.wait(DEADLINE_S)
            if self.closed:
                raise ValueError("Cannot invoke RPC on closed channel!")
            return self.answer()

        return call

    def stream_unary(self, path: str) -> Any:
        return None

    unary_stream = stream_unary

    def close(self) -> None:
        self.closed = True
        self.may_go_on.set()


@pytest.fixture
def channel() -> Iterator[Held]:
    held = Held()
    yield held
    held.close()


@pytest.fixture
def transport(channel: Held) -> Iterator[GrpcTransport]:
    opened = GrpcTransport(ShardAddress("shard-0:1", 1), Greeting(TARGET, "worker-0"), connect=lambda address: channel)
    yield opened
    opened.close()


def test_the_answer_comes_back(channel: Held, transport: GrpcTransport) -> None:
    channel.may_go_on.set()
    assert transport.push(PUSH, DEADLINE_S).result() == RECEIPT
    assert 0 < channel.timeouts_s[0] <= DEADLINE_S


def test_requests_overlap(channel: Held, transport: GrpcTransport) -> None:
    pending = [transport.push(PUSH, DEADLINE_S) for _ in range(CALLS_MAX)]
    for _ in pending:
        assert channel.under_way.acquire(timeout=DEADLINE_S)
    channel.may_go_on.set()
    assert [request.result() for request in pending] == [RECEIPT] * CALLS_MAX


def test_what_the_shard_refuses_is_raised_where_the_answer_is_waited_for(
    channel: Held, transport: GrpcTransport
) -> None:
    def refuse() -> bytes:
        raise QueueFull("64 requests are waiting")

    channel.answer = refuse
    channel.may_go_on.set()
    request = transport.push(PUSH, DEADLINE_S)
    with pytest.raises(QueueFull, match="64 requests"):
        request.result()


def test_a_cancelled_wait_ends_at_once_while_the_call_goes_on(channel: Held, transport: GrpcTransport) -> None:
    request = transport.push(PUSH, DEADLINE_S)
    assert channel.under_way.acquire(timeout=DEADLINE_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(request.result)
        request.cancel()
        with pytest.raises(Unreachable, match="cancelled"):
            waiting.result(DEADLINE_S)
    assert not channel.may_go_on.is_set()


def test_a_request_that_is_cancelled_before_its_turn_is_never_sent(channel: Held, transport: GrpcTransport) -> None:
    for _ in range(CALLS_MAX):
        transport.push(PUSH, DEADLINE_S)
        assert channel.under_way.acquire(timeout=DEADLINE_S)
    late = transport.push(PUSH, DEADLINE_S)
    late.cancel()
    channel.may_go_on.set()
    with pytest.raises(Unreachable, match="cancelled"):
        late.result()
    assert transport.push(PUSH, DEADLINE_S).result() == RECEIPT
    assert len(channel.timeouts_s) == CALLS_MAX + 1


def test_a_shard_that_says_nothing_is_waited_for_until_the_deadline(channel: Held, transport: GrpcTransport) -> None:
    with pytest.raises(Unreachable, match="no answer before the deadline"):
        transport.push(PUSH, 0.05).result()


def test_closing_ends_what_is_under_way_and_what_waits_for_its_turn(channel: Held, transport: GrpcTransport) -> None:
    pending = [transport.push(PUSH, DEADLINE_S) for _ in range(CALLS_MAX + 2)]
    assert channel.under_way.acquire(timeout=DEADLINE_S)
    transport.close()
    for request in pending:
        with pytest.raises(Unreachable, match="the connection is closed"):
            request.result()
    with pytest.raises(Unreachable, match="the connection is closed"):
        transport.push(PUSH, DEADLINE_S).result()


def test_nothing_is_written_after_a_pull_was_cancelled(channel: Held, transport: GrpcTransport) -> None:
    into = memoryview(bytearray(16))
    request = transport.pull(PullRun(TARGET, None, None, 0, 16), Buffers([into]), DEADLINE_S)
    assert channel.under_way.acquire(timeout=DEADLINE_S)
    request.cancel()
    channel.may_go_on.set()
    with pytest.raises(Unreachable):
        request.result()
    transport.close()
    assert bytes(into) == bytes(16)
