"""Sockets inside TLS: every byte once and in order, many in each system call, within a deadline."""

import os
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parashard.security.identity import Role
from parashard.transports.socket_io import RECORD_BYTES_MAX, SEALED_BYTES, TlsIo
from support.waiting import DEADLINE_S


class Counting:
    """A socket that counts the calls that move bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.calls = connection, 0

    def sendmsg(self, *given):
        self.calls += 1
        return self.connection.sendmsg(*given)

    def recv_into(self, *given):
        self.calls += 1
        return self.connection.recv_into(*given)

    def __getattr__(self, name):
        return getattr(self.connection, name)


class Pair:
    """A client and a server that have agreed on keys; `mine` and `theirs` count their calls."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        self.mine, self.theirs = (Counting(end) for end in socket.socketpair())
        self.client, self.server = TlsIo(self.mine, client, "127.0.0.1"), TlsIo(self.theirs, server, None)
        with ThreadPoolExecutor(1) as pool:
            answering = pool.submit(self.server.handshake, soon())
            self.client.handshake(soon())
            answering.result(DEADLINE_S)

    def exchanged(self, sent: Sequence[memoryview], received: Sequence[memoryview]) -> None:
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self.client.send, sent, soon())
            self.server.receive(received, soon())
            sending.result(DEADLINE_S)


@pytest.fixture(scope="module")
def contexts(certificates):
    return certificates.of(Role.SHARD).server_context(), certificates.of(Role.WORKER).client_context()


@pytest.fixture
def pair(contexts) -> Iterator[Pair]:
    pair = Pair(*contexts)
    yield pair
    pair.mine.close()
    pair.theirs.close()


def soon() -> float:
    return time.monotonic() + DEADLINE_S


def cut(content: bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """Return views of sizes in turn, and one of the rest."""
    views, position = [], 0
    for size in sizes:
        views.append(memoryview(content)[position : position + size])
        position += size
    return [view for view in [*views, memoryview(content)[position:]] if view.nbytes]


SIZES = st.lists(st.sampled_from([1, 50, RECORD_BYTES_MAX, SEALED_BYTES - 1, SEALED_BYTES + 1]), max_size=6)


@given(SIZES, SIZES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
def test_bytes_cut_one_way_arrive_cut_another(pair, sent_sizes, received_sizes):
    content = bytearray(os.urandom(max(sum(sent_sizes), sum(received_sizes))))
    received = bytearray(len(content))
    pair.exchanged(cut(content, sent_sizes), cut(received, received_sizes))
    assert received == content
    assert not pair.server.read_ahead


def test_a_call_of_the_system_moves_many_records(pair):
    content, received = bytearray(os.urandom(4 << 20)), bytearray(4 << 20)
    pair.mine.calls = 0
    pair.exchanged([memoryview(content)], [memoryview(received)])
    assert pair.mine.calls <= 2 + len(content) // SEALED_BYTES
    assert received == content


def test_what_comes_with_a_message_is_kept_for_the_next(pair):
    pair.client.send([memoryview(b"abc"), memoryview(b"def")], soon())
    pair.theirs.calls = 0
    first, second = bytearray(3), bytearray(3)
    pair.server.receive([memoryview(first)], soon())
    assert pair.server.read_ahead
    pair.server.receive([memoryview(second)], soon())
    assert (first, second, pair.theirs.calls) == (b"abc", b"def", 1)
    assert not pair.server.read_ahead


def test_a_connection_that_gets_short_messages_holds_little_memory(pair):
    pair.exchanged([memoryview(bytes(24))], [memoryview(bytearray(24))])
    assert pair.server._scratch.nbytes <= 2 * RECORD_BYTES_MAX


@pytest.mark.parametrize("left_s", [0.0, 0.01])
class TestDeadline:
    """A call ends at its deadline."""

    def test_of_a_peer_that_says_nothing(self, pair, left_s):
        with pytest.raises(TimeoutError):
            pair.client.receive([memoryview(bytearray(1))], time.monotonic() + left_s)

    def test_of_a_peer_that_stops_in_the_middle(self, pair, left_s):
        pair.server.send([memoryview(b"abc")], soon())
        with pytest.raises(TimeoutError):
            pair.client.receive([memoryview(bytearray(4))], time.monotonic() + left_s)

    def test_of_a_peer_that_never_reads(self, pair, left_s):
        with pytest.raises(TimeoutError):
            pair.client.send([memoryview(bytes(16 << 20))], time.monotonic() + left_s)

    def test_of_a_peer_that_does_not_agree_on_keys(self, contexts, left_s):
        mine, theirs = socket.socketpair()
        with mine, theirs, pytest.raises(TimeoutError):
            TlsIo(mine, contexts[1], "127.0.0.1").handshake(time.monotonic() + left_s)


def test_an_end_in_the_middle_is_an_end(pair):
    pair.server.send([memoryview(b"abc")], soon())
    pair.theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        pair.client.receive([memoryview(bytearray(4))], soon())


def test_a_byte_that_was_changed_on_the_way_is_an_error(pair):
    raw = bytearray(1 << 10)
    pair.server.send([memoryview(b"abc")], soon())
    length = pair.mine.connection.recv_into(raw)
    raw[length - 1] ^= 1
    pair.theirs.connection.sendall(raw[:length])
    with pytest.raises(ssl.SSLError):
        pair.client.receive([memoryview(bytearray(3))], soon())


def test_a_handshake_that_fails_tells_the_peer_why(contexts):
    stranger = ssl.create_default_context()  # trusts others
    mine, theirs = socket.socketpair()
    with mine, theirs, ThreadPoolExecutor(1) as pool:
        answering = pool.submit(TlsIo(theirs, contexts[0], None).handshake, soon())
        with pytest.raises(ssl.SSLCertVerificationError):
            TlsIo(mine, stranger, "127.0.0.1").handshake(soon())
        with pytest.raises(ssl.SSLError, match=r"(?i)unknown[ _]ca"):
            answering.result(DEADLINE_S)
