"""gRPC's calls: a cap on those under way, and calls of slow peers end."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator

import pytest

from parashard.errors import MalformedFrame, NotAllowed, QueueFull, Unreachable
from parashard.protocol import rpc
from parashard.protocol.rpc import our_errors
from parashard.security import grpc_admission
from parashard.security.grpc_admission import METADATA_BYTES_MAX
from parashard.security.identity import PULL, PUSH, Role
from support.certificates import Certificates
from support.http2_frames import (
    CONTINUATION,
    DEADLINE_S,
    END_HEADERS,
    HEADERS,
    begun,
    frame,
    received,
    request_headers,
    text_literal,
)
from support.unary_handlers import raw_handlers
from support.waiting import eventually

ANSWER = bytes(4 << 20)


class Served:
    """A server whose pushes wait until they may end, and whose pulls have a large answer."""

    def __init__(self, credentials=None) -> None:
        self.server = rpc.Server("127.0.0.1:0", credentials)
        self.may_end = threading.Event()
        self.began = threading.Semaphore(0)
        handlers = {"Push": self.push, "Pull": lambda frame, context: ANSWER}
        self.server.grpc.add_generic_rpc_handlers((raw_handlers("parashard.v1.ShardData", handlers),))
        self.server.start()
        self.open: list[socket.socket] = []

    def push(self, frame: bytes, context: object) -> bytes:
        self.began.release()
        assert self.may_end.wait(DEADLINE_S)
        return frame

    def connected(self, host: str) -> socket.socket:
        """Return a connection from a host that has begun with HTTP/2."""
        name, _, port = self.server.address.rpartition(":")
        self.open.append(socket.create_connection((name, int(port)), DEADLINE_S, source_address=(host, 0)))
        return begun(self.open[-1])

    def begin(self, connection: socket.socket, count: int, method: str = PUSH) -> None:
        """Begin calls and send no message."""
        for number in range(count):
            connection.sendall(frame(HEADERS, END_HEADERS, 2 * number + 1, request_headers(method)))

    def close(self) -> None:
        self.may_end.set()
        for connection in self.open:
            connection.close()
        self.server.stop(0.0)


class Streams(Served):
    """The same, whose pushes and pulls are streams."""

    ANSWERS = 20

    def __init__(self) -> None:
        self.server = rpc.Server("127.0.0.1:0")
        self.server.grpc.add_generic_rpc_handlers((rpc.data_handlers("parashard.v1.ShardData", self.take, self.give),))
        self.server.start()
        self.may_end = threading.Event()
        self.open = []
        self.ended: list[bytes] = []
        self.given = 0

    def take(self, messages: Iterator[bytes], context: object) -> bytes:
        content = b""
        try:
            for message in messages:
                content += message
            return content
        finally:  # gRPC tells of a call that was ended by an error, or as the end of the stream
            self.ended.append(content)

    def give(self, frame: bytes, context: object) -> Iterator[bytes]:
        for _ in range(self.ANSWERS):
            yield ANSWER
            self.given += 1

    def is_left_alone(self, what: str) -> None:
        admission = self.server.admission
        eventually(lambda: admission.slow == 1, f"{what} was slow")
        eventually(lambda: admission.under_way == 0, f"{what} is not served any more")
        assert not admission._until_s


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


class TestCap:
    """So many calls are under way at once, whichever peers' they are."""

    @pytest.fixture
    def two(self, monkeypatch) -> Iterator[Served]:
        """Serve two calls at once."""
        monkeypatch.setattr(rpc, "CALLS_MAX", 2)
        served = Served()
        yield served
        served.close()

    def test_one_call_more_is_refused_at_once_counted_and_comes_again(self, two):
        channel = rpc.connect(two.server.address)
        calls = [channel.unary_unary(PUSH).future(b"gradient", timeout=DEADLINE_S) for _ in range(2)]
        for _ in calls:
            assert two.began.acquire(timeout=DEADLINE_S)
        with pytest.raises(QueueFull, match="2 calls are under way here; at most 2 may be"), our_errors("it"):
            channel.unary_unary(PUSH)(b"gradient", timeout=DEADLINE_S)
        assert two.server.admission.refused == 1
        two.may_end.set()
        assert [call.result() for call in calls] == [b"gradient"] * 2
        eventually(lambda: two.server.admission.under_way == 0, "no call is under way")
        assert channel.unary_unary(PUSH)(b"gradient", timeout=DEADLINE_S) == b"gradient"
        channel.close()

    def test_an_unread_answer_counts(self, two):
        hog = two.connected("127.0.0.2")
        for number in (1, 3):
            hog.sendall(frame(HEADERS, END_HEADERS, number, request_headers(PULL)) + frame(0x0, 0x1, number, bytes(5)))
        eventually(lambda: two.server.admission.under_way == 2, "both are under way")
        channel = rpc.connect(two.server.address)
        with pytest.raises(QueueFull), our_errors("it"):
            channel.unary_unary(PULL)(b"", timeout=DEADLINE_S)
        channel.close()

    def test_every_thread_serves_one_peer_that_asks_for_so_much(self, served):
        channel = rpc.connect(served.server.address)
        calls = [channel.unary_unary(PUSH).future(b"gradient", timeout=DEADLINE_S) for _ in range(rpc.SERVER_THREADS)]
        for _ in calls:
            assert served.began.acquire(timeout=DEADLINE_S)
        served.may_end.set()
        assert [call.result() for call in calls] == [b"gradient"] * rpc.SERVER_THREADS
        assert served.server.admission.refused == 0
        channel.close()

    def test_one_call_more_than_may_wait_for_a_thread_is_refused_by_grpc_itself(self, monkeypatch):
        monkeypatch.setattr(rpc, "SERVER_THREADS", 1)
        monkeypatch.setattr(rpc, "WAITING_CALLS_MAX", 2)
        served = Served()
        channel = rpc.connect(served.server.address)
        calls = [channel.unary_unary(PUSH).future(b"gradient", timeout=DEADLINE_S) for _ in range(3)]
        refused = eventually(lambda: next((call for call in calls if call.done()), None), "one is refused")
        with pytest.raises(QueueFull), our_errors("it"):
            refused.result()
        served.may_end.set()
        assert [call.result() for call in calls if call is not refused] == [b"gradient"] * 2
        channel.close()
        served.close()

    def test_with_tls_a_role_is_checked_before_the_message(self, certificates: Certificates):
        served = Served(certificates.of(Role.SHARD))
        channel = rpc.connect(served.server.address, certificates.of(Role.OPERATOR))
        with pytest.raises(NotAllowed), our_errors("it"):
            channel.unary_unary(PUSH)(b"gradient", timeout=DEADLINE_S)
        assert served.server.admission.under_way == 0
        channel.close()
        served.close()


def waits_for(monkeypatch, peer_s: float) -> None:
    """Set how long a call waits for its peer."""
    monkeypatch.setattr(grpc_admission, "MESSAGE_DEADLINE_S", peer_s)
    monkeypatch.setattr(grpc_admission, "ANSWER_DEADLINE_S", peer_s)


class TestSlow:
    """A call waits for its peer until a deadline."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch) -> None:
        monkeypatch.setattr(grpc_admission, "LOOK_S", 0.01)
        waits_for(monkeypatch, 0.05)

    def test_for_a_message_that_does_not_come(self):
        served = Served()
        served.begin(served.connected("127.0.0.2"), 10)
        eventually(lambda: served.server.admission.slow == 10, "ten were slow")
        eventually(lambda: served.server.admission.under_way == 0, "no call is under way")
        served.close()

    def test_for_an_unread_answer(self):
        served = Served()
        connection = served.connected("127.0.0.2")
        message = frame(0x0, 0x1, 1, bytes(5))
        connection.sendall(frame(HEADERS, END_HEADERS, 1, request_headers(PULL)) + message)
        eventually(lambda: served.server.admission.slow == 1, "one was slow")
        eventually(lambda: served.server.admission.under_way == 0, "no call is under way")
        served.close()

    def test_for_the_next_message_of_a_stream(self, monkeypatch):
        served = Streams()
        channel = rpc.connect(served.server.address)
        silent = threading.Event()

        def messages() -> Iterator[bytes]:
            yield b"gra"
            silent.wait(DEADLINE_S)
            yield b"dient"

        with pytest.raises(Unreachable), our_errors("it"):
            channel.stream_unary(PUSH)(messages(), timeout=DEADLINE_S)
        silent.set()
        served.is_left_alone("it")
        eventually(lambda: served.ended == [b"gra"], "the handler has heard of it")
        waits_for(monkeypatch, DEADLINE_S)  # a peer that does its part, on busy cores
        assert channel.stream_unary(PUSH)(iter([b"gra", b"dient"]), timeout=DEADLINE_S) == b"gradient"
        channel.close()
        served.close()

    def test_for_an_unread_stream_of_answers(self):
        served = Streams()
        connection = served.connected("127.0.0.2")
        message = frame(0x0, 0x1, 1, bytes(5))
        connection.sendall(frame(HEADERS, END_HEADERS, 1, request_headers(PULL)) + message)
        served.is_left_alone("it")
        assert served.given < Streams.ANSWERS
        served.close()

    def test_and_a_stream_that_is_read_comes_whole(self, monkeypatch):
        waits_for(monkeypatch, DEADLINE_S)
        served = Streams()
        channel = rpc.connect(served.server.address)
        assert [len(answer) for answer in channel.unary_stream(PULL)(b"", timeout=DEADLINE_S)] == [
            len(ANSWER)
        ] * Streams.ANSWERS
        assert served.server.admission.slow == 0
        channel.close()
        served.close()

    def test_but_not_for_what_the_server_itself_takes(self):
        served = Served()
        channel = rpc.connect(served.server.address)
        call = channel.unary_unary(PUSH).future(b"gradient", timeout=DEADLINE_S)
        assert served.began.acquire(timeout=DEADLINE_S)
        assert not served.server.admission._until_s
        served.may_end.set()
        assert call.result() == b"gradient"
        assert served.server.admission.slow == 0
        channel.close()
        served.close()


def test_metadata_is_counted_over_all_its_frames(served):
    connection = served.connected("127.0.0.2")
    connection.sendall(frame(HEADERS, 0, 1, request_headers(PUSH)))
    for number in range(4):  # of which gRPC's own bound lets each pass
        pair = b"\x00" + text_literal(f"x-{number}") + text_literal("x" * (METADATA_BYTES_MAX // 4))
        connection.sendall(frame(CONTINUATION, END_HEADERS if number == 3 else 0, 1, pair))
    assert b"allowed are 16384" in received(connection, b"allowed are 16384")
    assert served.server.admission.under_way == 0


def test_what_is_answered_with_a_stream_is_not_served(served):
    channel = rpc.connect(served.server.address)
    with pytest.raises(NotAllowed, match="answered with a stream"), our_errors("it"):
        channel.unary_unary("/grpc.health.v1.Health/Watch")(b"", timeout=DEADLINE_S)
    channel.close()


def test_a_message_that_is_none_is_its_caller_s_fault_and_fills_no_log(served, caplog, capfd):
    channel = rpc.connect(served.server.address)
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    with caplog.at_level(logging.DEBUG):
        for garbage in (b"\xff" * 100, b"\x0a\x02\xc3\x28", b"\x0a\x05abc"):  # no field, no UTF-8, too short
            with pytest.raises(MalformedFrame, match=f"^{len(garbage)} bytes are not the message"), our_errors("it"):
                check(garbage, timeout=DEADLINE_S)
    assert check(b"", timeout=DEADLINE_S) == b"\x08\x01", "it serves"
    eventually(lambda: served.server.admission.under_way == 0, "no call is under way")
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())
    channel.close()
