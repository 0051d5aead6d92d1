"""PushMemory: one budget, whichever transport a push comes by (P19)."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import QueueFull, RetryLater
from parashard.job.layers import parse_set
from parashard.job.load import load_job
from parashard.job.sections import QUEUE_BYTES_LEAST, QUEUE_GRAIN_BYTES, ClusterOptions
from parashard_server.push_memory import PushMemory, Slots

MIB = 1 << 20
BUDGET_BYTES = 8 * QUEUE_GRAIN_BYTES


def test_what_one_holds_another_has_not() -> None:
    memory = PushMemory(100)
    memory.take(60)
    with pytest.raises(RetryLater, match="hold 60 bytes; another 41 would pass 100"):
        memory.take(41)
    assert (memory.held_bytes, memory.refused) == (60, 1)
    memory.give_back(60)
    memory.take(41)
    assert (memory.held_bytes, memory.held_bytes_max) == (41, 60)


def test_giving_back_more_than_was_taken_is_a_bug() -> None:
    memory = PushMemory(100)
    memory.take(1)
    with pytest.raises(AssertionError):
        memory.give_back(2)


def test_what_is_lent_comes_back_after_an_error() -> None:
    memory = PushMemory(100)
    with pytest.raises(ZeroDivisionError), memory.lent(60):
        raise ZeroDivisionError
    assert memory.held_bytes == 0


def test_buffers_that_are_kept_go_when_another_needs_the_memory() -> None:
    memory = PushMemory(BUDGET_BYTES)
    with memory.buffer(4 * QUEUE_GRAIN_BYTES), memory.buffer(2 * QUEUE_GRAIN_BYTES):
        pass
    assert (memory.held_bytes, memory.kept_bytes) == (0, 6 * QUEUE_GRAIN_BYTES)
    memory.take(4 * QUEUE_GRAIN_BYTES)
    assert memory.kept_bytes == 4 * QUEUE_GRAIN_BYTES, "the one used longest ago went"
    memory.take(4 * QUEUE_GRAIN_BYTES)
    assert memory.kept_bytes == 0


def test_a_kept_buffer_that_is_too_large_for_what_is_left_is_not_in_the_way() -> None:
    memory = PushMemory(BUDGET_BYTES)
    with memory.buffer(4 * QUEUE_GRAIN_BYTES):
        pass
    memory.take(4 * QUEUE_GRAIN_BYTES)
    memory.take(2 * QUEUE_GRAIN_BYTES)
    with memory.buffer(2 * QUEUE_GRAIN_BYTES):
        assert memory.held_bytes == BUDGET_BYTES


STEPS = st.tuples(st.sampled_from(["buffer", "slot", "lent", "end"]), st.integers(0, BUDGET_BYTES // 2))


@given(st.lists(STEPS, max_size=40))
def test_all_together_never_hold_more_than_the_budget(actions: list[tuple[str, int]]) -> None:  # P19
    memory = PushMemory(BUDGET_BYTES)
    slots = Slots(memory)
    begun = []
    for what, size in actions:
        try:
            if what == "buffer":
                begun.append(memory.buffer(size))
                begun[-1].__enter__()
            elif what == "slot":
                begun.append(slots.take(size, "w"))
                begun[-1].__enter__()
            elif what == "lent":
                begun.append(memory.lent(size))
                begun[-1].__enter__()
            elif begun:
                begun.pop(0).__exit__(None, None, None)
        except QueueFull:
            begun.pop()
        assert memory.held_bytes <= BUDGET_BYTES
        assert slots.held_bytes <= memory.held_bytes
        assert memory.held_bytes + memory.kept_bytes <= BUDGET_BYTES
    for context in begun:
        context.__exit__(None, None, None)
    assert (memory.held_bytes, slots.held_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("said", "push_bytes", "expected"),
    [
        ({"queue_bytes": 7}, 5, 7),
        ({"workers": 2}, 5, QUEUE_BYTES_LEAST),
        ({"workers": 2}, 1 << 30, 3 << 30),
        ({"workers": 0}, 1 << 30, 2 << 30),
        ({"workers": 20}, 1 << 30, 21 << 30),  # all of them on the shard's host, each with a slot
        ({"workers": 1000, "launcher": "external"}, 1 << 30, 9 << 30),  # most of them on other hosts
        ({"workers": 1000, "transport": "tcp"}, 1 << 30, 9 << 30),
        ({"workers": 20, "launcher": "external", "transport": "shm"}, 1 << 30, 21 << 30),
    ],
)
def test_a_job_that_says_nothing_has_memory_for_its_pushes(
    said: dict[str, int], push_bytes: int, expected: int
) -> None:
    assert ClusterOptions(**said).push_memory_bytes(push_bytes, 0) == expected


@pytest.mark.parametrize(
    ("policy", "said", "expected"),
    [
        ("async", ("workers=1", "pipeline_depth=1"), 3 << 30),  # a pull beside each push
        ("ssp:3", ("workers=2", "pipeline_depth=2"), 7 << 30),
        ("async", ("workers=2", "pipeline_depth=1", 'transport="tcp"'), 3 << 30),  # where a pull holds none of it
        ("auto", ("workers=2",), 5 << 30),  # whose workers have one step beside the present one
        ("sync:2", ("workers=2",), 3 << 30),
        ("async", ("workers=9", "pipeline_depth=1", "launcher=ssh:hosts"), 17 << 30),  # some of them on its host
    ],
)
def test_steps_that_overlap_have_memory_for_a_pull_beside_each_push(
    policy: str, said: tuple[str, ...], expected: int
) -> None:
    settings = [f"consistency.policy={policy}", *(f"cluster.{one}" for one in said)]
    job = load_job("examples/digits.toml", [parse_set(setting) for setting in settings], {}).job
    assert job.cluster.push_memory_bytes(1 << 30, job.depth_max) == expected


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_buffer_is_as_long_as_asked_for_writable_and_aligned():
    with PushMemory(MIB).buffer(1001) as view:
        assert view.nbytes == 1001
        assert address_of(view) % mmap.PAGESIZE == 0
        view[:] = bytes(1001)


def test_a_push_without_content_has_room_too():
    with PushMemory(MIB).buffer(0) as view:
        assert view.nbytes == 0


def test_a_buffer_is_used_again():
    memory = PushMemory(8 * MIB)
    with memory.buffer(MIB) as first:
        before = address_of(first)
        first[0] = 42
    with memory.buffer(MIB - 5) as second:
        assert (address_of(second), second[0]) == (before, 42)


def test_the_room_used_last_is_used_first():
    memory = PushMemory(8 * MIB)
    with memory.buffer(MIB) as view, memory.buffer(MIB):  # the second comes back before the first
        last = address_of(view)
    with memory.buffer(MIB) as view:
        assert address_of(view) == last


def test_a_small_push_does_not_waste_a_large_room():
    memory = PushMemory(8 * MIB)
    with memory.buffer(4 * MIB):
        pass
    with memory.buffer(MIB):
        assert memory.held_bytes == MIB


def test_pushes_beyond_the_budget_are_turned_away_and_reserve_nothing():  # P19
    memory = PushMemory(3 * MIB)
    with memory.buffer(2 * MIB):
        refused = pytest.raises(QueueFull, match=r"hold 2097152 bytes; another 2097152 would pass 3145728")
        with refused, memory.buffer(2 * MIB):
            pass
        with memory.buffer(MIB):
            assert memory.held_bytes == 3 * MIB
    assert (memory.held_bytes, memory.held_bytes_max) == (0, 3 * MIB)


def test_a_push_alone_is_admitted_however_large():  # P19
    memory = PushMemory(MIB)
    with memory.buffer(5 * MIB) as view:
        assert view.nbytes == 5 * MIB
        with pytest.raises(QueueFull), memory.buffer(1):
            pass
    assert memory.kept_bytes == 0  # it would hold more than the budget


def test_a_machine_without_memory_is_a_full_queue():
    memory = PushMemory(1 << 62)
    refused = pytest.raises(QueueFull, match="no memory for a push of 4611686018427387904 bytes")
    with refused, memory.buffer(1 << 62):
        pass
    assert memory.held_bytes == 0, "it is given back"


def test_a_buffer_comes_back_after_an_error():
    memory = PushMemory(MIB)
    with pytest.raises(ZeroDivisionError), memory.buffer(MIB):
        raise ZeroDivisionError
    assert memory.held_bytes == 0


@given(st.lists(st.one_of(st.integers(0, 5 * MIB), st.just("leave")), max_size=30))
def test_the_budget_holds_whatever_comes_and_goes(actions):  # P19
    memory, budget = PushMemory(4 * MIB), 4 * MIB
    lent: list[tuple[Callable[..., None], int]] = []
    for action in actions:
        if action == "leave":
            if lent:
                lent.pop(0)[0](None, None, None)
            assert memory.held_bytes + memory.kept_bytes <= max(budget, memory.held_bytes)
            continue
        lease = memory.buffer(action)
        try:
            assert lease.__enter__().nbytes == action
        except QueueFull:
            assert lent
            continue
        lent.append((lease.__exit__, action))
        assert len(lent) == 1 or memory.held_bytes <= budget
        assert sum(size for _, size in lent) <= memory.held_bytes <= 2 * sum(s + QUEUE_GRAIN_BYTES for _, s in lent)
        assert memory.held_bytes + memory.kept_bytes <= max(budget, memory.held_bytes)
