"""The shared-memory transport against the real service: one copy each way, and slots that nobody uses twice at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from shared_shard import (
    DEADLINE_S,
    ELEMENTS,
    GREETING,
    OFFSETS,
    TARGET,
    SharedShard,
    mapped_bytes,
    mappings,
    pull_of,
    push_of,
)

from parashard.buffers import Buffers
from parashard.errors import (
    LimitExceeded,
    MalformedFrame,
    NonFiniteGradient,
    QueueFull,
    StaleIncarnation,
    StaleRound,
    Unreachable,
)
from parashard.messages import PullRun, PushChunk, PushResult
from parashard.transports import memory
from parashard.transports.base import ShardAddress
from parashard.transports.shared_weights import SharedWeights, can_share
from parashard.transports.shm import ShmTransport
from parashard.transports.stream import Kind, Stream
from protos import stream_pb2
from ps_server.local_socket import LocalSocket, sweep

pytestmark = pytest.mark.skipif(not can_share(), reason="this machine cannot share weights")


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a short name: a socket's path has little room."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def shard(root: Path) -> Iterator[SharedShard]:
    shard = SharedShard(root)
    yield shard
    shard.stop()


@pytest.fixture
def transport(shard: SharedShard) -> Iterator[ShmTransport]:
    transport = shard.connect()
    yield transport
    transport.close()


def push(transport: ShmTransport, content: np.ndarray, step: int = 0) -> PushResult:
    return transport.push(push_of(content, step), DEADLINE_S).result().result


def pull(transport: ShmTransport, into: np.ndarray, run: PullRun | None = None) -> int:
    return transport.pull(run or pull_of(), Buffers([into]), DEADLINE_S).result()


GRADIENT = np.arange(ELEMENTS, dtype=np.float32)


class TestPushAndPull:
    """What is pushed moves the weights; what is pulled is the weights."""

    def test_a_push_arrives_as_it_is_and_a_pull_brings_what_became_of_it(self, shard, transport) -> None:
        assert push(transport, GRADIENT) is PushResult.APPLIED
        into = np.empty(ELEMENTS, np.float32)
        assert pull(transport, into) == 1
        assert np.array_equal(into, GRADIENT)

    def test_nothing_is_read_beyond_the_weights(self, shard, transport) -> None:
        beyond = pull_of(ELEMENTS - 1, ELEMENTS + 1)
        with pytest.raises(MalformedFrame, match="bytes up to 12004 from a shard of 3000 elements") as caught:
            pull(transport, np.empty(2, np.float32), beyond)
        assert caught.value.peer == shard.socket.path

    def test_pieces_are_gathered_and_scattered(self, shard, transport) -> None:
        whole, pieces = push_of(GRADIENT), Buffers([GRADIENT[:10], GRADIENT[10:10], GRADIENT[10:]])
        transport.push(type(whole)(*[getattr(whole, f) for f in whole.__slots__[:-1]], pieces), DEADLINE_S).result()
        into = np.empty(ELEMENTS, np.float32)
        assert transport.pull(pull_of(), Buffers([into[:999], into[999:]]), DEADLINE_S).result() == 1
        assert np.array_equal(into, GRADIENT)

    def test_the_shard_uses_a_push_in_the_slot(self, shard, transport) -> None:
        slots = []

        def look(chunk: PushChunk) -> None:
            address = np.frombuffer(chunk.payload, np.uint8).ctypes.data
            slots.append(any(begin <= address < end for begin, end in mappings("parashard-slot")))

        shard.plane.before_push = look
        push(transport, GRADIENT)
        assert slots == [True]

    def test_a_push_without_a_gradient_and_a_pull_of_nothing_are_requests_too(self, shard, transport) -> None:
        assert push(transport, GRADIENT[:0]) is PushResult.APPLIED
        assert pull(transport, np.empty(0, np.float32), pull_of(5, 5)) == 0
        assert [run.length_bytes for run in shard.plane.pulled] == [0]

    @pytest.mark.parametrize(("begin", "end"), [(0, 1), (5, 7), (6, 1000), (999, 3000)])
    def test_a_run_of_the_weights_can_be_pulled(self, shard, transport, begin: int, end: int) -> None:
        shard.plane.move(GRADIENT)
        into = np.empty(end - begin, np.float32)
        pull(transport, into, pull_of(begin, end))
        assert np.array_equal(into, GRADIENT[begin:end])

    def test_only_what_has_moved_is_written(self, shard, transport) -> None:
        shard.plane.move(GRADIENT)
        shard.plane.move(GRADIENT, 2)
        into = np.full(ELEMENTS, -1, np.float32)
        assert pull(transport, into, pull_of(known=1)) == 2
        assert (into[: OFFSETS[2]] == -1).all()
        assert (into[OFFSETS[3] :] == -1).all()
        assert np.array_equal(into[OFFSETS[2] : OFFSETS[3]], 2 * GRADIENT[OFFSETS[2] : OFFSETS[3]])

    def test_many_threads_share_a_transport(self, shard, transport) -> None:
        def work(thread: int) -> None:
            into = np.empty(ELEMENTS, np.float32)
            for step in range(10):
                push(transport, np.full(ELEMENTS, 1, np.float32), 10 * thread + step)
                version = pull(transport, into)
                assert min(into) >= version, "of this version, or of a later one where others pushed meanwhile"

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
        into = np.empty(ELEMENTS, np.float32)
        assert pull(transport, into) == 80
        assert set(into.tolist()) == {80}


class TestContention:
    """A pull of what moves while it is read."""

    def test_from_a_partition_that_moves_on_the_shard_copies_under_its_own_lock(self, shard, transport) -> None:
        shard.plane.move(GRADIENT)
        shard.plane.memory.begun[2] = 2  # a move that has begun
        pulls = []

        def end_the_move(run: PullRun) -> None:
            pulls.append((run.offset_bytes, run.length_bytes))
            if len(pulls) == 2:
                shard.plane.memory.begun[2] = 1

        shard.plane.after_read = end_the_move
        into = np.empty(ELEMENTS, np.float32)
        assert pull(transport, into) == 1
        assert np.array_equal(into, GRADIENT)
        assert pulls == [(0, 4 * ELEMENTS), (4 * OFFSETS[2], 4 * (ELEMENTS - OFFSETS[2]))]

    def test_what_has_not_moved_is_left_as_it_is_then_too(self, shard, transport) -> None:
        shard.plane.move(GRADIENT)
        shard.plane.move(GRADIENT, 2)
        shard.plane.memory.begun[2] = 3
        into = np.full(ELEMENTS, -1, np.float32)
        assert pull(transport, into, pull_of(known=1)) == 2
        assert (into[OFFSETS[3] :] == -1).all()
        assert np.array_equal(into[OFFSETS[2] : OFFSETS[3]], 2 * GRADIENT[OFFSETS[2] : OFFSETS[3]])

    def test_weights_of_a_round_that_ends_meanwhile_are_refused(self, shard, transport) -> None:  # P11
        shard.plane.after_read = lambda run: shard.plane.move(GRADIENT)
        with pytest.raises(StaleRound) as caught:
            pull(transport, np.empty(ELEMENTS, np.float32), pull_of(round_=0))
        assert caught.value.peer == shard.socket.path
        shard.plane.after_read = lambda run: None
        assert pull(transport, np.empty(ELEMENTS, np.float32), pull_of(round_=1)) == 1
        assert len(shard.plane.greeted) == 1, "on the same connection"

    def test_a_shard_that_must_know_what_was_pulled_copies_all_of_it(self, root: Path) -> None:
        shard = SharedShard(root, direct=False)
        transport = shard.connect()
        try:
            shard.plane.move(GRADIENT)
            into = np.empty(ELEMENTS, np.float32)
            shard.plane.after_read = lambda run: shard.plane.move(GRADIENT)  # what was copied does not move any more
            assert pull(transport, into) == 1
            assert np.array_equal(into, GRADIENT)
            assert len(shard.plane.pulled) == 1
            shard.plane.moved = lambda run: ()
            with pytest.raises(MalformedFrame, match="asked for 12000 bytes, answered with 0"):
                pull(transport, into)
        finally:
            transport.close()
            shard.stop()


class TestSlots:
    """A slot belongs to one request at a time, and nobody writes to it while the shard may read it."""

    def test_a_connection_serves_one_request_after_another(self, shard, transport) -> None:
        for step in range(5):
            push(transport, GRADIENT, step)
            pull(transport, np.empty(ELEMENTS, np.float32))
        assert shard.plane.greeted == [TARGET]

    def test_after_a_refusal_the_slot_is_used_again(self, shard, transport) -> None:
        def refuse(chunk: PushChunk) -> None:
            raise NonFiniteGradient("NaN in it")

        shard.plane.before_push = refuse
        with pytest.raises(NonFiniteGradient, match="NaN in it") as caught:
            push(transport, GRADIENT)
        assert caught.value.peer == shard.socket.path
        shard.plane.before_push = lambda chunk: None
        push(transport, GRADIENT)
        assert len(shard.plane.greeted) == 1

    @pytest.mark.parametrize("end", ["deadline", "cancel"])
    def test_a_slot_whose_push_was_given_up_is_never_written_again(self, shard, transport, end: str) -> None:
        begun, let_go, found = threading.Event(), threading.Event(), []

        def read_late(chunk: PushChunk) -> None:
            if not begun.is_set():
                begun.set()
                let_go.wait(DEADLINE_S)
            found.append(np.frombuffer(chunk.payload, np.float32).copy())

        shard.plane.before_push = read_late
        try:
            pending = transport.push(push_of(GRADIENT), DEADLINE_S if end == "cancel" else 0.02)
            assert begun.wait(DEADLINE_S)
            if end == "cancel":
                pending.cancel()
            with pytest.raises(Unreachable):
                pending.result()
            push(transport, -GRADIENT, 1)
        finally:
            let_go.set()
        assert shard.slots.ended.acquire(timeout=DEADLINE_S), "the first connection ends once its push is over"
        assert np.array_equal(found[0], -GRADIENT)
        assert np.array_equal(found[1], GRADIENT), "as it was when its request began"

    def test_a_push_that_does_not_fit_is_refused_before_it_is_written(self, shard, transport) -> None:
        with pytest.raises(LimitExceeded, match="a push of 12004 bytes; the shard takes 12000"):
            push(transport, np.zeros(ELEMENTS + 1, np.float32))
        assert shard.plane.version == 0

    def test_when_a_transport_closes_its_slots_end_on_both_sides(self, shard) -> None:
        before = mapped_bytes("parashard-slot")
        transport = shard.connect()
        push(transport, GRADIENT)
        assert mapped_bytes("parashard-slot") > before
        transport.close()
        assert shard.slots.ended.acquire(timeout=DEADLINE_S)
        shard.stop()
        assert (shard.slots.held_bytes, shard.slots.held_bytes_max) == (0, 4 * ELEMENTS)
        assert mapped_bytes("parashard-slot") == before

    def test_no_descriptor_stays_behind(self, shard) -> None:
        def open_descriptors() -> int:
            return len(os.listdir("/proc/self/fd"))

        before = open_descriptors()
        transport = shard.connect()
        pull(transport, np.empty(ELEMENTS, np.float32))
        transport.close()
        assert shard.slots.ended.acquire(timeout=DEADLINE_S)
        shard.stop()
        assert open_descriptors() == before - 1, "and the listening socket is gone"

    def test_a_transport_without_room_for_another_slot_waits_for_its_own(self, root: Path) -> None:
        shard = SharedShard(root, slots_bytes=4 * ELEMENTS)
        transport = shard.connect()
        begun, let_go = threading.Event(), threading.Event()

        def hold_first(chunk: PushChunk) -> None:
            if not begun.is_set():
                begun.set()
                let_go.wait(DEADLINE_S)

        shard.plane.before_push = hold_first
        try:
            first = transport.push(push_of(GRADIENT), DEADLINE_S)
            assert begun.wait(DEADLINE_S)
            with ThreadPoolExecutor(1) as thread:
                second = thread.submit(push, transport, GRADIENT, 1)
                let_go.set()
                first.result()
                assert second.result(DEADLINE_S) is PushResult.APPLIED
            other = shard.connect()
            with pytest.raises(QueueFull, match="hold 12000 bytes"):
                push(other, GRADIENT)
            other.close()
        finally:
            let_go.set()
            transport.close()
            shard.stop()


# --- what a worker does not believe ---


@pytest.fixture
def welcomed_with(root: Path) -> Iterator[Callable[..., ShmTransport]]:
    """Return a function that connects to a shard which sends this WELCOME and these descriptors."""
    listening = socket.socket(socket.AF_UNIX)
    path = str(root / "s.sock")
    listening.bind(path)
    listening.listen()
    ends: list[Callable[[], None]] = [listening.close]

    def connect(welcome: stream_pb2.Welcome, *descriptors: int) -> ShmTransport:
        def answer() -> None:
            stream = Stream(listening.accept()[0], "worker")
            ends.append(stream.close)
            stream.receive(deadline_s=float("inf"))
            stream.send(Kind.WELCOME, welcome, deadline_s=float("inf"), descriptors=descriptors)

        thread = threading.Thread(target=answer)
        thread.start()
        transport = ShmTransport(ShardAddress("", 1, local_path=path), GREETING)
        ends[:0] = [transport.close, thread.join]
        return transport

    yield connect
    for end in ends:
        end()


class TestWelcomes:
    """Whatever a shard sends is checked before it is mapped."""

    WELCOME = stream_pb2.Welcome(slot_bytes=12, elements=3, partitions=1, direct=True)

    def sealed(self, size_bytes: int, *, seal: bool = True) -> int:
        descriptor = memory.create("test", size_bytes)
        if seal:
            memory.seal(descriptor, writable=True)
        return descriptor

    @pytest.mark.parametrize(
        ("slot_bytes", "seal", "found"),
        [
            (8, True, "a slot: expected 12 bytes of memory, found 8"),
            (12, False, "a slot: its length is not sealed"),
        ],
    )
    def test_a_slot_is_as_long_as_said_and_for_ever(self, welcomed_with, slot_bytes, seal, found) -> None:
        weights, slot = SharedWeights([0, 3]), self.sealed(slot_bytes, seal=seal)
        with pytest.raises(MalformedFrame, match=found):
            push(welcomed_with(self.WELCOME, weights.read_descriptor, slot), GRADIENT[:1])
        os.close(slot)

    def test_a_slot_holds_all_that_can_be_pulled(self, welcomed_with) -> None:
        welcome = stream_pb2.Welcome(slot_bytes=8, elements=3, partitions=1)
        weights, slot = SharedWeights([0, 3]), self.sealed(8)
        with pytest.raises(MalformedFrame, match="a slot of 8 bytes for a shard of 3 elements"):
            push(welcomed_with(welcome, weights.read_descriptor, slot), GRADIENT[:1])
        os.close(slot)

    def test_weights_are_of_the_size_that_was_said(self, welcomed_with) -> None:
        weights, slot = SharedWeights([0, 2000]), self.sealed(12)
        with pytest.raises(MalformedFrame, match="a shard's weights: expected 4108 bytes of memory, found 12096"):
            push(welcomed_with(self.WELCOME, weights.read_descriptor, slot), GRADIENT[:1])
        os.close(slot)

    @pytest.mark.parametrize("count", [0, 1])
    def test_two_descriptors_are_due(self, welcomed_with, count: int) -> None:
        slot = self.sealed(12)
        with pytest.raises(MalformedFrame, match=f"two descriptors of memory, found {count}"):
            push(welcomed_with(self.WELCOME, *[slot] * count), GRADIENT[:1])
        os.close(slot)


def test_a_closed_connection_keeps_no_memory_of_its_shard(shard) -> None:  # however long its object lives on
    transport = shard.connect()
    opened = []
    real_open = transport._connections._open_one
    transport._connections._open_one = lambda deadline_s: opened.append(real_open(deadline_s)) or opened[-1]
    transport.greet(DEADLINE_S)
    [connection] = opened
    slot = weakref.ref(connection._slot)
    assert slot() is not None
    transport.close()
    assert slot() is None
    with pytest.raises(Unreachable, match="the connection was closed"):
        connection._slot  # noqa: B018  # asks for the memory


def test_another_users_socket_is_unreachable(shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parashard.transports.socket_io.is_own_user", lambda connection: False)
    transport = shard.connect()
    with pytest.raises(Unreachable, match="another user listens there"):
        push(transport, GRADIENT)
    transport.close()


def test_a_shard_that_is_not_there_is_unreachable(root: Path) -> None:
    transport = ShmTransport(ShardAddress("", 1, local_path=str(root / "none.sock")), GREETING)
    with pytest.raises(Unreachable, match=r"none\.sock") as caught:
        transport.greet(DEADLINE_S)
    assert caught.value.peer == str(root / "none.sock")


def test_another_life_of_the_shard_refuses_the_connection(shard, transport) -> None:  # P3
    def refuse(target: object) -> None:
        raise StaleIncarnation("this is incarnation 2")

    shard.plane.check = refuse
    with pytest.raises(StaleIncarnation, match="this is incarnation 2"):
        transport.greet(DEADLINE_S)


# --- deaths ---


WORKER = """
import sys
import numpy as np
from shared_shard import DEADLINE_S, GREETING, push_of
from parashard.transports.base import ShardAddress
from parashard.transports.shm import ShmTransport
transport = ShmTransport(ShardAddress("", 1, local_path=sys.argv[1]), GREETING)
transport.push(push_of(np.ones(3000, np.float32)), DEADLINE_S)
sys.stdin.read()
"""
SHARD = """
import sys
from pathlib import Path
from shared_shard import SharedShard
shard = SharedShard(Path(sys.argv[1]))
def hang(chunk):
    print("received", flush=True)
    sys.stdin.read()
shard.plane.before_push = hang
print(shard.socket.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a process, which does not outlive the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: str) -> subprocess.Popen[str]:
        paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_worker_killed_in_a_push_leaves_nothing(shard, started) -> None:
    begun, let_go = threading.Event(), threading.Event()

    def hold(chunk: PushChunk) -> None:
        begun.set()
        let_go.wait(DEADLINE_S)

    shard.plane.before_push = hold
    before = mapped_bytes("parashard-slot")
    worker = started(WORKER, shard.socket.path)
    try:
        assert begun.wait(DEADLINE_S)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        assert shard.slots.held_bytes == 4 * ELEMENTS, "the shard still reads it"
    finally:
        let_go.set()
    assert shard.slots.ended.acquire(timeout=DEADLINE_S)
    assert shard.slots.held_bytes == 0
    shard.stop()  # waits for the connection's thread
    assert mapped_bytes("parashard-slot") == before
    assert shard.plane.version == 1, "the push had arrived whole"


def test_a_shard_killed_in_a_push_is_unreachable_at_once_and_its_socket_is_swept(root: Path, started) -> None:
    process = started(SHARD, str(root))
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    transport = ShmTransport(ShardAddress("", 1, local_path=path), GREETING)
    try:
        into = np.empty(ELEMENTS, np.float32)
        pull(transport, into)
        pending = transport.push(push_of(GRADIENT), DEADLINE_S)
        assert process.stdout.readline() == "received\n"
        process.send_signal(signal.SIGKILL)
        with pytest.raises(Unreachable, match="connection"):
            pending.result()
        with pytest.raises(Unreachable):
            pull(transport, into)
    finally:
        transport.close()
    assert [p.name for p in root.rglob("*.sock")] == ["shard-0.1.sock"], "all that is left in the file system"
    process.wait()
    successor = LocalSocket("r", 0, 2, root=root)
    successor.listening.close()
    assert [p.name for p in root.rglob("*.sock")] == ["shard-0.2.sock"]
    successor.close()
    sweep(root)
    assert list(root.iterdir()) == []
