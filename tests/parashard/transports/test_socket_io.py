"""Sockets with TLS and without: every byte once and in order, within a deadline, whatever the pieces and the socket."""

import math
import os
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.protocol.rpc import DATA_DEADLINE_S
from parashard.transports.socket_io import IOVECS_MAX, LOCAL_BUFFER_BYTES, PlainIo, is_own_user, rest_of, tune
from support.waiting import DEADLINE_S


def soon() -> float:
    return time.monotonic() + DEADLINE_S


def views(sizes: list[int]) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield mine, theirs


@given(st.lists(st.binary(max_size=6), max_size=6), st.data())
def test_the_rest_is_what_was_not_done(pieces, data):
    whole = b"".join(pieces)
    done_bytes = data.draw(st.integers(0, len(whole)))
    assert b"".join(rest_of([memoryview(piece) for piece in pieces], done_bytes)) == whole[done_bytes:]


@given(st.lists(st.integers(1, 50), max_size=20), st.lists(st.integers(1, 50), max_size=20))
def test_bytes_cut_one_way_arrive_cut_another(sent_sizes, received_sizes):
    length = min(sum(sent_sizes), sum(received_sizes))
    content = os.urandom(length)
    sent, received = rest_of(views(sent_sizes), sum(sent_sizes) - length), views(received_sizes)
    position = 0
    for piece in sent:
        piece[:] = content[position : position + piece.nbytes]
        position += piece.nbytes
    received = rest_of(received, sum(received_sizes) - length)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        PlainIo(mine).send(sent, soon(), ())
        PlainIo(theirs).receive(received, soon())
    assert b"".join(received) == content


def test_more_pieces_than_the_kernel_takes_at_once(pair):
    content = os.urandom(2 * IOVECS_MAX + 5)
    sent = [memoryview(content)[i : i + 1] for i in range(len(content))]
    received = views([1] * len(content))
    PlainIo(pair[0]).send(sent, soon(), ())
    PlainIo(pair[1]).receive(received, soon())
    assert b"".join(received) == content


def test_more_bytes_than_the_kernel_holds_go_while_they_are_read(pair):
    content = os.urandom(4 << 20)
    [received] = views([len(content)])
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(PlainIo(pair[0]).send, [memoryview(content)], soon(), ())
        PlainIo(pair[1]).receive([received], soon())
        sending.result(DEADLINE_S)
    assert received == content


@pytest.mark.parametrize("left_s", [0.0, 0.01])
class TestDeadline:
    """A call ends at its deadline, and has then done what it could."""

    def test_of_a_peer_that_says_nothing(self, pair, left_s):
        with pytest.raises(TimeoutError):
            PlainIo(pair[0]).receive(views([1]), time.monotonic() + left_s)

    def test_of_a_peer_that_stops_in_the_middle(self, pair, left_s):
        pair[1].send(b"abc")
        with pytest.raises(TimeoutError):
            PlainIo(pair[0]).receive(views([2, 2]), time.monotonic() + left_s)

    def test_of_a_peer_that_stops_before_its_descriptors(self, pair, left_s):
        with pytest.raises(TimeoutError):
            PlainIo(pair[0]).receive_with_descriptors(views([4])[0], time.monotonic() + left_s, 1)

    def test_of_a_peer_that_never_reads(self, pair, left_s):
        with pytest.raises(TimeoutError):
            PlainIo(pair[0]).send(views([16 << 20]), time.monotonic() + left_s, ())


class TestLimit:
    """The kernel's time limit is set by few calls, and never stands for another deadline."""

    def test_a_later_call_with_a_deadline_as_far_away_sets_none(self, pair):
        class Counting:
            def __init__(self, connection):
                self.connection, self.limits = connection, 0

            def setsockopt(self, *given):
                self.limits += 1
                return self.connection.setsockopt(*given)

            def __getattr__(self, name):
                return getattr(self.connection, name)

        pair[1].send(b"abcd")
        counting = Counting(pair[0])
        io = PlainIo(counting)
        for deadline_s in (60, 60, 50, 80):
            io.receive(views([1]), time.monotonic() + deadline_s)
        assert counting.limits == 1

    def test_a_nearer_deadline_ends_its_call(self, pair):
        pair[1].send(b"a")
        io = PlainIo(pair[0])
        io.receive(views([1]), soon())
        with pytest.raises(TimeoutError):
            io.receive(views([1]), time.monotonic() + 0.01)

    def test_a_limit_before_the_deadline_ends_no_call(self, pair, monkeypatch):
        monkeypatch.setattr("parashard.transports.socket_io.SHORT_LIMIT_S", 0.0)
        monkeypatch.setattr("parashard.transports.socket_io.LIMIT_FACTOR", 0.001)
        received = bytearray(1)
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(PlainIo(pair[0]).receive, [memoryview(received)], time.monotonic() + DEADLINE_S)
            with pytest.raises(FutureTimeout):
                receiving.result(0.05)  # many limits later
            pair[1].send(b"a")
            receiving.result(DEADLINE_S)
        assert received == b"a"

    def test_for_ever_is_a_limit_too(self, pair):
        pair[1].send(b"ab")
        io = PlainIo(pair[0])
        io.receive(views([1]), math.inf)
        io.receive(views([1]), math.inf)
        with pytest.raises(TimeoutError):
            io.receive(views([1]), time.monotonic() + 0.01)


def test_a_peer_that_goes_on_and_on_cannot_move_a_deadline(pair):
    pair[1].send(b"abc")
    with pytest.raises(TimeoutError):
        PlainIo(pair[0]).receive(views([1]), time.monotonic())
    with pytest.raises(TimeoutError):
        PlainIo(pair[0]).send(views([1]), time.monotonic(), ())


def test_an_end_in_the_middle_is_an_end(pair):
    pair[1].send(b"abc")
    pair[1].shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        PlainIo(pair[0]).receive(views([4]), soon())
    with pytest.raises(EOFError):
        PlainIo(pair[0]).receive_with_descriptors(views([4])[0], soon(), 1)


def test_an_infinite_deadline_waits_for_what_comes(pair):
    PlainIo(pair[1]).send([memoryview(b"abc")], float("inf"), ())
    [received] = views([3])
    PlainIo(pair[0]).receive([received], float("inf"))
    assert received == b"abc"


def connected(host: str) -> tuple[socket.socket, socket.socket]:
    with socket.create_server((host, 0)) as listening:
        client = socket.create_connection(listening.getsockname(), DEADLINE_S)
        return client, listening.accept()[0]


def test_connections_within_a_host_have_small_buffers_and_no_delay():
    client, served = connected("127.0.0.1")
    with client, served:
        for connection in (client, served):
            tune(connection)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # the kernel answers with twice the size set
                assert connection.getsockopt(socket.SOL_SOCKET, buffer) == 2 * LOCAL_BUFFER_BYTES


def test_a_host_that_vanishes_is_found_long_before_the_deadline_of_a_request():
    client, served = connected("127.0.0.1")
    with client, served:
        tune(client)
        idle_s, interval_s, probes, unacknowledged_ms = (
            client.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        )
    assert idle_s + probes * interval_s <= DATA_DEADLINE_S / 2
    assert unacknowledged_ms / 1000 <= DATA_DEADLINE_S / 2


def test_connections_between_hosts_keep_the_kernel_s_buffers():
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
        client.bind(("127.0.0.2", 0))  # as near as one host gets to two
        client.connect(listening.getsockname())
        before = client.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        tune(client)
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == before
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        listening.accept()[0].close()


def test_a_unix_socket_needs_no_tuning(pair):
    tune(pair[0])


@pytest.mark.parametrize(("user", "own"), [("mine", True), ("root", True), ("other", False)])
def test_only_processes_of_this_user_and_of_root_are_talked_to(user: str, own: bool) -> None:
    uid = {"mine": os.getuid(), "root": 0, "other": os.getuid() + 1}[user]

    class Connection:
        def getsockopt(self, level: int, option: int, length: int) -> bytes:
            assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
            return struct.pack("3i", 1234, uid, 99)

    assert is_own_user(Connection()) is own  # type: ignore[arg-type]
