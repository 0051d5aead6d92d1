"""The shared-memory transport against the real service: one copy each way, and slots with one request at a time."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from parashard.errors import LimitExceeded, MalformedFrame, NonFiniteGradient, QueueFull, StaleRound, Unreachable
from parashard.protocol.messages import Buffers, PullRun, Push, PushResult, Weights
from parashard.transports.shared_weights import can_share
from support.fake_plane import TARGET
from support.shared_shard import (
    DEADLINE_S,
    ELEMENTS,
    GRADIENT,
    OFFSETS,
    SharedShard,
    mapped_bytes,
    mappings,
    pull,
    pull_of,
    push,
    push_of,
)
from support.stream_peer import deadlines_passed

pytestmark = pytest.mark.skipif(not can_share(), reason="this machine cannot share weights")


class TestPushAndPull:
    """What is pushed moves the weights; what is pulled is the weights."""

    def test_a_push_arrives_as_it_is_and_a_pull_brings_what_became_of_it(self, shard, transport) -> None:
        assert push(transport, GRADIENT) is PushResult.APPLIED
        into = np.empty(ELEMENTS, np.float32)
        assert pull(transport, into) == 1
        assert np.array_equal(into, GRADIENT)

    def test_nothing_is_read_beyond_the_weights(self, shard, transport) -> None:
        beyond = pull_of(ELEMENTS - 1, ELEMENTS + 1)
        shard.plane.pull = lambda run, timeout_s, read: read(Weights(0, ()))  # the shard would allow it
        with pytest.raises(MalformedFrame, match="bytes up to 12004 from a shard of 3000 elements") as caught:
            pull(transport, np.empty(2, np.float32), beyond)
        assert caught.value.peer == shard.socket.path

    def test_pieces_are_gathered_and_scattered(self, shard, transport) -> None:
        whole, pieces = push_of(GRADIENT), Buffers([GRADIENT[:10], GRADIENT[10:10], GRADIENT[10:]])
        transport.push(whole._replace(payload=pieces), DEADLINE_S).result()
        into = np.empty(ELEMENTS, np.float32)
        assert transport.pull(pull_of(), Buffers([into[:999], into[999:]]), DEADLINE_S).result().version == 1
        assert np.array_equal(into, GRADIENT)

    def test_the_shard_uses_a_push_in_the_slot(self, shard, transport) -> None:
        slots = []

        def look(request: Push) -> None:
            address = np.frombuffer(request.payload.whole(), np.uint8).ctypes.data
            slots.append(any(begin <= address < end for begin, end in mappings("parashard-slot")))

        shard.plane.before = look
        push(transport, GRADIENT)
        assert slots == [True]

    def test_a_push_without_a_gradient_and_a_pull_of_nothing_are_requests_too(self, shard, transport) -> None:
        assert push(transport, GRADIENT[:0]) is PushResult.APPLIED
        assert pull(transport, np.empty(0, np.float32), pull_of(5, 5)) == 1
        assert [run.length_bytes for run in shard.plane.pulls] == [0]

    @pytest.mark.parametrize(("begin", "end"), [(0, 1), (5, 7), (6, 1000), (999, 3000)])
    def test_a_run_of_the_weights_can_be_pulled(self, shard, transport, begin: int, end: int) -> None:
        shard.plane.move(GRADIENT)
        into = np.empty(end - begin, np.float32)
        pull(transport, into, pull_of(begin, end))
        assert np.array_equal(into, GRADIENT[begin:end])

    def test_only_what_has_moved_is_written(self, shard, transport) -> None:
        shard.plane.move(GRADIENT)
        shard.plane.move(2 * GRADIENT, 2)
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
        shard.plane.move(2 * GRADIENT, 2)
        shard.plane.memory.begun[2] = 3
        into = np.full(ELEMENTS, -1, np.float32)
        assert pull(transport, into, pull_of(known=1)) == 2
        assert (into[OFFSETS[3] :] == -1).all()
        assert np.array_equal(into[OFFSETS[2] : OFFSETS[3]], 2 * GRADIENT[OFFSETS[2] : OFFSETS[3]])

    def test_a_copy_that_lacks_bytes_is_malformed(self, shard, transport) -> None:
        shard.plane.move(GRADIENT)
        shard.plane.memory.begun[2] = 2
        shard.plane.answered = lambda weights: weights._replace(runs=())
        rest = 4 * (ELEMENTS - OFFSETS[2])
        with pytest.raises(MalformedFrame, match=f"asked for {rest} bytes, answered with 0"):
            pull(transport, np.empty(ELEMENTS, np.float32))

    def test_weights_of_a_round_that_ends_meanwhile_are_refused(self, shard, transport) -> None:  # P11
        shard.plane.after_read = lambda run: shard.plane.move(GRADIENT)
        with pytest.raises(StaleRound) as caught:
            pull(transport, np.empty(ELEMENTS, np.float32), pull_of(round_=0))
        assert caught.value.peer == shard.socket.path
        shard.plane.after_read = lambda run: None
        assert pull(transport, np.empty(ELEMENTS, np.float32), pull_of(round_=1)) == 1
        assert len(shard.plane.greeted) == 1, "on the same connection"


class TestSlots:
    """A slot belongs to one request at a time, and is not written while the shard may read it."""

    def test_a_connection_serves_one_request_after_another(self, shard, transport) -> None:
        for step in range(5):
            push(transport, GRADIENT, step)
            pull(transport, np.empty(ELEMENTS, np.float32))
        assert shard.plane.greeted == [TARGET]

    def test_after_a_refusal_the_slot_is_used_again(self, shard, transport) -> None:
        def refuse(request: Push) -> None:
            raise NonFiniteGradient("NaN in it")

        shard.plane.before = refuse
        with pytest.raises(NonFiniteGradient, match="NaN in it") as caught:
            push(transport, GRADIENT)
        assert caught.value.peer == shard.socket.path
        shard.plane.before = lambda request: None
        push(transport, GRADIENT)
        assert len(shard.plane.greeted) == 1

    @pytest.mark.parametrize("end", ["deadline", "cancel"])
    def test_a_slot_whose_push_was_given_up_is_never_written_again(self, shard, transport, end: str) -> None:
        begun, let_go, found = threading.Event(), threading.Event(), []

        def read_late(request: Push) -> None:
            if not begun.is_set():
                begun.set()
                let_go.wait(DEADLINE_S)
            found.append(np.frombuffer(request.payload.whole(), np.float32).copy())

        shard.plane.before = read_late
        try:
            pending = transport.push(push_of(GRADIENT), DEADLINE_S)
            assert begun.wait(DEADLINE_S)
            if end == "cancel":
                pending.cancel()
            with deadlines_passed() if end == "deadline" else nullcontext(), pytest.raises(Unreachable):
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
        assert (shard.slots.held_bytes, shard.memory.held_bytes_max) == (0, 4 * ELEMENTS)
        assert mapped_bytes("parashard-slot") <= before, "an earlier test's may have gone meanwhile"

    def test_no_descriptor_stays_behind(self, shard) -> None:
        def open_descriptors() -> int:
            return len(os.listdir("/proc/self/fd"))

        before = open_descriptors()
        transport = shard.connect()
        pull(transport, np.empty(ELEMENTS, np.float32))
        transport.close()
        assert shard.slots.ended.acquire(timeout=DEADLINE_S)
        shard.stop()
        assert open_descriptors() < before, "and the listening socket is gone; an earlier test's may be, too"

    def test_a_transport_without_room_for_another_slot_waits_for_its_own(self, root: Path) -> None:
        shard = SharedShard(root, slots_bytes=4 * ELEMENTS)
        transport = shard.connect()
        begun, let_go = threading.Event(), threading.Event()

        def hold_first(request: Push) -> None:
            if not begun.is_set():
                begun.set()
                let_go.wait(DEADLINE_S)

        shard.plane.before = hold_first
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
