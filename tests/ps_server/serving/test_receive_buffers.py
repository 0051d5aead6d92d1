"""ReceiveBuffers: memory for pushes, used again, within a budget."""

import mmap
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import QueueFull
from parashard.job.sections import QUEUE_GRAIN_BYTES
from parashard_server.serving.push_memory import PushMemory
from parashard_server.serving.receive_buffers import ReceiveBuffers

MIB = 1 << 20


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_buffer_is_as_long_as_asked_for_writable_and_aligned():
    with ReceiveBuffers(PushMemory(MIB)).take(1001) as view:
        assert view.nbytes == 1001
        assert address_of(view) % mmap.PAGESIZE == 0
        view[:] = bytes(1001)


def test_a_push_without_content_has_room_too():
    with ReceiveBuffers(PushMemory(MIB)).take(0) as view:
        assert view.nbytes == 0


def test_a_buffer_is_used_again():
    buffers = ReceiveBuffers(PushMemory(8 * MIB))
    with buffers.take(MIB) as first:
        before = address_of(first)
        first[0] = 42
    with buffers.take(MIB - 5) as second:
        assert (address_of(second), second[0]) == (before, 42)


def test_the_room_used_last_is_used_first():
    buffers = ReceiveBuffers(PushMemory(8 * MIB))
    with buffers.take(MIB) as view, buffers.take(MIB):  # the second comes back before the first
        last = address_of(view)
    with buffers.take(MIB) as view:
        assert address_of(view) == last


def test_a_small_push_does_not_waste_a_large_room():
    buffers = ReceiveBuffers(PushMemory(8 * MIB))
    with buffers.take(4 * MIB):
        pass
    with buffers.take(MIB):
        assert buffers.held_bytes == MIB


def test_pushes_beyond_the_budget_are_turned_away_and_reserve_nothing():  # P19
    memory = PushMemory(3 * MIB)
    buffers = ReceiveBuffers(memory)
    with buffers.take(2 * MIB):
        with pytest.raises(QueueFull, match=r"hold 2097152 bytes; another 2097152 would pass 3145728"):
            buffers.take(2 * MIB)
        with buffers.take(MIB):
            assert buffers.held_bytes == 3 * MIB
    assert (buffers.held_bytes, memory.held_bytes_max) == (0, 3 * MIB)


def test_a_push_alone_is_admitted_however_large():  # P19
    buffers = ReceiveBuffers(PushMemory(MIB))
    with buffers.take(5 * MIB) as view:
        assert view.nbytes == 5 * MIB
        with pytest.raises(QueueFull):
            buffers.take(1)
    assert buffers.kept_bytes == 0  # it would hold more than the budget


def test_a_machine_without_memory_is_a_full_queue():
    memory = PushMemory(1 << 62)
    buffers = ReceiveBuffers(memory)
    with pytest.raises(QueueFull, match="no memory for a push of 4611686018427387904 bytes"):
        buffers.take(1 << 62)
    assert (buffers.held_bytes, memory.held_bytes) == (0, 0), "it is given back"


def test_a_buffer_comes_back_after_an_error():
    buffers = ReceiveBuffers(PushMemory(MIB))
    with pytest.raises(ZeroDivisionError), buffers.take(MIB):
        raise ZeroDivisionError
    assert buffers.held_bytes == 0


@given(st.lists(st.one_of(st.integers(0, 5 * MIB), st.just("leave")), max_size=30))
def test_the_budget_holds_whatever_comes_and_goes(actions):  # P19
    buffers, budget = ReceiveBuffers(PushMemory(4 * MIB)), 4 * MIB
    lent: list[tuple[Callable[..., None], int]] = []
    for action in actions:
        if action == "leave":
            if lent:
                lent.pop(0)[0](None, None, None)
            assert buffers.held_bytes + buffers.kept_bytes <= max(budget, buffers.held_bytes)
            continue
        try:
            lease = buffers.take(action)
        except QueueFull:
            assert lent
            continue
        with_size = lease.__enter__().nbytes
        assert with_size == action
        lent.append((lease.__exit__, action))
        assert len(lent) == 1 or buffers.held_bytes <= budget
        assert sum(size for _, size in lent) <= buffers.held_bytes <= 2 * sum(s + QUEUE_GRAIN_BYTES for _, s in lent)
        assert buffers.held_bytes + buffers.kept_bytes <= max(budget, buffers.held_bytes)
