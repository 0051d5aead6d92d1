"""Sockets inside TLS: every byte once and in order, within a deadline."""

import errno
import itertools
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parashard.security.identity import Role
from parashard.transports import socket_io
from parashard.transports.socket_io import RECORD_BYTES, TlsIo, _in_records
from support.waiting import DEADLINE_S


class Pair:
    """A client and a server that have agreed on keys."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        mine, theirs = socket.socketpair()
        self.client, self.server = TlsIo(mine, client, "127.0.0.1"), TlsIo(theirs, server, None)
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
def short_limits(monkeypatch) -> None:
    monkeypatch.setattr(socket_io, "LIMIT_FACTOR", 1e-3)


@pytest.fixture
def pair(contexts) -> Iterator[Pair]:
    pair = Pair(*contexts)
    yield pair
    pair.client.connection.close()
    pair.server.connection.close()


def soon() -> float:
    return time.monotonic() + DEADLINE_S


def cut(content: bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """Return views of sizes in turn, and one of the rest."""
    views, position = [], 0
    for size in sizes:
        views.append(memoryview(content)[position : position + size])
        position += size
    return [view for view in [*views, memoryview(content)[position:]] if view.nbytes]


SIZES = st.lists(
    st.sampled_from([1, 50, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 1, 9 * RECORD_BYTES]), max_size=6
)


@given(SIZES, SIZES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
def test_bytes_cut_one_way_arrive_cut_another(pair, sent_sizes, received_sizes):
    content = bytearray(os.urandom(max(sum(sent_sizes), sum(received_sizes))))
    received = bytearray(len(content))
    pair.exchanged(cut(content, sent_sizes), cut(received, received_sizes))
    assert received == content
    assert not pair.server.read_ahead


def test_short_pieces_share_a_record(pair):
    pair.client.send([memoryview(b"abc"), memoryview(b"def")], soon())
    first, second = bytearray(3), bytearray(3)
    pair.server.receive([memoryview(first)], soon())
    assert pair.server.read_ahead  # the second has left the socket
    pair.server.receive([memoryview(second)], soon())
    assert (first, second) == (b"abc", b"def")
    assert not pair.server.read_ahead


@given(SIZES)
@settings(deadline=None, max_examples=50)
def test_pieces_are_joined_up_to_a_record_and_long_ones_are_not_copied(sizes):
    pieces = cut(bytearray(os.urandom(sum(sizes))), sizes)
    sent = list(_in_records(pieces))
    assert b"".join(sent) == b"".join(pieces)
    assert all(len(piece) <= RECORD_BYTES for piece in sent if isinstance(piece, bytes))
    assert all(len(a) + len(b) > RECORD_BYTES for a, b in pairwise(sent))
    long = [piece for piece in pieces if piece.nbytes >= RECORD_BYTES]
    assert all(any(piece is each for each in sent) for piece in long)


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_call_goes_on_after_a_limit_that_was_earlier_than_the_deadline(short_limits, pair, monkeypatch, call):
    content, received = bytearray(os.urandom(4 << 20)), bytearray(4 << 20)
    sending = partial(pair.client.send, [memoryview(content)])
    receiving = partial(pair.server.receive, [memoryview(received)])
    io, first, second = (pair.client, sending, receiving) if call == "write" else (pair.server, receiving, sending)
    known, again, calls = getattr(io.connection, call), threading.Event(), itertools.count(1)

    def counted(*given):
        if next(calls) == 2:
            again.set()
        return known(*given)

    monkeypatch.setattr(io.connection, call, counted)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first, soon())
        assert again.wait(DEADLINE_S)
        second(soon())
        waiting.result(DEADLINE_S)
    assert received == content


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_time_limit_of_the_kernel_ends_a_call(pair, monkeypatch, call):
    broken = Mock(side_effect=TimeoutError(errno.ETIMEDOUT, "timed out"))
    monkeypatch.setattr(pair.client.connection, call, broken)
    act = pair.client.send if call == "write" else pair.client.receive
    with pytest.raises(TimeoutError):
        act([memoryview(bytearray(1))], soon())
    broken.assert_called_once()


def test_a_connection_that_was_closed_says_so(pair):
    pair.client.connection.close()
    with pytest.raises(EOFError):
        pair.client.receive([memoryview(bytearray(1))], soon())


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
    socket.socket.shutdown(pair.server.connection, socket.SHUT_WR)
    with pytest.raises(EOFError):
        pair.client.receive([memoryview(bytearray(4))], soon())


def test_a_byte_that_was_changed_on_the_way_is_an_error(pair):
    raw = bytearray(1 << 10)
    pair.server.send([memoryview(b"abc")], soon())
    length = socket.socket.recv_into(pair.client.connection, raw)
    raw[length - 1] ^= 1
    socket.socket.sendall(pair.server.connection, raw[:length])
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


def test_a_peer_that_is_gone_is_an_error_whatever_a_script_has_made_of_sigpipe(pair):
    signals = []
    before = signal.signal(signal.SIGPIPE, lambda *given: signals.append(given))
    try:
        pair.server.connection.close()
        with pytest.raises(OSError):
            pair.client.send([memoryview(bytes(4 * RECORD_BYTES))], soon())
        assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert not signals


def test_who_the_peer_is_stays_known_after_the_socket_is_closed(pair):
    known = pair.server.peer_certificate()
    pair.server.connection.close()
    assert known["subjectAltName"]
    assert pair.server.peer_certificate() == known
