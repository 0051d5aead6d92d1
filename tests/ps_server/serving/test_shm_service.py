"""The shard's end of shared memory: what it refuses, and what it holds for whom."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from google.protobuf.message import Message

from parashard._proto import stream_pb2, tensor_pb2
from parashard.errors import (
    LimitExceeded,
    MalformedFrame,
    NotReady,
    ParashardError,
    PeerFailed,
    QueueFull,
    Unreachable,
    WrongRun,
)
from parashard.protocol import wire
from parashard.transports import memory
from parashard.transports.memory import Bytes
from parashard.transports.shared_weights import SharedWeights, can_share
from parashard.transports.stream import Head, Kind, Stream, greet, receive_answer, refused
from parashard_server.push_memory import PushMemory, Slots
from parashard_server.serving import stream_services
from support.conformance_cases import keys_of
from support.fake_plane import GREETING, TARGET
from support.shared_shard import DEADLINE_S, ELEMENTS, OFFSETS, SharedShard, mapped_bytes, pull_of, push_of

pytestmark = pytest.mark.skipif(not can_share(), reason="this machine cannot share weights")


HEADER = wire.push_header(push_of(np.ones(8, np.float32)))


def soon() -> float:
    return time.monotonic() + DEADLINE_S


def with_slot(dial: Callable[[], Stream]) -> tuple[Stream, Bytes]:
    """Return a greeted connection and its slot."""
    stream = dial()
    _, (weights, descriptor) = greet(stream, GREETING, deadline_s=soon(), descriptors_max=2)
    slot = memory.mapped(descriptor, writable=True)
    for one in (weights, descriptor):
        os.close(one)
    return stream, slot


@pytest.fixture
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedShard]:
    shard = SharedShard(tmp_path_factory.mktemp("s"))
    yield shard
    shard.stop()


@pytest.fixture
def dial(shard: SharedShard, request: pytest.FixtureRequest) -> Callable[[], Stream]:
    """Return a function that connects to the shard and says nothing."""

    def connect() -> Stream:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(shard.socket.path)
        stream = Stream(connection, shard.socket.path)
        request.addfinalizer(stream.close)
        return stream

    return connect


@pytest.fixture
def stream(dial: Callable[[], Stream]) -> Stream:
    """Return a connection that was welcomed; its memory is not mapped."""
    stream = dial()
    _, descriptors = greet(stream, GREETING, deadline_s=soon(), descriptors_max=2)
    for descriptor in descriptors:
        os.close(descriptor)
    return stream


def error_of(head: Head) -> ParashardError:
    assert head.kind is Kind.REFUSAL, head
    return refused(head.header, "shard")


def ask(stream: Stream, kind: Kind, header: Message, payload: tuple[memoryview, ...] = ()) -> Head:
    stream.send(kind, header, payload, deadline_s=soon())
    return stream.receive(deadline_s=soon())


def is_closed(stream: Stream) -> bool:
    try:
        stream.receive(deadline_s=soon())
    except Unreachable:
        return True
    return False


class TestHello:
    """What a worker gets, and when it gets nothing."""

    def test_the_welcome_says_all_that_the_worker_must_check(self, shard, dial) -> None:
        welcome, (weights, slot) = greet(dial(), GREETING, deadline_s=soon(), descriptors_max=2)
        assert shard.plane.greeted == [TARGET]
        assert (welcome.elements, welcome.partitions) == (ELEMENTS, len(OFFSETS) - 1)
        assert (welcome.slot_bytes, welcome.push_bytes_max) == (4 * ELEMENTS, 4 * ELEMENTS)
        assert os.fstat(slot).st_size == 4 * ELEMENTS
        assert [os.fstat(d).st_mode & 0o777 for d in (weights, slot)] == [0o600, 0o600]
        memory.check(slot, 4 * ELEMENTS, "a slot")
        with pytest.raises(PermissionError):
            memory.mapped(weights, writable=True)
        for descriptor in (weights, slot):
            os.close(descriptor)

    @pytest.mark.parametrize("error", [WrongRun, NotReady])  # P2
    def test_a_worker_that_means_something_else_gets_no_memory(self, shard, dial, error) -> None:
        def refuse(target: object) -> None:
            raise error("not here")

        shard.plane.check = refuse
        with pytest.raises(error, match="not here"):
            greet(dial(), GREETING, deadline_s=soon(), descriptors_max=2)
        assert shard.memory.held_bytes_max == 0

    def test_an_incarnation_whose_weights_are_not_shared_makes_workers_use_another_transport(self, shard, dial) -> None:
        shard.shared = False
        with pytest.raises(QueueFull, match="no shared memory"):
            greet(dial(), GREETING, deadline_s=soon(), descriptors_max=2)

    def test_a_connection_does_not_keep_the_memory_of_an_incarnation_that_is_over(self, shard, stream) -> None:
        before = mapped_bytes("parashard-weights")
        shard.plane.memory = SharedWeights(OFFSETS)
        assert mapped_bytes("parashard-weights") == before, "one incarnation came, one went"

    def test_anything_else_is_no_beginning(self, dial) -> None:
        stream = dial()
        error = error_of(ask(stream, Kind.PULL, wire.pull_header(pull_of())))
        assert isinstance(error, MalformedFrame)
        assert "begins with HELLO, found PULL" in error.message
        assert is_closed(stream)


class TestRequests:
    """One request, one answer; what breaks the protocol ends the connection."""

    def test_an_error_of_the_shard_is_an_answer(self, shard, stream) -> None:
        def refuse(request: object) -> None:
            raise QueueFull("later")

        shard.plane.before = refuse
        for _ in range(2):
            assert isinstance(error_of(ask(stream, Kind.PUSH, HEADER)), QueueFull)

    def test_a_pull_may_ask_for_the_version_alone(self, shard, stream) -> None:
        shard.plane.move(1)
        stream.send(Kind.PULL, wire.pull_header(pull_of()), deadline_s=soon())
        reply = receive_answer(stream, Kind.WEIGHTS, deadline_s=soon()).header
        assert (reply.version, list(reply.run_offsets)) == (1, [])

    def test_or_for_the_runs_in_the_slot(self, shard, stream) -> None:
        shard.plane.move(1)
        shard.plane.move(2, 2)
        stream.send(Kind.PULL, wire.pull_header(pull_of(known=1), in_slot=True), deadline_s=soon())
        reply = receive_answer(stream, Kind.WEIGHTS, deadline_s=soon()).header
        assert (list(reply.run_offsets), list(reply.run_lengths)) == ([4 * 6], [4 * 994])

    def test_rows_come_in_the_slot_where_they_have_room(self, shard, dial) -> None:
        keys = keys_of(1, 2, 3)
        shard.plane.tables.by_name["user"].push(keys, np.ones((3, 3), np.float32), clock=1)
        shard.plane.row_bytes = 200
        shard.plane.move(1)
        stream, slot = with_slot(dial)
        asked = pull_of()._replace(keys={"user": keys})
        for in_slot in (True, False):
            slot[:] = 0
            stream.send(
                Kind.PULL, wire.pull_header(asked, in_slot=in_slot), wire.keys_payload(asked), deadline_s=soon()
            )
            head = receive_answer(stream, Kind.WEIGHTS, deadline_s=soon())
            reply = head.header
            assert wire.rows_bytes_of(reply, asked) == 37
            found = wire.rows_from(reply, slot[12_000:12_037].data, asked)["user"]
            assert found.values.tolist() == [[1.0] * 3] * 3
            assert head.payload_bytes == 0
            assert bool(slot[:12_000].any()) is in_slot  # the variables
        many = keys_of(*range(10))  # 40 KiB of rows; the slot has 200 bytes for them
        shard.plane.tables.by_name["item"].push(many, np.ones((10, 1024), np.float32), clock=1)
        slot[:] = 0
        asked = pull_of()._replace(keys={"item": many})
        stream.send(Kind.PULL, wire.pull_header(asked), wire.keys_payload(asked), deadline_s=soon())
        assert receive_answer(stream, Kind.WEIGHTS, deadline_s=soon()).payload_bytes == 2 + 4 * 10 * 1024
        assert not slot.any()

    def test_keys_in_the_slot_are_where_their_rows_come(self, shard, dial) -> None:
        keys = keys_of(1, 2, 3)
        shard.plane.tables.by_name["user"].push(keys[1:], np.ones((2, 3), np.float32), clock=1)
        shard.plane.row_bytes = 24
        stream, slot = with_slot(dial)
        asked = pull_of()._replace(keys={"user": keys})
        slot[12_000:] = keys.view(np.uint8)
        header = wire.pull_header(asked)
        header.keys_in_slot = True
        stream.send(Kind.PULL, header, deadline_s=soon())
        head = receive_answer(stream, Kind.WEIGHTS, deadline_s=soon())
        assert head.payload_bytes == 1 + 2 * 12, "one byte more than the slot has"
        rows = memoryview(bytearray(head.payload_bytes))
        stream.receive_into([rows], deadline_s=soon())
        reply = head.header
        assert wire.rows_from(reply, rows, asked)["user"].present.tolist() == [False, True, True]
        [run] = shard.plane.pulls
        slot[12_000:] = 0
        assert run.keys["user"].tolist() == keys.tolist(), "a copy of its own"

    def test_more_keys_in_the_slot_than_a_message_has_are_refused(self, shard, dial, monkeypatch) -> None:
        monkeypatch.setattr(stream_services, "MESSAGE_BYTES_MAX", 80)
        shard.plane.row_bytes = 200
        stream, _ = with_slot(dial)
        header = tensor_pb2.PullHeader(target=wire.target_message(TARGET), keys_in_slot=True)
        header.keys.add(table="user", rows=11)
        error = error_of(ask(stream, Kind.PULL, header))
        assert isinstance(error, LimitExceeded)
        assert "a pull with 88 bytes of keys; allowed are 80" in error.message

    @pytest.mark.parametrize(("rows", "payload", "beside"), [(3, b"", 0), (1, b"12345678", 8)])
    def test_keys_that_the_slot_cannot_have_are_refused(self, shard, dial, rows, payload, beside) -> None:
        shard.plane.row_bytes = 16
        stream, _ = with_slot(dial)
        header = tensor_pb2.PullHeader(target=wire.target_message(TARGET), keys_in_slot=True)
        header.keys.add(table="user", rows=rows)
        error = error_of(ask(stream, Kind.PULL, header, (memoryview(payload),)))
        assert isinstance(error, MalformedFrame)
        assert f"keys of {8 * rows} bytes in a slot that has 16 for them, {beside} beside it" in error.message
        assert is_closed(stream)

    def test_a_push_that_is_longer_than_the_slot_is_refused(self, shard, stream) -> None:
        header = tensor_pb2.PushHeader(total_bytes=12_004)
        error = error_of(ask(stream, Kind.PUSH, header))
        assert isinstance(error, LimitExceeded)
        assert "a push of 12004 bytes" in error.message
        assert is_closed(stream)
        assert shard.plane.version == 0

    def test_a_payload_beside_the_slot_is_refused(self, shard, stream) -> None:
        error = error_of(
            ask(stream, Kind.PUSH, wire.push_header(push_of(np.ones(8, np.float32))), (memoryview(b"12345678"),))
        )
        assert isinstance(error, MalformedFrame)
        assert "no payload, found 8 bytes" in error.message
        assert is_closed(stream)

    @pytest.mark.parametrize("kind", [Kind.HELLO, Kind.WELCOME, Kind.ACK, Kind.WEIGHTS, Kind.REFUSAL])
    def test_what_is_no_request_is_refused(self, stream, kind) -> None:
        error = error_of(ask(stream, kind, stream_pb2.Refusal()))
        assert f"requests are PUSH and PULL, found {kind.name}" in error.message
        assert is_closed(stream)

    def test_what_breaks_in_the_shard_ends_this_connection_only(self, shard, stream, dial) -> None:
        def break_down(request: object) -> None:
            raise ZeroDivisionError

        shard.plane.before = break_down
        assert isinstance(error_of(ask(stream, Kind.PUSH, HEADER)), PeerFailed)
        assert is_closed(stream)
        assert shard.slots.ended.acquire(timeout=DEADLINE_S)
        _, descriptors = greet(dial(), GREETING, deadline_s=soon(), descriptors_max=2)
        for descriptor in descriptors:
            os.close(descriptor)


class TestSlots:
    """Memory for connections has a bound in bytes (P19)."""

    def test_slots_are_counted_while_they_are_there(self) -> None:
        budget = PushMemory(100)
        slots = Slots(budget)
        with slots.take(60, "a"), slots.take(40, "a"):
            assert slots.held_bytes == budget.held_bytes == 100
        assert (slots.held_bytes, budget.held_bytes, budget.held_bytes_max) == (0, 0, 100)

    def test_one_more_than_there_is_room_for_is_refused_and_reserves_nothing(self) -> None:
        slots = Slots(PushMemory(100))
        with slots.take(60, "a"):
            with pytest.raises(QueueFull), slots.take(41, "a"):
                pass
            with slots.take(40, "a"):
                pass

    def test_slots_leave_room_for_a_push_that_comes_another_way(self) -> None:
        budget = PushMemory(100)
        slots = Slots(budget, left_bytes=40)
        with slots.take(60, "a"):
            with pytest.raises(QueueFull, match="hold 60 bytes; another 1 would pass 60"), slots.take(1, "b"):
                pass
            budget.take(40)
        budget.take(10)
        with pytest.raises(QueueFull, match="hold 50 bytes; another 60 would pass 100"), slots.take(60, "a"):
            pass
        assert (slots.held_bytes, budget.held_bytes) == (0, 50)

    def test_a_second_slot_leaves_room_for_the_first_of_the_workers_to_come(self) -> None:
        slots = Slots(PushMemory(100), workers=2)
        with slots.take(40, "a"):
            with pytest.raises(QueueFull, match="hold 40 bytes; another 40 would pass 60"), slots.take(40, "a"):
                pass
            with slots.take(40, "b"), pytest.raises(QueueFull), slots.take(40, "c"):
                pass  # one more than the job has, and nothing left
        with slots.take(25, "a"), slots.take(25, "a"), slots.take(25, "b"), slots.take(25, "b"):
            pass

    def test_a_slot_beyond_a_workers_share_leaves_room_for_the_shares_of_others(self) -> None:
        slots = Slots(PushMemory(100), left_bytes=20, workers=2)  # room for four slots of 20
        with slots.take(20, "a"), slots.take(20, "a"):
            with pytest.raises(QueueFull, match="hold 40 bytes; another 20 would pass 40"), slots.take(20, "a"):
                pass
            with slots.take(20, "b"), slots.take(20, "b"), pytest.raises(QueueFull), slots.take(20, "b"):
                pass
        slots = Slots(PushMemory(120), left_bytes=20, workers=2)  # and one that is nobody's
        with slots.take(20, "a"), slots.take(20, "a"), slots.take(20, "a"), slots.take(20, "b"), slots.take(20, "b"):
            pass

    def test_a_shard_without_elements_has_slots_too(self) -> None:
        with Slots(PushMemory(0)).take(0, "a") as (descriptor, slot):
            memory.check(descriptor, 0, "a slot")
            assert slot.nbytes == 1, "nothing cannot be mapped"

    def test_room_comes_back_where_the_system_gives_no_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(name: str, flags: int) -> int:
            raise OSError(24, "too many open files")

        slots = Slots(PushMemory(100))
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse)
            with pytest.raises(QueueFull, match="too many open files"), slots.take(60, "a"):
                pass
        assert slots.held_bytes == 0

    def test_room_comes_back_where_a_slot_cannot_be_mapped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(descriptor: int, *, writable: bool) -> Bytes:
            raise OSError(12, "cannot allocate memory")

        slots, before = Slots(PushMemory(100)), len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(memory, "mapped", refuse)
            with pytest.raises(QueueFull, match="cannot allocate memory"), slots.take(60, "a"):
                pass
        assert slots.held_bytes == 0
        assert len(os.listdir("/proc/self/fd")) <= before, "an earlier test's may have gone meanwhile"

    def test_a_slot_may_be_page_locked_as_long_as_it_is_mapped(self) -> None:
        locked: list[int] = []

        def lock_pages(slot: Bytes) -> None:
            locked.append(slot.nbytes)
            weakref.finalize(slot, locked.clear)

        slots = Slots(PushMemory(100), lock_pages=lock_pages)
        with slots.take(60, "a") as (_, slot):
            view = slot[:8]
            assert locked == [60]
        del slot
        assert locked == [60]
        del view
        assert locked == []

    def test_the_length_of_a_slot_is_sealed(self) -> None:
        with Slots(PushMemory(100)).take(60, "a") as (descriptor, _):
            for length in (10, 100):
                with pytest.raises(PermissionError):
                    os.ftruncate(descriptor, length)
