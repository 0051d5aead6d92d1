"""A step that is given up is the same on every shard: its empty push replaces what is only held of it (P24)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from parashard.errors import NotReady, StaleIncarnation, StaleRound
from parashard.plan.intervals import IntervalSet
from parashard.protocol.messages import PushResult
from parashard.store import Store, open_store
from support.in_process import push_for
from support.shard_process import ADAM, ShardProcess, bits_of, gradient_of
from support.store_fakes import MemoryStore

Start = Callable[..., ShardProcess]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return a function that starts the shard's next process on one store."""

    def begin(consistency: str = "sync:4", *, store: Store | None = None) -> ShardProcess:
        store = store or open_store(str(tmp_path))
        return ShardProcess(store, optimizer=ADAM, consistency=consistency, checkpoint={"every_s": 3600.0})

    return begin


def send(process: ShardProcess, step: int) -> PushResult:
    """Push a step's gradient as a worker does."""
    shard = process.shard
    return process.plane.push(push_for(shard, step, gradient_of(shard, step)), 5.0).result


def give_up(process: ShardProcess, step: int) -> PushResult:
    """Push a step empty, as a worker does that was told to skip it."""
    return process.plane.push(push_for(process.shard, step, [], slices=(), skipped=True), 5.0).result


def without(consistency: str, skipped: int, *steps: int) -> ShardProcess:
    """Return a shard that got these steps in order, and of one of them never a gradient."""
    process = ShardProcess(MemoryStore(), optimizer=ADAM, consistency=consistency, checkpoint={"every_s": 0.0})
    for step in steps:
        give_up(process, step) if step == skipped else send(process, step)
    return process


def same_bits(process: ShardProcess, other: ShardProcess) -> bool:
    """Compare after the first round."""
    for each in (process, other):
        each.reach(1)
    return bits_of(process.shard) == bits_of(other.shard)


def test_an_empty_push_replaces_a_gradient_that_waits_for_its_turn(start: Start) -> None:
    process = start()
    send(process, 2)
    assert give_up(process, 2) is PushResult.BUFFERED
    assert give_up(process, 2) is PushResult.DUPLICATE
    assert send(process, 2) is PushResult.DUPLICATE, "a late gradient changes nothing"
    for step in (0, 1, 3):
        send(process, step)
    assert same_bits(process, without("sync:4", 2, 0, 1, 2, 3))
    assert process.shard.identity.incarnation == 1
    assert process.shard.updates.skipped == IntervalSet([(2, 3)])


def test_a_round_that_has_folded_the_gradient_begins_again_in_another_incarnation(start: Start) -> None:
    process = start()
    send(process, 0)
    send(process, 1)
    send(process, 3)
    with pytest.raises(StaleIncarnation):
        give_up(process, 1)
    assert process.shard.identity.incarnation == 2, "acks of the earlier incarnation count no more (P3)"
    assert process.shard.updates.held == IntervalSet([(1, 2)]), "its empty push alone"
    assert process.host.changed.is_set(), "the new incarnation is announced at once"
    assert give_up(process, 1) is PushResult.DUPLICATE
    for step in (0, 2, 3):
        assert send(process, step) is PushResult.BUFFERED
    assert same_bits(process, without("sync:4", 1, 0, 1, 2, 3))


def test_a_request_that_names_the_earlier_incarnation_begins_no_further_one(start: Start) -> None:
    process = start()
    send(process, 0)
    late = push_for(process.shard, 0, [], slices=(), skipped=True)
    for _ in range(2):
        with pytest.raises(StaleIncarnation):
            process.plane.push(late, 5.0)
    assert process.shard.identity.incarnation == 2


def test_a_store_that_fails_leaves_the_round_as_it_is(start: Start) -> None:
    store = MemoryStore()
    process = start(store=store)
    send(process, 0)
    fault = store.fail("create", "claims/")
    with pytest.raises(NotReady, match="its round cannot begin again now"):
        give_up(process, 0)
    assert fault.fired
    assert (process.shard.identity.incarnation, process.shard.updates.held) == (1, IntervalSet([(0, 1)]))


def test_what_is_in_the_weights_stays_there(start: Start) -> None:
    process = start()
    for step in range(4):
        send(process, step)
    process.reach(1)
    before = bits_of(process.shard)
    with pytest.raises(StaleRound, match="step 1 is in the weights of round 1 with its gradient"):
        give_up(process, 1)
    assert (bits_of(process.shard), len(process.shard.updates.skipped)) == (before, 0)


def test_a_late_empty_push_of_a_step_that_is_skipped_in_the_weights_is_a_duplicate(start: Start) -> None:
    process = without("sync:4", 1, 0, 1, 2, 3)
    process.reach(1)
    assert give_up(process, 1) is PushResult.DUPLICATE


def test_in_async_a_step_that_is_in_stays_in_and_is_no_skip_here(start: Start) -> None:
    process = start("async")
    send(process, 0)
    assert give_up(process, 0) is PushResult.DUPLICATE
    assert give_up(process, 1) is PushResult.APPLIED
    assert process.shard.updates.skipped == IntervalSet([(1, 2)])


@pytest.mark.parametrize("consistency", ["async", "sync:4"])
def test_a_checkpoint_says_which_of_its_steps_were_skipped(start: Start, consistency: str) -> None:
    process = start(consistency)
    for step in range(4):
        give_up(process, step) if step == 1 else send(process, step)
    if consistency == "sync:4":
        give_up(process, 5)  # held for the next round, so not in this checkpoint
    stored = process.checkpointer.take(1 if consistency == "sync:4" else None)
    assert stored.skipped == ((1, 2),)
    assert start(consistency).shard.updates.skipped == IntervalSet([(1, 2)])
