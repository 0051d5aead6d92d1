"""Stream: messages arrive whole, anything else is refused, no wait exceeds its deadline."""

import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parashard._proto import stream_pb2
from parashard.errors import (
    LimitExceeded,
    MalformedFrame,
    NonFiniteGradient,
    ParashardError,
    PeerFailed,
    QueueFull,
    Unreachable,
)
from parashard.transports.stream import (
    HEADER_BYTES_MAX,
    HEADERS,
    REFUSAL_BYTES_MAX,
    Kind,
    Refused,
    Stream,
    greet,
    receive_answer,
    refusal,
    refused,
)
from support.fake_plane import GREETING
from support.stream_peer import DEADLINE_S, raw, soon, stream_pair
from support.tiers import fewer

HELLO = stream_pb2.Hello(worker="worker-0")


class TestMessages:
    """What was sent is what is received."""

    @given(kind=st.sampled_from([Kind.PUSH, Kind.WEIGHTS]), pieces=st.lists(st.binary(max_size=40), max_size=5))
    @fewer(2)
    def test_header_and_payload_arrive(self, kind, pieces):
        content = b"".join(pieces)
        with stream_pair() as (mine, theirs):
            mine.send(kind, HELLO, [memoryview(piece) for piece in pieces], deadline_s=soon())
            head = theirs.receive(deadline_s=soon())
            received = bytearray(head.payload_bytes)
            theirs.receive_into([memoryview(received)], deadline_s=soon())
        header = HEADERS[kind].FromString(HELLO.SerializeToString())
        assert (head.kind, head.header, received) == (kind, header, content)

    def test_a_payload_goes_where_it_belongs(self):
        left, right = bytearray(3), bytearray(5)
        with stream_pair() as (mine, theirs):
            mine.send(Kind.PUSH, HELLO, [memoryview(b"abcdefgh")], deadline_s=soon())
            theirs.receive(deadline_s=soon())
            theirs.receive_into([memoryview(left), memoryview(b""), memoryview(right)], deadline_s=soon())
        assert (left, right) == (b"abc", b"defgh")

    def test_what_follows_a_skipped_payload_is_the_next_message(self):
        with stream_pair() as (mine, theirs), ThreadPoolExecutor(1) as pool:
            sending = pool.submit(mine.send, Kind.PUSH, HELLO, [memoryview(bytes(1 << 20))], deadline_s=soon())
            theirs.skip(theirs.receive(deadline_s=soon()).payload_bytes, deadline_s=soon())
            sending.result(DEADLINE_S)
            mine.send(Kind.PULL, HELLO, deadline_s=soon())
            assert theirs.receive(deadline_s=soon()).kind is Kind.PULL

    def test_a_header_as_long_as_allowed_arrives_and_a_longer_one_is_not_sent(self):
        overhead = len(stream_pb2.Hello(worker="x" * 100_000).SerializeToString()) - 100_000
        longest = stream_pb2.Hello(worker="x" * (HEADER_BYTES_MAX - overhead))
        with stream_pair() as (mine, theirs), ThreadPoolExecutor(1) as pool:
            sending = pool.submit(mine.send, Kind.HELLO, longest, deadline_s=soon())
            assert theirs.receive(deadline_s=soon()).header.ByteSize() == HEADER_BYTES_MAX
            sending.result(DEADLINE_S)
            longest.worker += "x"
            with pytest.raises(LimitExceeded, match="header has 1048577 bytes; allowed are 1048576"):
                mine.send(Kind.HELLO, longest, deadline_s=soon())


def is_closed(reading: int) -> bool:
    """Tell whether a pipe has no writer any more, and close this end too."""
    os.set_blocking(reading, False)
    try:
        return os.read(reading, 1) == b""
    except BlockingIOError:
        return False
    finally:
        os.close(reading)


class TestDescriptors:
    """File descriptors travel over Unix sockets with the message that brings them, and never leak."""

    def test_they_arrive_with_their_message(self):
        reading, writing = os.pipe()
        with stream_pair() as (mine, theirs):
            mine.send(Kind.WELCOME, HELLO, deadline_s=soon(), descriptors=[writing])
            os.close(writing)
            [received] = theirs.receive(deadline_s=soon(), descriptors_max=2).descriptors
        os.write(received, b"through")
        assert os.read(reading, 100) == b"through"
        os.close(received)
        os.close(reading)

    @pytest.mark.parametrize("descriptors_max", [0, 1, 2])
    def test_those_that_were_not_requested_are_closed(self, descriptors_max):
        reading, writing = os.pipe()
        with stream_pair() as (mine, theirs):
            mine.send(Kind.WELCOME, HELLO, deadline_s=soon(), descriptors=[writing, writing, writing])
            os.close(writing)
            if descriptors_max:
                with pytest.raises(LimitExceeded, match=f"more than {descriptors_max} file descriptors"):
                    theirs.receive(deadline_s=soon(), descriptors_max=descriptors_max)
            else:
                assert theirs.receive(deadline_s=soon()).descriptors == ()
        assert is_closed(reading)

    def test_those_of_a_message_that_is_none_are_closed(self):
        reading, writing = os.pipe()
        mine, theirs = socket.socketpair()
        stream = Stream(theirs, "my-end")
        with mine:
            socket.send_fds(mine, [raw(99)], [writing])
            os.close(writing)
            with pytest.raises(MalformedFrame):
                stream.receive(deadline_s=soon(), descriptors_max=1)
        stream.close()
        assert is_closed(reading)


def received(content: bytes) -> ParashardError:
    """Return what receiving these bytes, and then the end, raises."""
    mine, theirs = socket.socketpair()
    with mine:
        mine.sendall(content)
    stream = Stream(theirs, "my-end")
    try:
        with pytest.raises(ParashardError) as caught:
            stream.receive(deadline_s=soon())
    finally:
        stream.close()
    assert caught.value.peer == "my-end"
    return caught.value


class TestWhatIsNoMessage:
    """Nothing is believed before it is checked."""

    @pytest.mark.parametrize(
        ("content", "kind", "text"),
        [
            (raw(1, magic=b"PSF1"), MalformedFrame, "begins with b'PSS1'"),
            (raw(1, reserved=b"\0\0\1"), MalformedFrame, "begins with"),
            (raw(0), MalformedFrame, "unknown message kind 0; known are 1 to 7"),
            (raw(8), MalformedFrame, "unknown message kind 8"),
            (struct.pack("<4sB3sIQ", b"PSS1", 1, b"", HEADER_BYTES_MAX + 1, 0), LimitExceeded, "header of 1048577"),
            (struct.pack("<4sB3sIQ", b"PSS1", 1, b"", 2**32 - 1, 0), LimitExceeded, "header of 4294967295"),
            (raw(4, payload_bytes=1), MalformedFrame, "ACK has no payload, found 1 bytes"),
            (raw(7, payload_bytes=2**64 - 1), MalformedFrame, "REFUSAL has no payload"),
            (b"", Unreachable, "closed"),
            (raw(1)[:-1], Unreachable, "closed"),
            (raw(1, b"abc")[:-1], Unreachable, "closed"),
        ],
    )
    def test_is_refused(self, content, kind, text):
        error = received(content)
        assert type(error) is kind
        assert text in error.message

    @given(st.binary(max_size=60))
    @example(b"GET / HTTP/1.1\r\nHost: shard\r\n\r\n")
    def test_never_does_harm(self, content):
        assert received(b"\0" + content).code in ("malformed-frame", "unreachable")

    def test_a_header_that_does_not_parse(self):
        assert "not a PushHeader" in received(raw(3, b"\xff\xff\xff")).message


class TestWaiting:
    """Every wait ends: with the peer, with the deadline, or with the stream."""

    def test_a_silent_peer_is_unreachable(self):
        with stream_pair() as (mine, _), pytest.raises(Unreachable, match="receive before the deadline"):
            mine.receive(deadline_s=time.monotonic() + 0.01)

    def test_a_peer_that_stops_in_a_payload_is_unreachable(self):
        with stream_pair() as (mine, theirs):
            theirs.send(Kind.WEIGHTS, HELLO, [memoryview(b"abc")], deadline_s=soon())
            mine.receive(deadline_s=soon())
            with pytest.raises(Unreachable, match="before the deadline"):
                mine.receive_into([memoryview(bytearray(4))], deadline_s=time.monotonic() + 0.01)

    def test_a_peer_that_never_reads_is_unreachable(self):
        with stream_pair() as (mine, _), pytest.raises(Unreachable, match="send before the deadline"):
            mine.send(Kind.PUSH, HELLO, [memoryview(bytes(16 << 20))], deadline_s=time.monotonic() + 0.01)

    def test_a_peer_that_is_gone_is_unreachable(self):
        with stream_pair() as (mine, theirs):
            theirs.close()
            with pytest.raises(Unreachable, match=r"broke: .*Broken pipe"):
                mine.send(Kind.PULL, HELLO, deadline_s=soon())
            with pytest.raises(Unreachable, match="closed"):
                mine.receive(deadline_s=soon())

    @pytest.mark.parametrize(
        "call",
        [
            lambda stream: stream.receive(deadline_s=soon()),
            lambda stream: stream.receive_into([memoryview(bytearray(1))], deadline_s=soon()),
            lambda stream: stream.send(Kind.PUSH, HELLO, [memoryview(bytes(16 << 20))], deadline_s=soon()),
            lambda stream: (stream.wait(), stream.receive(deadline_s=soon())),
        ],
        ids=["receive", "receive_into", "send", "wait"],
    )
    @pytest.mark.parametrize("before", [True, False])
    def test_closing_ends_whatever_waits(self, call, before):
        with stream_pair() as (mine, _), ThreadPoolExecutor(1) as pool:
            if before:
                mine.close()
            waiting = pool.submit(call, mine)
            mine.close()
            with pytest.raises(Unreachable):
                waiting.result(DEADLINE_S)

    def test_waiting_ends_when_the_peer_speaks_and_takes_nothing(self):
        with stream_pair() as (mine, theirs):
            theirs.send(Kind.PULL, HELLO, deadline_s=soon())
            mine.wait()
            assert mine.receive(deadline_s=soon()).kind is Kind.PULL


class TestRefusals:
    """An error crosses the wire as itself."""

    @pytest.mark.parametrize("kind", ParashardError.leaves(), ids=lambda kind: kind.code)
    def test_of_every_class(self, kind):
        error = refused(refusal(kind("what was wrong")), "shard:1")
        assert (type(error), error.message, error.peer) == (kind, "what was wrong", "shard:1")

    def test_of_a_class_that_this_version_does_not_know(self):
        header = stream_pb2.Refusal(code="from-the-future", message="well")
        error = refused(header, "shard:1")
        assert type(error) is PeerFailed
        assert error.message == "refused with the unknown code 'from-the-future': well"

    @pytest.mark.parametrize("message", ["x" * 10_000, "é" * 10_000, "\ud800" * 10_000])
    def test_are_bounded(self, message):
        assert len(refusal(QueueFull(message)).message.encode()) <= REFUSAL_BYTES_MAX


class TestAnswers:
    """A request is answered with what it waits for, or with an error in its place."""

    def test_a_refusal_leaves_the_stream_usable(self):
        with stream_pair() as (mine, theirs):
            theirs.send(Kind.REFUSAL, refusal(NonFiniteGradient("step 3")), deadline_s=soon())
            theirs.send(Kind.ACK, HELLO, deadline_s=soon())
            with pytest.raises(Refused) as caught:
                receive_answer(mine, Kind.ACK, deadline_s=soon())
            assert receive_answer(mine, Kind.ACK, deadline_s=soon()).kind is Kind.ACK
        assert isinstance(caught.value.error, NonFiniteGradient)
        assert caught.value.error.peer == "their-end"

    def test_an_answer_to_another_question_is_malformed(self):
        with stream_pair() as (mine, theirs):
            theirs.send(Kind.ACK, HELLO, deadline_s=soon())
            with pytest.raises(MalformedFrame, match="answered with ACK, expected WEIGHTS"):
                receive_answer(mine, Kind.WEIGHTS, deadline_s=soon())

    def test_a_greeting_names_the_target_incarnation_and_the_worker(self):  # P2, P3
        with stream_pair() as (mine, theirs):
            theirs.send(Kind.WELCOME, stream_pb2.Welcome(push_bytes_max=12), deadline_s=soon())
            welcome, descriptors = greet(mine, GREETING, deadline_s=soon())
            hello = theirs.receive(deadline_s=soon()).header
        assert (welcome.push_bytes_max, descriptors) == (12, ())
        assert (hello.target.run_id, hello.target.incarnation, hello.worker) == ("run", 7, "worker-0")

    @pytest.mark.parametrize(
        ("kind", "header", "error", "found"),
        [
            (Kind.REFUSAL, refusal(QueueFull("full")), QueueFull, "full"),
            (Kind.ACK, HELLO, Unreachable, "no shard: answered with ACK, expected WELCOME"),
        ],
    )
    def test_a_greeting_that_fails_closes_the_stream(self, kind, header, error, found):
        with stream_pair() as (mine, theirs):
            theirs.send(kind, header, deadline_s=soon())
            with pytest.raises(error, match=found):
                greet(mine, GREETING, deadline_s=soon())
            theirs.receive(deadline_s=soon())
            with pytest.raises(Unreachable, match="closed"):
                theirs.receive(deadline_s=soon())

    def test_a_web_server_that_has_the_port_now_is_no_shard(self):
        ours, other = socket.socketpair()
        with other, ours:
            other.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            with pytest.raises(Unreachable, match=r"no shard: a message begins with b'PSS1', found b'HTTP/1\.1'"):
                greet(Stream(ours, "shard:1"), GREETING, deadline_s=soon())
