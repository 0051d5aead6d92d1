"""Conformance: what every transport must do. A new transport joins PEERS and passes, or is none."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import pytest

from parashard.errors import (
    NonFiniteGradient,
    ParashardError,
    PeerFailed,
    QueueFull,
    StaleIncarnation,
    Unreachable,
)
from parashard.messages import CHUNK_BYTES_MAX
from parashard.rpc import Server, raw_handlers
from parashard.transports.base import Transport
from parashard.transports.grpc import SERVICE, GrpcTransport
from parashard.wire import FRAME_BYTES_MAX

DEADLINE_S = 20.0

Answer = Callable[[bytes], bytes]


class Peer(Protocol):
    """The other end of a transport, in this process: two answers that a test may replace."""

    address: str
    push: Answer
    pull: Answer

    def connect(self) -> Transport: ...
    def stop(self) -> None: ...


class GrpcPeer:
    """A gRPC server with the shard's data plane."""

    def __init__(self) -> None:
        self.push: Answer = lambda frame: frame
        self.pull: Answer = lambda frame: frame
        self._server = Server("127.0.0.1:0")
        methods = {"Push": lambda frame, _: self.push(frame), "Pull": lambda frame, _: self.pull(frame)}
        self._server.grpc.add_generic_rpc_handlers((raw_handlers(SERVICE, methods),))
        self._server.start()
        self.address = self._server.address

    def connect(self) -> Transport:
        return GrpcTransport(self.address)

    def stop(self) -> None:
        self._server.stop(0.0)


PEERS: dict[str, Callable[[], Peer]] = {"grpc": GrpcPeer}

# A peer in a process of its own, for the one thing that cannot be played: its death. It never answers.
DYING_PEERS = {
    "grpc": """
import sys, time
from parashard.rpc import Server, raw_handlers
from parashard.transports.grpc import SERVICE
server = Server("127.0.0.1:0")
def hang(frame, context):
    print("called", flush=True)
    time.sleep(60)
server.grpc.add_generic_rpc_handlers((raw_handlers(SERVICE, {"Push": hang, "Pull": hang}),))
server.start()
print(server.address, flush=True)
time.sleep(60)
""",
}
CONNECT: dict[str, Callable[[str], Transport]] = {"grpc": GrpcTransport}


@pytest.fixture(params=sorted(PEERS))
def kind(request: pytest.FixtureRequest) -> str:
    """Return the name of the transport under test."""
    return str(request.param)


@pytest.fixture
def peer(kind: str) -> Iterator[Peer]:
    """Return a peer that echoes."""
    peer = PEERS[kind]()
    yield peer
    peer.stop()


@pytest.fixture
def transport(peer: Peer) -> Iterator[Transport]:
    """Return a connection to it."""
    transport = peer.connect()
    yield transport
    transport.close()


@pytest.fixture
def dying(kind: str) -> Iterator[tuple[Transport, subprocess.Popen[str]]]:
    """Return a connection to a peer in a process of its own, and the process."""
    process = subprocess.Popen([sys.executable, "-c", DYING_PEERS[kind]], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        transport = CONNECT[kind](process.stdout.readline().strip())
        yield transport, process
        transport.close()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("method", ["push", "pull"])
class TestEveryTransport:
    """Frames arrive whole, errors arrive as themselves, and no call outlives its deadline or its peer."""

    @pytest.mark.parametrize("size_bytes", [0, 1, 4095, 65_537, 1 << 20, CHUNK_BYTES_MAX, FRAME_BYTES_MAX])
    def test_a_frame_arrives_as_it_was_sent(self, transport, method, size_bytes):
        frame = (bytes(range(256)) * (size_bytes // 256 + 1))[:size_bytes]
        answer = getattr(transport, method)(frame, DEADLINE_S).result()
        assert isinstance(answer, bytes)
        assert answer == frame

    def test_push_and_pull_are_told_apart(self, peer, transport, method):
        peer.push, peer.pull = lambda frame: b"push " + frame, lambda frame: b"pull " + frame
        assert getattr(transport, method)(b"7", DEADLINE_S).result() == f"{method} 7".encode()

    def test_many_frames_may_be_under_way_and_each_gets_its_own_answer(self, transport, method):
        replies = [getattr(transport, method)(b"%d" % i, DEADLINE_S) for i in range(100)]
        assert [reply.result() for reply in reversed(replies)] == [b"%d" % i for i in reversed(range(100))]

    def test_calls_may_come_from_many_threads(self, transport, method):
        def talk(thread: int) -> bool:
            frames = [b"%d:%d" % (thread, i) * 1000 for i in range(10)]
            return all(getattr(transport, method)(frame, DEADLINE_S).result() == frame for frame in frames)

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(talk, range(8)))

    def test_a_call_under_way_does_not_hold_up_others(self, peer, transport, method):
        let_go = threading.Event()

        def slow_first(frame: bytes) -> bytes:
            if frame == b"slow":
                let_go.wait(DEADLINE_S)
            return frame

        peer.push = peer.pull = slow_first
        slow = getattr(transport, method)(b"slow", DEADLINE_S)
        try:
            assert getattr(transport, method)(b"quick", DEADLINE_S).result() == b"quick"
        finally:
            let_go.set()
        assert slow.result() == b"slow"

    def test_the_deadline_ends_a_call(self, peer, transport, method):
        let_go = threading.Event()
        peer.push = peer.pull = lambda frame: b"late" if let_go.wait(DEADLINE_S) else b"never"
        try:
            with pytest.raises(Unreachable) as caught:
                getattr(transport, method)(b"", 0.05).result()
            assert caught.value.peer == peer.address
        finally:
            let_go.set()

    @pytest.mark.parametrize("error", [StaleIncarnation, NonFiniteGradient, QueueFull])
    def test_the_peers_error_is_raised_as_itself(self, peer, transport, method, error):
        def refuse(frame: bytes) -> bytes:
            raise error(f"because of {frame!r}")

        peer.push = peer.pull = refuse
        with pytest.raises(ParashardError) as caught:
            getattr(transport, method)(b"9", DEADLINE_S).result()
        assert type(caught.value) is error
        assert (caught.value.message, caught.value.peer) == ("because of b'9'", peer.address)

    def test_a_bug_of_the_peer_is_its_failure(self, peer, transport, method):
        def break_down(frame: bytes) -> bytes:
            raise ZeroDivisionError

        peer.push = peer.pull = break_down
        with pytest.raises(PeerFailed, match="ZeroDivisionError"):
            getattr(transport, method)(b"", DEADLINE_S).result()

    def test_a_peer_killed_in_the_middle_is_unreachable(self, dying, method):
        transport, process = dying
        reply = getattr(transport, method)(b"", DEADLINE_S)
        assert process.stdout.readline() == "called\n"  # the fault hits a call that is under way
        process.send_signal(signal.SIGKILL)
        with pytest.raises(Unreachable):
            reply.result()
        with pytest.raises(Unreachable):
            getattr(transport, method)(b"", 0.5).result()

    def test_closing_ends_what_is_under_way(self, peer, transport, method):
        begun, let_go = threading.Event(), threading.Event()

        def hang(frame: bytes) -> bytes:
            begun.set()
            let_go.wait(DEADLINE_S)
            return frame

        peer.push = peer.pull = hang
        reply = getattr(transport, method)(b"", DEADLINE_S)
        assert begun.wait(DEADLINE_S)
        transport.close()
        try:
            with pytest.raises(Unreachable):
                reply.result()
        finally:
            let_go.set()

    def test_after_closing_a_call_is_unreachable_and_closing_again_does_nothing(self, transport, method):
        transport.close()
        with pytest.raises(Unreachable):
            getattr(transport, method)(b"", DEADLINE_S).result()
        transport.close()


def test_every_transport_is_here():
    assert set(PEERS) == set(DYING_PEERS) == set(CONNECT)
