"""TcpService: what becomes of peers that lie, stop in the middle, or never read."""

import struct
import time
from collections.abc import Iterator

import pytest

from parashard._proto import tensor_pb2
from parashard.errors import LimitExceeded, MalformedFrame, ParashardError, Unreachable
from parashard.protocol import wire
from parashard.transports.stream import Kind, Refused, Stream, receive_answer
from parashard_server.serving import stream_services
from support.stream_cases import DEADLINE_S, all_left, soon
from support.tcp_cases import Served, pull_of, push_of, ramp, shard


@pytest.fixture
def served() -> Iterator[Served]:
    with shard() as served:
        yield served


def said(stream: Stream, *content: bytes) -> ParashardError:
    """Send bytes and return the error that the shard ends the connection with."""
    for part in content:
        stream._connection.sendall(part)
    with pytest.raises(Refused) as caught:
        receive_answer(stream, Kind.ACK, deadline_s=soon())
    with pytest.raises(Unreachable):
        stream.receive(deadline_s=soon())
    return caught.value.error


def message(kind: int, header: bytes = b"", payload_bytes: int = 0) -> bytes:
    return struct.pack("<4sB3sIQ", b"PSS1", kind, b"", len(header), payload_bytes) + header


def push_header(total_bytes: int) -> bytes:
    header = wire.push_header(push_of(ramp()))
    header.total_bytes = total_bytes
    return header.SerializeToString()


PULL_IN_SLOT = wire.pull_header(pull_of(), in_slot=True).SerializeToString()
KEYS = tensor_pb2.PullHeader(keys=[tensor_pb2.TableKeys(table="user", rows=2**40)]).SerializeToString()
HUGE = 100 << 30


class TestLies:
    """Are found before memory is taken for them; the peer is told, and left."""

    @pytest.mark.parametrize(
        ("content", "kind", "text"),
        [
            (message(3, push_header(HUGE), HUGE), LimitExceeded, "a push of 107374182400 bytes; .* allows 4000"),
            (message(3, push_header(4000), HUGE), LimitExceeded, "107374182400"),
            (message(3, push_header(4000), 2**64 - 1), LimitExceeded, "18446744073709551615"),
            (message(3, push_header(HUGE), 4000), MalformedFrame, "a push of 107374182400 bytes came with 4000"),
            (message(3, push_header(4000), 3999), MalformedFrame, "a push of 4000 bytes came with 3999"),
            (message(3, push_header(4000), 0), MalformedFrame, "a push of 4000 bytes came with 0"),
            (message(3, b"\xff\xff"), MalformedFrame, "not a PushHeader"),
            (message(5, b"\xff\xff"), MalformedFrame, "not a PullHeader"),
            (message(5, b"", 4), MalformedFrame, "a pull of 0 rows has a payload of 4 bytes"),
            (message(5, KEYS, 4), MalformedFrame, "a pull of 1099511627776 rows has a payload of 4 bytes"),
            (message(5, KEYS, 2**43), LimitExceeded, "8796093022208 bytes of keys; allowed are 4194304"),
            (message(5, PULL_IN_SLOT), MalformedFrame, "names a slot, and this connection has none"),
            (message(1), MalformedFrame, "requests are PUSH and PULL, found HELLO"),
            (message(6), MalformedFrame, "found WEIGHTS"),
            (message(9), MalformedFrame, "unknown message kind 9; known are 1 to 7"),
            (b"GET /metrics HTTP/1.1\r\n\r\n", MalformedFrame, "begins with"),
            (struct.pack("<4sB3sIQ", b"PSS1", 3, b"", 2**32 - 1, 0), LimitExceeded, "header of 4294967295 bytes"),
        ],
    )
    def test_of_a_request(self, served, content, kind, text):
        error = said(served.greeted(), content)
        assert type(error) is kind
        with pytest.raises(type(error), match=text):
            raise error
        assert (served.memory.held_bytes_max, served.plane.pushes, served.plane.pulls) == (0, [], [])

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (message(5), "a connection begins with HELLO, found PULL"),
            (message(1, b"\xff\xff"), "not a Hello"),
            (b"\x16\x03\x01" + bytes(17), "begins with"),
        ],
    )
    def test_of_a_first_message(self, served, content, text):
        error = said(served.connect(), content)
        assert isinstance(error, MalformedFrame)
        assert text in error.message

    def test_of_a_pull_longer_than_any_shard(self, served):
        stream = served.greeted()
        stream.send(Kind.PULL, wire.pull_header(pull_of(2**64 - 1)), deadline_s=soon())
        with pytest.raises(Refused, match="are not within 4000"):
            receive_answer(stream, Kind.WEIGHTS, deadline_s=soon())


class TestPeersThatStop:
    """Hold a thread and a buffer until their deadline, and no longer."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch) -> None:
        monkeypatch.setattr(stream_services, "HEAD_DEADLINE_S", 0.02)
        monkeypatch.setattr(stream_services, "data_deadline_s", lambda length_bytes: 0.02)

    @pytest.mark.parametrize("cut", [1, 19, 25, -1])
    def test_in_the_middle_of_a_push(self, served, cut):
        stream = served.greeted()
        content = message(3, push_header(4000), 4000) + bytes(4000)
        stream._connection.sendall(content[:cut])
        with pytest.raises(Unreachable, match="closed"):
            stream.receive(deadline_s=soon())
        assert (served.memory.held_bytes, served.plane.pushes) == (0, [])

    def test_reading(self):
        elements = 4 << 20
        with shard(elements) as served:
            served.greeted().send(Kind.PULL, wire.pull_header(pull_of(4 * elements)), deadline_s=soon())
            all_left()
            assert served.plane.pulls
            assert len(served.plane.pulls) < 4 * elements // stream_services.PIECE_BYTES
            assert served.server.connections == 0

    def test_between_requests_is_no_fault(self, served, monkeypatch):
        stream = served.greeted()
        for _ in range(2):
            with pytest.raises(Unreachable, match="before the deadline"):
                stream.receive(deadline_s=time.monotonic() + 0.03)
        monkeypatch.setattr(stream_services, "HEAD_DEADLINE_S", DEADLINE_S)
        monkeypatch.setattr(stream_services, "data_deadline_s", lambda length_bytes: DEADLINE_S)
        stream.send(Kind.PULL, wire.pull_header(pull_of(0)), deadline_s=soon())
        head = receive_answer(stream, Kind.WEIGHTS, deadline_s=soon())
        assert head.header.version == 0
