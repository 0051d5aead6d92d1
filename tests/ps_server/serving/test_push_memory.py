"""PushMemory: one budget, whichever transport a push comes by (P19)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import QueueFull, RetryLater
from parashard.job.sections import QUEUE_BYTES_LEAST, QUEUE_GRAIN_BYTES, ClusterOptions
from parashard_server.serving.push_memory import PushMemory
from parashard_server.serving.receive_buffers import ReceiveBuffers
from parashard_server.serving.shm_service import Slots

BUDGET_BYTES = 8 * QUEUE_GRAIN_BYTES


def test_what_one_holds_another_has_not() -> None:
    memory = PushMemory(100)
    memory.take(60)
    with pytest.raises(RetryLater, match="hold 60 bytes; another 41 would pass 100"):
        memory.take(41)
    assert (memory.held_bytes, memory.free_bytes, memory.refused) == (60, 40, 1)
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
    buffers = ReceiveBuffers(memory)
    with buffers.take(4 * QUEUE_GRAIN_BYTES), buffers.take(2 * QUEUE_GRAIN_BYTES):
        pass
    assert (memory.held_bytes, buffers.kept_bytes) == (0, 6 * QUEUE_GRAIN_BYTES)
    memory.take(4 * QUEUE_GRAIN_BYTES)
    assert buffers.kept_bytes == 4 * QUEUE_GRAIN_BYTES, "the one used longest ago went"
    memory.take(4 * QUEUE_GRAIN_BYTES)
    assert buffers.kept_bytes == 0


def test_a_kept_buffer_that_is_too_large_for_what_is_left_is_not_in_the_way() -> None:
    memory = PushMemory(BUDGET_BYTES)
    buffers = ReceiveBuffers(memory)
    with buffers.take(4 * QUEUE_GRAIN_BYTES):
        pass
    memory.take(4 * QUEUE_GRAIN_BYTES)
    memory.take(2 * QUEUE_GRAIN_BYTES)
    with buffers.take(2 * QUEUE_GRAIN_BYTES):
        assert memory.held_bytes == BUDGET_BYTES


STEPS = st.tuples(st.sampled_from(["buffer", "slot", "payload", "lent", "end"]), st.integers(0, BUDGET_BYTES // 2))


@given(st.lists(STEPS, max_size=40))
def test_all_together_never_hold_more_than_the_budget(actions: list[tuple[str, int]]) -> None:  # P19
    memory = PushMemory(BUDGET_BYTES)
    buffers, slots = ReceiveBuffers(memory), Slots(memory)
    begun = []
    for what, size in actions:
        try:
            if what == "buffer":
                begun.append(buffers.take(size))
            elif what == "payload":
                begun.append(buffers.lent(memoryview(bytes(size))))
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
            if what in ("slot", "payload", "lent"):
                begun.pop()
        assert memory.held_bytes <= BUDGET_BYTES
        assert buffers.held_bytes + slots.held_bytes <= memory.held_bytes
        assert memory.held_bytes + buffers.kept_bytes <= BUDGET_BYTES
    for context in begun:
        context.__exit__(None, None, None)
    assert (memory.held_bytes, buffers.held_bytes, slots.held_bytes) == (0, 0, 0)


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
    assert ClusterOptions(**said).push_memory_bytes(push_bytes) == expected
