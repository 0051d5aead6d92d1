"""ShardLifecycle with a push log: a killed shard has every push that it acknowledged, each once (P18)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.errors import ConfigurationError, StaleIncarnation
from parashard.plan.intervals import IntervalSet
from parashard.plan.variables import Variable
from parashard.protocol.messages import PushResult
from parashard.store import open_store
from parashard.store.base import Store
from support.in_process import plan_of, push, shard_of, variables_of
from support.shard_process import ADAM, ShardProcess, bits_of, gradient_of
from support.store_fakes import MemoryStore

Start = Callable[..., ShardProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts the shard's next process; an earlier one ends as by SIGKILL, saving nothing."""
    started: list[ShardProcess] = []

    def begin(
        consistency: str = "async",
        store: Store | None = None,
        optimizer: dict[str, Any] = ADAM,
        **checkpoint: Any,
    ) -> ShardProcess:
        options = {"every_s": 3600.0, "durability": "log", "log_fsync": False, **checkpoint}
        store = store or open_store(str(tmp_path))
        started.append(ShardProcess(store, optimizer=optimizer, consistency=consistency, checkpoint=options))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def undisturbed(consistency: str, *steps: int) -> ShardProcess:
    shard = ShardProcess(MemoryStore(), optimizer=ADAM, consistency=consistency, checkpoint={"every_s": 0.0})
    shard.push(*steps)
    return shard


@pytest.mark.parametrize("consistency", ["async", "ssp:8"])
def test_a_killed_shard_has_every_push_that_it_acknowledged(start: Start, consistency: str) -> None:
    start(consistency).push(0, 1, 5, 2)
    second = start(consistency)
    assert bits_of(second.shard) == bits_of(undisturbed(consistency, 0, 1, 5, 2).shard)
    assert second.host.restored == "initial values; replayed 4 steps of the log"
    assert push(second.shard, 5, 1.0).result is PushResult.DUPLICATE, "P1"


def test_in_rounds_it_has_those_that_wait_for_their_round_too(start: Start) -> None:
    start("sync:4").push(0, 1, 2, 3, 4, 6)
    second = start("sync:4")
    assert list(second.shard.updates.held.intervals()) == [(0, 5), (6, 7)]
    other = undisturbed("sync:4", 0, 1, 2, 3, 4, 6)
    for shard in (second, other):
        shard.push(5, 7)
        shard.reach(2)
    assert bits_of(second.shard) == bits_of(other.shard)


@pytest.mark.parametrize("consistency", ["async", "sync:2"])
def test_what_the_checkpoint_has_is_skipped(start: Start, consistency: str) -> None:
    first = start(consistency)
    first.push(0, 1)
    first.checkpointer.take(1 if consistency == "sync:2" else None)
    first.push(2)
    second = start(consistency)
    assert bits_of(second.shard) == bits_of(undisturbed(consistency, 0, 1, 2).shard)
    assert second.host.restored == "restored p5/s0/i1/c1 with 2 steps; replayed 1 step of the log"


def test_in_rounds_a_push_that_waited_at_the_cut_is_replayed_though_it_was_logged_before(start: Start) -> None:
    first = start("sync:2", every_steps=2)
    first.push(0, 1)
    first.push(3)  # reaches round 1, where the state is cut, and is logged before the cut is known to be stored
    first.push(2)
    first.checkpointer.save_pending()
    second = start("sync:2")
    assert list(second.shard.updates.held.intervals()) == [(0, 4)]


def test_in_rounds_a_replayed_push_that_still_waits_at_a_later_cut_is_replayed_again(start: Start) -> None:
    start("sync:2").push(0, 1, 2)
    second = start("sync:2")
    second.checkpointer.take(1)  # step 2 waits for its round: it is in the log, and not in this checkpoint
    assert list(start("sync:2").shard.updates.held.intervals()) == [(0, 3)]


@pytest.mark.parametrize(("consistency", "steps"), [("async", [0, 5]), ("sync:2", [0, 1, 2])])
def test_a_record_of_a_step_that_is_in_already_changes_nothing(
    start: Start, consistency: str, steps: list[int]
) -> None:  # P1, P18: replay is a push
    shard = start(consistency).shard
    for step in steps:
        push(shard, step, 1.0)
    before, buffered = bits_of(shard), shard.updates.buffered_steps
    for step in steps:
        assert not shard.replay(90 + step, step, gradient_of(shard, step), None, skipped=False)
    assert (bits_of(shard), shard.updates.buffered_steps) == (before, buffered)


@pytest.mark.parametrize("consistency", ["async", "sync:4"])
def test_a_replay_takes_no_memory_for_each_record(consistency: str) -> None:
    plan = plan_of(variables_of(Variable("w", (1 << 18,))))
    shard = shard_of(plan, round_steps=4 if consistency == "sync:4" else None)
    gradient = np.ones(shard.storage.elements, np.float32)
    assert shard.replay(0, 0, None, None, skipped=True)  # what an empty push needs is kept for the next one
    tracemalloc.start()
    try:
        assert shard.replay(1, 1, gradient, None, skipped=False)
        assert shard.replay(2, 2, None, None, skipped=True)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < gradient.nbytes // 4
    shard.updates.reach(None if consistency == "async" else 0)
    assert shard.updates.held == IntervalSet([(0, 3)])


def test_an_older_checkpoint_and_the_log_give_what_a_damaged_one_had(start: Start) -> None:  # P18
    first = start(keep=2)
    for step in range(4):
        first.push(step)
        first.checkpointer.take()
    manifest = sorted(Path(first.store.url).glob("shards/**/*c00000004/manifest.json"))[-1]
    manifest.write_bytes(manifest.read_bytes()[:-1])
    second = start(keep=2)
    assert bits_of(second.shard) == bits_of(undisturbed("async", 0, 1, 2, 3).shard)


def test_the_log_goes_on_over_any_number_of_incarnations(start: Start) -> None:
    for step in range(4):
        shard = start()
        assert list(shard.shard.updates.applied.intervals()) == ([(0, step)] if step else [])
        shard.push(step)
        if step == 1:
            shard.checkpointer.take()
    assert bits_of(start().shard) == bits_of(undisturbed("async", 0, 1, 2, 3).shard)


def test_after_a_return_the_log_of_what_was_given_up_is_not_replayed(start: Start) -> None:  # P12, P18
    first = start("sync:2", every_steps=2)
    for round_ in range(3):
        first.reach(round_)
        first.checkpointer.save_pending()
        first.push(2 * round_, 2 * round_ + 1)
    first.lifecycle.roll_back(1, incarnation=1)
    for step in (2, 3, 4):  # the same steps with other gradients, as in a job without equal bits
        push(first.shard, step, gradient_of(first.shard, step + 1000))
    second = start("sync:2", every_steps=2)
    assert bits_of(second.shard) == bits_of(first.shard)
    assert second.host.restored == "restored p5/s0/i1/c1 with 2 steps; replayed 3 steps of the log"
    assert second.shard.updates.held == first.shard.updates.held


def test_a_push_that_a_return_has_given_up_is_not_called_durable(start: Start) -> None:
    shard = start("sync:2")
    shard.push(0, 1, 2)
    position = shard.log.position
    shard.lifecycle.roll_back(0, incarnation=1)
    with pytest.raises(StaleIncarnation, match="returned to an earlier round"):
        shard.log.wait_durable(position, 1.0)


def test_a_skipped_step_stays_a_counted_one(start: Start) -> None:  # P6
    first = start()
    push(first.shard, 0, 0.0, skipped=True)
    assert start().shard.record.skipped_steps == 1


def test_damage_is_reported_and_what_follows_is_computed_again(start: Start, tmp_path: Path) -> None:  # P18
    first = start()
    first.push(*range(6))
    first.close()
    (segment,) = tmp_path.glob("log/**/*.log")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(bytes(content))
    second = start()
    kept = len(second.shard.updates.applied)
    assert 0 < kept < 6
    assert list(second.shard.updates.applied.intervals()) == [(0, kept)]
    assert f"replayed {kept} steps of the log, the rest is computed again (damage at " in second.host.restored
    second.push(*range(kept, 6))
    assert bits_of(start().shard) == bits_of(undisturbed("async", *range(6)).shard), "and is logged again"


def test_a_torn_tail_is_the_push_that_was_never_acknowledged(start: Start, tmp_path: Path) -> None:  # P18
    first = start()
    first.push(0, 1, 2)
    first.close()
    (segment,) = tmp_path.glob("log/**/*.log")
    segment.write_bytes(segment.read_bytes()[:-3])
    second = start()
    assert second.host.restored == "initial values; replayed 2 steps of the log"


def test_segments_reach_back_to_the_oldest_checkpoint_kept(start: Start, tmp_path: Path) -> None:  # P18
    shard = start(every_steps=1, keep=2)
    for step in range(6):
        shard.push(step)
        shard.checkpointer.save_pending()
    assert len(list(tmp_path.glob("log/**/*.log"))) <= 3
    assert bits_of(start().shard) == bits_of(undisturbed("async", *range(6)).shard)


def test_a_return_goes_on_in_the_same_log(start: Start) -> None:  # P12, P18
    first = start("sync:2", every_steps=2)
    first.push(0, 1, 2)
    first.checkpointer.save_pending()
    first.lifecycle.roll_back(1, incarnation=1)
    assert list(first.shard.updates.held.intervals()) == [(0, 2)]
    first.push(3)
    second = start("sync:2")
    assert second.shard.identity.incarnation == 3
    held = second.shard.updates.held
    assert 3 in held, "what the new incarnation has acknowledged"
    second.push(*[step for step in (2, 3) if step not in held])
    second.reach(2)
    other = undisturbed("sync:2", 0, 1, 2, 3)
    other.reach(2)
    assert bits_of(second.shard) == bits_of(other.shard)


def test_a_log_needs_a_local_disk(start: Start) -> None:
    with pytest.raises(ConfigurationError, match=r'durability = "log" needs a local disk; the store is memory://test'):
        start(store=MemoryStore())


@pytest.mark.parametrize(("consistency", "steps"), [("async", [0, 3, 1]), ("sync:2", [0, 1, 3])])
def test_a_replayed_push_has_the_learning_rate_that_it_came_with(  # P37
    start: Start, consistency: str, steps: list[int]
) -> None:
    rated = {0: 0.5, 1: 0.5, 2: 0.125, 3: 0.125}

    def pushed(process: ShardProcess, *steps: int) -> ShardProcess:
        for step in steps:
            push(process.shard, step, gradient_of(process.shard, step), learning_rate=rated[step])
        return process

    pushed(start(consistency), *steps)
    second = start(consistency)
    other = pushed(undisturbed(consistency), *steps)
    for process in (second, other):
        pushed(process, 2)
        if consistency == "sync:2":
            process.reach(2)
    assert bits_of(second.shard) == bits_of(other.shard)
    assert bits_of(second.shard) != bits_of(undisturbed(consistency, *steps, 2).shard)
