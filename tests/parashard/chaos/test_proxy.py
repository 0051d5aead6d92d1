"""The proxy's links: bytes pass whole, and each fault does what it says to real connections, and ends.

What must not arrive is waited for by what must: a held byte is shown to be held by one that overtakes it elsewhere, a
delay by the clock around a round trip. Nothing here sleeps.
"""

import asyncio
import contextlib
import hashlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from parashard.chaos.proxy import CHUNK_BYTES_MAX, CHUNKS_UNDER_WAY_MAX, NO_LINK_FAULTS, LinkFaults, ProxiedLink, Proxy
from parashard.errors import Unreachable
from parashard.protocol import rpc
from support.unary_handlers import raw_handlers
from support.waiting import DEADLINE_S, eventually

HELD_S = 0.05  # how long a byte that must not come is listened for; one that may come does within a millisecond

Connect = Callable[..., socket.socket]


class EchoServer:
    """Sends back what it gets; tells of each connection's bytes as they come, and when it ends."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.heard: queue.Queue[tuple[int, bytes]] = queue.Queue()
        self.address: tuple[str, int] = self.listener.getsockname()
        self._accepted: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self.listener.accept()
            except OSError:
                return
            self._accepted.append(accepted)
            threading.Thread(target=self._echo, args=(len(self._accepted), accepted), daemon=True).start()

    def _echo(self, number: int, accepted: socket.socket) -> None:
        content = b"-"
        while content:
            try:
                content = accepted.recv(CHUNK_BYTES_MAX)
                accepted.sendall(content)
            except OSError:
                content = b""
            self.heard.put((number, content))
        accepted.close()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._thread.join()
        for accepted in self._accepted:
            accepted.close()


@pytest.fixture
def server() -> Iterator[EchoServer]:
    """Return a server that answers with what it hears."""
    server = EchoServer()
    yield server
    server.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """Return a running proxy."""
    with Proxy() as proxy:
        yield proxy


@pytest.fixture
def link(proxy: Proxy, server: EchoServer) -> ProxiedLink:
    """Return a link to the echo server."""
    return proxy.link("shard-0", lambda: server.address)


@pytest.fixture
def connect(link: ProxiedLink) -> Iterator[Connect]:
    """Return a function that connects to the link's front."""
    opened: list[socket.socket] = []

    def connect_to_front(receive_buffer_bytes: int = 0) -> socket.socket:
        host, _, port = link.address.rpartition(":")
        connection = socket.socket()
        opened.append(connection)
        connection.settimeout(DEADLINE_S)
        if receive_buffer_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        connection.connect((host, int(port)))
        return connection

    yield connect_to_front
    for each in opened:
        each.close()


def received(connection: socket.socket, size: int) -> bytes:
    """Return the next bytes of a connection, fewer if it ends before."""
    content = bytearray()
    while len(content) < size and (more := connection.recv(size - len(content))):
        content += more
    return bytes(content)


def asked(connection: socket.socket, content: bytes) -> bytes:
    connection.sendall(content)
    return received(connection, len(content))


def is_silent(connection: socket.socket) -> bool:
    connection.settimeout(HELD_S)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(DEADLINE_S)
    return False


def sent_until_full(connection: socket.socket) -> int:
    connection.settimeout(0.2)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while True:
            sent += connection.send(bytes(CHUNK_BYTES_MAX))
    return sent


def round_trip_s(connection: socket.socket) -> float:
    begun_s = time.monotonic()
    assert asked(connection, b"ping") == b"ping"
    return time.monotonic() - begun_s


def is_reset(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def is_refused(link: ProxiedLink) -> bool:
    """Tell whether a new connection is reset, which may be before `connect` has returned."""
    host, _, port = link.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
            return is_reset(connection)
    except ConnectionResetError:
        return True


# --- without faults ---


def test_bytes_pass_unchanged_both_ways(connect):
    content = bytes(range(256)) * 8192  # 2 MiB: many chunks
    connection = connect()
    sending = threading.Thread(target=connection.sendall, args=(content,))
    sending.start()
    assert hashlib.sha256(received(connection, len(content))).digest() == hashlib.sha256(content).digest()
    sending.join()


def test_an_end_that_says_it_has_finished_is_still_answered(connect):
    connection = connect()
    connection.sendall(b"last words")
    connection.shutdown(socket.SHUT_WR)
    assert received(connection, 100) == b"last words"


def test_the_last_bytes_arrive_however_late_they_are_read(connect, server):
    connection = connect(receive_buffer_bytes=4096)
    content = bytes(range(256)) * 2048  # 512 KiB: most of it waits in the proxy's own socket
    connection.sendall(content)
    connection.shutdown(socket.SHUT_WR)
    while server.heard.get(timeout=DEADLINE_S)[1]:
        pass
    assert received(connection, 2 * len(content)) == content


def test_connections_do_not_mix(connect):
    first, second = connect(), connect()
    first.sendall(b"first")
    second.sendall(b"second")
    assert (received(second, 6), received(first, 5)) == (b"second", b"first")


def test_the_backend_is_asked_at_each_connection(proxy, server):
    where: list[tuple[str, int] | None] = [None]
    link = proxy.link("shard-0", lambda: where[-1])
    assert is_refused(link)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        where.append(gone.getsockname())
    assert is_refused(link)
    where.append(server.address)
    host, _, port = link.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as served:
        assert asked(served, b"there") == b"there"


def test_a_backend_that_dies_ends_its_connections(connect, server):
    connection = connect()
    assert asked(connection, b"alive") == b"alive"
    server._accepted[0].shutdown(socket.SHUT_RDWR)
    assert is_reset(connection)


def test_a_proxy_that_ends_leaves_no_thread_and_no_connection(server):
    with Proxy() as proxy:
        link = proxy.link("shard-0", lambda: server.address)
        host, _, port = link.address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        assert asked(connection, b"x") == b"x"
        link.set_faults(LinkFaults(requests_held=True, answers_held=True))
        connection.sendall(b"held")
    assert is_reset(connection)
    connection.close()
    server.heard.get(timeout=DEADLINE_S)
    assert server.heard.get(timeout=DEADLINE_S) == (1, b"")
    assert not any(thread.name == "proxy" for thread in threading.enumerate())


# --- faults ---


def test_a_delay_is_paid_in_each_direction_and_ends(connect, link):
    connection = connect()
    link.set_faults(LinkFaults(delay_s=0.04))
    assert round_trip_s(connection) >= 0.08
    link.set_faults(LinkFaults(delay_s=10 * DEADLINE_S))
    link.set_faults(NO_LINK_FAULTS)
    assert asked(connection, b"ping") == b"ping"


def test_a_delay_changes_when_bytes_arrive_and_not_their_order_nor_their_rate(connect, link):
    connection = connect()
    delay_s, content = 0.5, bytes(range(256)) * 8192  # 2 MiB, 32 chunks or more
    link.set_faults(LinkFaults(delay_s=delay_s))
    begun_s = time.monotonic()
    sending = threading.Thread(target=connection.sendall, args=(content,))
    sending.start()
    assert received(connection, len(content)) == content
    one_after_the_other_s = len(content) // CHUNK_BYTES_MAX * delay_s  # and in the other direction as long again
    assert time.monotonic() - begun_s < one_after_the_other_s
    sending.join()


def test_what_is_held_on_its_way_there_arrives_when_the_fault_is_over(connect, link, server):
    connection = connect()
    link.set_faults(LinkFaults(requests_held=True))
    connection.sendall(b"request")
    assert is_silent(connection)
    assert server.heard.empty()
    link.set_faults(NO_LINK_FAULTS)
    assert received(connection, 7) == b"request"


def test_an_answer_that_is_held_is_one_whose_request_was_heard(connect, link, server):
    connection = connect()
    link.set_faults(LinkFaults(answers_held=True))
    connection.sendall(b"request")
    assert server.heard.get(timeout=DEADLINE_S) == (1, b"request")
    assert is_silent(connection)
    link.set_faults(NO_LINK_FAULTS)
    assert received(connection, 7) == b"request"


def test_a_request_arrives_after_its_sender_has_gone(connect, link, server):
    connection = connect()
    assert asked(connection, b"alive") == b"alive"
    server.heard.get(timeout=DEADLINE_S)
    link.set_faults(LinkFaults(requests_held=True, answers_held=True))
    connection.sendall(b"from beyond")
    connection.close()
    link.set_faults(NO_LINK_FAULTS)
    assert server.heard.get(timeout=DEADLINE_S) == (1, b"from beyond")


def test_what_a_fault_holds_is_bounded(connect, link):
    connection = connect()
    link.set_faults(LinkFaults(requests_held=True))
    buffers_of_the_kernel = 16 << 20
    assert sent_until_full(connection) < CHUNK_BYTES_MAX * (CHUNKS_UNDER_WAY_MAX + 4) + buffers_of_the_kernel


def test_another_link_of_the_same_proxy_does_not_suffer(proxy, connect, link, server):
    other = proxy.link("shard-1", lambda: server.address)
    link.set_faults(LinkFaults(requests_held=True, answers_held=True))
    host, _, port = other.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        assert asked(connection, b"well") == b"well"


def test_a_reset_ends_a_connection_that_has_just_been_accepted():
    """Its task has not begun by then: one that is cancelled before that does not run at all, its clean-up neither."""

    async def both() -> None:
        link = ProxiedLink("link", lambda: None, lambda coroutine: None)
        resets: list[asyncio.Task[None]] = []

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            resets.append(asyncio.get_running_loop().create_task(link._reset()))
            link._accept(reader, writer)

        async with await asyncio.start_server(accepted, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(1), DEADLINE_S)
            writer.close()

    asyncio.run(both())


def test_a_reset_ends_all_connections_of_a_link_and_no_later_one(connect, link):
    first, second = connect(), connect()
    assert (asked(first, b"1"), asked(second, b"2")) == (b"1", b"2")
    link.reset()
    for connection in (first, second):
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    assert asked(connect(), b"3") == b"3"


def test_a_new_connections_bytes_arrive_twice_and_are_answered_once(connect, link, server):
    old = connect()
    assert asked(old, b"once") == b"once"
    assert server.heard.get(timeout=DEADLINE_S) == (1, b"once")
    link.set_faults(LinkFaults(duplicate=True))
    connection = connect()
    assert asked(connection, b"twice") == b"twice"
    assert {server.heard.get(timeout=DEADLINE_S) for _ in range(2)} == {(2, b"twice"), (3, b"twice")}
    assert asked(old, b"old") == b"old"
    assert server.heard.get(timeout=DEADLINE_S) == (1, b"old")
    connection.shutdown(socket.SHUT_WR)
    assert received(connection, 1) == b"", "a second answer"


def test_duplicates_end_with_the_fault(connect, link, server):
    link.set_faults(LinkFaults(duplicate=True))
    connection = connect()
    assert asked(connection, b"twice") == b"twice"
    assert sorted(server.heard.get(timeout=DEADLINE_S)[1] for _ in range(2)) == [b"twice", b"twice"]
    link.set_faults(NO_LINK_FAULTS)
    assert asked(connection, b"once") == b"once"
    assert sorted(server.heard.get(timeout=DEADLINE_S)[1] for _ in range(2)) == [b"", b"once"]


def test_faults_together_are_each_of_them_and_the_longer_delay():
    both = LinkFaults(delay_s=0.1, requests_held=True) | LinkFaults(delay_s=0.2, duplicate=True)
    assert both == LinkFaults(delay_s=0.2, requests_held=True, answers_held=False, duplicate=True)
    assert both | NO_LINK_FAULTS == both


# --- gRPC through a link ---


class Counting:
    """A gRPC server of one method, and the requests that reached it."""

    def __init__(self) -> None:
        self.heard: queue.Queue[bytes] = queue.Queue()
        self.server = rpc.Server("127.0.0.1:0")
        self.server.grpc.add_generic_rpc_handlers((raw_handlers("test.Echo", {"Say": self._say}),))
        self.server.start()

    def _say(self, request: bytes, _: grpc.ServicerContext) -> bytes:
        self.heard.put(request)
        return request.upper()

    def where(self) -> tuple[str, int]:
        host, _, port = self.server.address.rpartition(":")
        return host, int(port)


@pytest.fixture
def counting() -> Iterator[Counting]:
    """Return a gRPC server."""
    counting = Counting()
    yield counting
    counting.server.stop(grace_s=0.0)


def test_every_call_arrives_twice_and_is_answered_right(proxy, counting):  # P1
    link = proxy.link("shard-0", counting.where)
    link.set_faults(LinkFaults(duplicate=True))
    with rpc.connect(link.address) as channel:
        say = channel.unary_unary("/test.Echo/Say")
        requests = [b"request %d" % number * 1000 for number in range(20)]
        for request in requests:
            assert say(request, timeout=DEADLINE_S) == request.upper()
        heard = sorted(counting.heard.get(timeout=DEADLINE_S) for _ in range(2 * len(requests)))
    assert heard == sorted(requests * 2)
    assert counting.heard.empty()


def test_a_call_survives_a_reset_by_being_made_again(proxy, counting):
    link = proxy.link("shard-0", counting.where)
    with rpc.connect(link.address) as channel:
        say = channel.unary_unary("/test.Echo/Say")
        assert say(b"before", timeout=DEADLINE_S) == b"BEFORE"
        link.set_faults(LinkFaults(answers_held=True))
        under_way = say.future(b"under way", timeout=DEADLINE_S)
        assert [counting.heard.get(timeout=DEADLINE_S) for _ in range(2)] == [b"before", b"under way"]
        link.reset()
        link.set_faults(NO_LINK_FAULTS)
        with pytest.raises(Unreachable), rpc.our_errors(link.address):
            under_way.result()

        def again() -> bytes | None:
            """Return the answer; None where the call still took the connection that is gone."""
            with contextlib.suppress(Unreachable), rpc.our_errors(link.address):
                return say(b"again", timeout=DEADLINE_S, wait_for_ready=True)
            return None

        assert eventually(again, "an answer on a new connection") == b"AGAIN"
