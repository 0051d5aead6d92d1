"""The incarnations of a shard in one process: the first one restores, a return to a round begins another (P3, P12)."""

from __future__ import annotations

from typing import Any

import pytest

from parashard.errors import DamagedCheckpoint, StaleIncarnation, StoreFailed, Superseded
from parashard.protocol.messages import PushResult
from parashard.store.claims import claim_incarnation
from parashard_server.core.shard import Shard
from support.in_process import push
from support.shard_process import ADAM, ShardProcess, bits_of, gradient_of
from support.store_fakes import MemoryStore


def process(store: MemoryStore, *, consistency: str = "sync:2", every_steps: int = 2) -> ShardProcess:
    checkpoint: dict[str, Any] = {"every_s": 0.0, "every_steps": every_steps}
    return ShardProcess(store, optimizer=ADAM, consistency=consistency, checkpoint=checkpoint)


def at_round(shard: ShardProcess, round_: int) -> list[object]:
    """Push up to a round, saving each round's start; return the bits at each start."""
    seen: list[object] = []
    for r in range(round_ + 1):
        shard.reach(r)
        shard.checkpointer.save_pending()
        seen.append(bits_of(shard.shard))
        if r < round_:
            shard.push(2 * r, 2 * r + 1)
    return seen


# --- the first incarnation ---


def test_each_process_has_an_incarnation_of_its_own_before_it_serves(store: MemoryStore) -> None:  # P3
    assert [process(store).shard.identity.incarnation for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("consistency", ["async", "ssp:8", "sync:2"])
def test_a_later_process_goes_on_from_the_newest_checkpoint_bit_by_bit(store: MemoryStore, consistency: str) -> None:
    first, undisturbed = process(store, consistency=consistency), process(MemoryStore(), consistency=consistency)
    first.push(0, 1, 2, 3)
    first.checkpointer.take(2 if consistency == "sync:2" else None)
    first.push(4)  # and is killed: this one is lost
    second = process(store, consistency=consistency)
    assert second.host.restored == "restored p5/s0/i1/c2 with 4 steps"
    assert list(second.shard.updates.held.intervals()) == [(0, 4)], "what it lacks it says, and it is leased again"
    for shard in (second, undisturbed):
        shard.push(*range(4 if shard is second else 0, 6))
        if consistency == "sync:2":
            shard.reach(3)
    assert bits_of(second.shard) == bits_of(undisturbed.shard)


def test_without_rounds_there_is_nowhere_to_return_to(store: MemoryStore) -> None:
    shard = process(store, consistency="async")
    shard.push(0, 1)
    shard.checkpointer.save_pending()
    assert shard.lifecycle.returnable() == []


def test_a_shard_can_return_where_it_began_and_to_every_round_it_has_saved(store: MemoryStore) -> None:  # P12
    shard = process(store)
    assert shard.lifecycle.returnable() == [0]
    at_round(shard, 3)
    assert shard.lifecycle.returnable() == [0, 1, 2, 3]
    assert process(store).lifecycle.returnable() == [0, 1, 2, 3], "whichever incarnation saved them"


# --- a return ---


@pytest.mark.parametrize("round_", [0, 1, 2, 3])
def test_a_return_begins_a_new_incarnation_with_the_bits_that_the_round_began_with(
    store: MemoryStore, round_: int
) -> None:
    shard = process(store)
    seen = at_round(shard, 3)
    shard.push(6)
    assert shard.lifecycle.roll_back(round_, incarnation=1) == 2
    assert shard.shard.identity.incarnation == 2
    assert shard.lifecycle.first_incarnation == 1
    assert process(store).lifecycle.first_incarnation == 3, "another process"
    assert bits_of(shard.shard) == seen[round_]
    assert shard.host.restored == f"returned to round {round_}"
    assert shard.host.changed.is_set(), "the new incarnation is announced at once"
    shard.push(*range(2 * round_, 6))
    shard.reach(3)
    assert bits_of(shard.shard) == seen[3], "and it goes the same way again"


def test_after_a_return_the_earlier_incarnation_s_pushes_and_pulls_are_refused(store: MemoryStore) -> None:  # P3, P11
    shard = process(store)
    at_round(shard, 1)
    earlier = shard.shard
    shard.lifecycle.roll_back(0, incarnation=1)
    with pytest.raises(StaleIncarnation, match="names incarnation 1 of shard 0; this is incarnation 2"):
        push_as(shard.shard, 2, named_as=earlier)
    assert push(shard.shard, 0, 1.0).result is PushResult.BUFFERED


def push_as(shard: Shard, step: int, *, named_as: Shard) -> None:
    push(shard, step, gradient_of(shard, step), target=named_as.identity)


def test_a_return_that_is_asked_for_twice_happens_once(store: MemoryStore) -> None:
    shard = process(store)
    at_round(shard, 2)
    shard.lifecycle.roll_back(1, incarnation=1)
    claims = [name for name in store.contents if name.startswith("claims/")]
    with pytest.raises(StaleIncarnation, match="this is incarnation 2 already, not 1"):
        shard.lifecycle.roll_back(1, incarnation=1)
    assert [name for name in store.contents if name.startswith("claims/")] == claims


def test_a_return_counts_on_in_the_process_s_record(store: MemoryStore) -> None:
    shard = process(store)
    at_round(shard, 2)
    before = shard.shard.record.buffered_pushes
    shard.lifecycle.roll_back(1, incarnation=1)
    assert shard.shard.record.buffered_pushes == before == 4, "counters only grow"


def test_a_round_that_turns_out_damaged_is_no_longer_one_to_return_to(store: MemoryStore) -> None:  # P12
    shard = process(store)
    seen = at_round(shard, 3)
    for name in store.contents:
        if "c00000002" in name and "variables-" in name:
            store.contents[name] = store.contents[name][:-1]
    with pytest.raises(DamagedCheckpoint, match="no checkpoint of round 2 verifies"):
        shard.lifecycle.roll_back(2, incarnation=1)
    assert shard.lifecycle.returnable() == [0, 1, 3]
    assert (shard.shard.identity.incarnation, bits_of(shard.shard)) == (1, seen[3]), "nothing else has changed"
    assert shard.lifecycle.roll_back(1, incarnation=1) == 2


def test_a_store_that_cannot_be_read_now_costs_no_round(store: MemoryStore) -> None:
    shard = process(store)
    at_round(shard, 2)
    for operation, within in (("read", "variables-"), ("create", "claims/")):
        fault = store.fail(operation, within)
        with pytest.raises(StoreFailed, match="no space left"):
            shard.lifecycle.roll_back(1, incarnation=1)
        assert fault.fired == 1
    assert shard.lifecycle.returnable() == [0, 1, 2]
    assert shard.shard.identity.incarnation == 1
    shard.lifecycle.roll_back(1, incarnation=1)
    assert shard.shard.identity.incarnation > 1


def test_a_process_that_has_a_successor_does_not_come_before_it_again(store: MemoryStore) -> None:  # P3
    shard = process(store)
    at_round(shard, 1)
    claim_incarnation(store, "shard-0")
    with pytest.raises(Superseded):
        shard.lifecycle.roll_back(0, incarnation=1)
    assert shard.shard.identity.incarnation == 1
    assert isinstance(shard.lifecycle.claims.superseded, Superseded), "its process ends"  # P23


def test_a_return_whose_claim_was_made_and_its_reply_lost_takes_place(store: MemoryStore) -> None:  # P23
    shard = process(store)
    at_round(shard, 2)
    lost = store.lose_reply("create", "claims/")
    assert shard.lifecycle.roll_back(1, incarnation=1) == 2
    assert lost.fired == 1
    shard.push(2, 3)
    shard.reach(2)
    shard.checkpointer.take(2)
    assert shard.lifecycle.claims.superseded is None, "its own claim does not fence it"


def test_a_claim_whose_reply_was_lost_does_not_fence_its_process(store: MemoryStore) -> None:  # P23
    shard = process(store)
    at_round(shard, 2)
    lost = store.lose_reply("create", "claims/", error=StoreFailed("no answer"))
    with pytest.raises(StoreFailed, match="no answer"):
        shard.lifecycle.roll_back(1, incarnation=1)
    assert lost.fired == 1
    shard.push(4)
    shard.checkpointer.take()
    assert shard.checkpointer.record.failed == 0
    assert shard.lifecycle.roll_back(1, incarnation=1) == 3


# --- what was saved on the way that a return has given up (P12) ---


def test_after_a_return_later_rounds_are_no_longer_there_to_return_to(store: MemoryStore) -> None:
    shard = process(store)
    seen = at_round(shard, 3)
    shard.lifecycle.roll_back(1, incarnation=1)
    assert shard.lifecycle.returnable() == [0, 1]
    other_way(shard, 1)
    assert shard.lifecycle.returnable() == [0, 1, 2]
    at_second = bits_of(shard.shard)
    assert at_second != seen[2]
    other_way(shard, 2)
    shard.lifecycle.roll_back(2, incarnation=2)
    assert bits_of(shard.shard) == at_second


def test_a_later_process_restores_no_round_that_was_given_up(store: MemoryStore) -> None:
    shard = process(store)
    at_round(shard, 3)
    shard.lifecycle.roll_back(1, incarnation=1)
    second = process(store)
    assert (second.host.restored, second.lifecycle.returnable()) == ("restored p5/s0/i1/c1 with 2 steps", [0, 1])
    assert second.shard.identity.incarnation == 3


def test_a_cut_that_was_being_saved_at_the_return_is_given_up(store: MemoryStore) -> None:
    shard = process(store)
    at_round(shard, 1)
    shard.push(2, 3)
    shard.reach(2)
    create = store.create

    def meanwhile(name: str, content: bytes | memoryview) -> None:
        create(name, content)
        if "slots-" in name:
            store.create = create  # type: ignore[method-assign]
            shard.lifecycle.roll_back(1, incarnation=1)

    store.create = meanwhile  # type: ignore[method-assign]
    fault = store.fail("delete")
    shard.checkpointer.save_pending()
    assert fault.fired == 1
    assert shard.stored() == ["p5/s0/i1/c1", "p5/s0/i1/c2"], "it was stored after the return"
    assert shard.lifecycle.returnable() == process(store).lifecycle.returnable() == [0, 1]


def test_a_round_that_comes_again_is_saved_again(store: MemoryStore) -> None:
    shard = process(store)
    at_round(shard, 2)
    shard.lifecycle.roll_back(1, incarnation=1)
    other_way(shard, 1)
    assert shard.checkpointer.pending is None
    assert shard.stored() == ["p5/s0/i1/c1", "p5/s0/i2/c3"], "and the one that was given up is deleted"


def test_what_could_not_be_read_at_the_start_is_not_gone_back_to(store: MemoryStore) -> None:
    at_round(process(store), 3)
    fault = store.fail("read", "c00000003/variables-")
    second = process(store)  # it begins at round 2, and all others return there
    assert (fault.fired, second.lifecycle.returnable()) == (1, [0, 1, 2])
    assert second.shard.identity.incarnation == second.lifecycle.first_incarnation
    third = process(store)
    assert third.lifecycle.returnable() == [0, 1, 2], "though it can be read again"


def other_way(shard: ShardProcess, round_: int) -> None:
    """Push a round's steps with other gradients, as a job without equal bits does, and save the next round's start."""
    for step in (2 * round_, 2 * round_ + 1):
        push(shard.shard, step, gradient_of(shard.shard, step + 1000))
    shard.reach(round_ + 1)
    shard.checkpointer.save_pending()
