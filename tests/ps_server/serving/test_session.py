"""What both stream services keep to: who may begin, what may be asked, and how long a request may take."""

import time
from collections.abc import Iterator

import pytest

from parashard._proto import stream_pb2, tensor_pb2
from parashard.errors import MalformedFrame, NonFiniteGradient, StaleIncarnation
from parashard.protocol import wire
from parashard.protocol.messages import Ack, PushResult, Target
from parashard.protocol.rpc import data_deadline_s
from parashard.transports.stream import HEADER_BYTES_MAX, Head, Kind
from parashard_server.serving.stream_services import HEAD_DEADLINE_S, answer_to_push, greeted, requests
from support.fake_plane import TARGET, FakePlane

MIB = 1 << 20


class Said:
    """A stream from which these messages come."""

    def __init__(self, *heads: Head) -> None:
        self._heads: Iterator[Head] = iter(heads)
        self.deadlines_s: list[float] = []
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def receive(self, *, deadline_s: float, header_bytes_max: int = HEADER_BYTES_MAX) -> Head:
        self.deadlines_s.append(deadline_s)
        self.header_bytes_max = header_bytes_max
        return next(self._heads)


def hello(target: Target = TARGET) -> Head:
    message = stream_pb2.Hello(target=wire.target_message(target), worker="worker-0")
    return Head(Kind.HELLO, message, 0)


def push_header() -> tensor_pb2.PushHeader:
    return tensor_pb2.PushHeader(target=wire.target_message(TARGET), total_bytes=8)


def test_hello_names_the_worker():
    stream = Said(hello())
    assert greeted(stream, FakePlane([0, 2]), deadline_s=7.0).worker == "worker-0"
    assert stream.deadlines_s == [7.0]
    assert stream.header_bytes_max == 4096, "the peer is not authenticated yet"


def test_hello_to_another_incarnation_is_refused():  # P3
    another = Target(TARGET.run_id, TARGET.job_digest, 1, 0, TARGET.incarnation + 1)
    with pytest.raises(StaleIncarnation):
        greeted(Said(hello(another)), FakePlane([0, 2]), deadline_s=7.0)


def test_nothing_comes_before_hello():
    with pytest.raises(MalformedFrame, match="begins with HELLO, found PULL"):
        greeted(Said(Head(Kind.PULL, b"", 0)), FakePlane([0, 2]), deadline_s=7.0)


def test_pushes_and_pulls_are_requests_and_nothing_else_is():
    stream = Said(Head(Kind.PUSH, b"", 8), Head(Kind.PULL, b"", 0), hello())
    asked = requests(stream, FakePlane([0, 2]))
    assert [next(asked)[0].kind for _ in range(2)] == [Kind.PUSH, Kind.PULL]
    with pytest.raises(MalformedFrame, match="requests are PUSH and PULL, found HELLO"):
        next(asked)
    assert stream.waits == 3, "for ever, before each"


def test_a_request_has_the_time_that_the_shards_size_needs():
    stream, plane = Said(Head(Kind.PUSH, b"", 8)), FakePlane([0, 32 * MIB])
    before_s = time.monotonic()
    _, deadline_s = next(requests(stream, plane))
    after_s, needed_s = time.monotonic(), data_deadline_s(128 * MIB)
    assert before_s + needed_s <= deadline_s <= after_s + needed_s
    assert before_s + HEAD_DEADLINE_S <= stream.deadlines_s[0] <= after_s + HEAD_DEADLINE_S, "its first bytes have less"


def test_a_push_is_answered_with_its_ack_or_with_the_shards_error():
    plane = FakePlane([0, 2])
    kind, ack = answer_to_push(plane, push_header(), memoryview(bytes(8)), time.monotonic() + 10.0)
    assert (kind, ack.version) == (Kind.ACK, 1)

    def refuse(request: object) -> None:
        raise NonFiniteGradient("inf")

    plane.before = refuse
    kind, refusal = answer_to_push(plane, push_header(), memoryview(bytes(8)), time.monotonic() + 10.0)
    assert (kind, refusal.code, refusal.message) == (Kind.REFUSAL, NonFiniteGradient.code, "inf")


def test_a_moment_that_has_passed_leaves_no_time():
    plane, waits_s = FakePlane([0, 2]), []
    plane.push = lambda push, timeout_s: waits_s.append(timeout_s) or Ack(PushResult.APPLIED, 1, None)
    answer_to_push(plane, push_header(), memoryview(bytes(8)), time.monotonic() - 1.0)
    assert waits_s == [0.0]
