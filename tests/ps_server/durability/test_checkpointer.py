"""Checkpoints beside running pushes: what they hold, and what a store that fails or another incarnation costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parashard.checkpoints.catalogue import CheckpointId, part_of
from parashard.checkpoints.encoding import sha256_of
from parashard.checkpoints.manifest import ShardPart
from parashard.errors import StaleRound, StoreFailed, Superseded, Unavailable
from parashard.store import Store, open_store
from parashard.store.claims import claim_incarnation
from parashard_server.state.storage import Copy, Snapshot, copy_partitions
from support.in_process import push, push_for
from support.shard_process import ADAM, ShardProcess, bits_in, bits_of, gradient_of
from support.store_fakes import MemoryStore


def process(store: Store, index: int = 0, *, consistency: str = "async", **checkpoint: Any) -> ShardProcess:
    options = {"every_s": 0.0, **checkpoint}
    return ShardProcess(store, index, optimizer=ADAM, consistency=consistency, checkpoint=options)


def missing(shard: ShardProcess) -> bool:
    """Return whether the cut that waits to be saved lacks copies."""
    cut = shard.checkpointer.pending
    return cut is not None and bool(cut.snapshot.missing)


def test_a_checkpoint_holds_the_state_bit_by_bit(tmp_path: Path) -> None:  # P1
    shard = process(open_store(str(tmp_path)), 1)
    shard.push(0, 1, 5)
    stored = shard.checkpointer.take()
    id_ = CheckpointId.of(stored)
    assert bits_in(shard.state_in(id_), shard.shard) == bits_of(shard.shard)
    assert stored.applied == ((0, 2), (5, 6))
    assert id_ == CheckpointId(shard.shard.identity.plan_version, 1, 1, 1)
    manifest = open_store(str(tmp_path)).read(id_.manifest_name, 1 << 20)
    assert part_of(stored) == ShardPart(name=id_.folder, size_bytes=len(manifest), sha256=sha256_of(manifest))


def test_pushes_that_come_while_it_is_being_saved_are_not_in_it(store: MemoryStore) -> None:  # P1
    shard = process(store)
    shard.push(0, 1)
    before = bits_of(shard.shard)
    create, pushed = store.create, iter(range(2, 40))

    def busy(name: str, content: bytes | memoryview) -> None:
        shard.push(next(pushed))
        create(name, content)

    store.create = busy  # type: ignore[method-assign]
    stored = shard.checkpointer.take()
    assert next(pushed) > 4, "they came"
    assert bits_in(shard.state_in(CheckpointId.of(stored)), shard.shard) == before


def test_the_schedule_cuts_at_its_step_and_saves_beside_what_follows(store: MemoryStore) -> None:
    shard = process(store, every_steps=2)
    shard.push(0, 1)
    before = bits_of(shard.shard)
    shard.push(2, 3, 4)
    assert shard.numbers() == [], "not yet: pushes do not wait for a store"
    shard.checkpointer.save_pending()
    assert [bits_in(shard.state_in(shard.id_of(1)), shard.shard)] == [before]
    shard.checkpointer.cut_if_due(shard.shard)
    shard.checkpointer.save_pending()
    assert shard.checkpointer.record.stored == 2


def test_a_cut_that_waits_stays_what_it_was_while_another_checkpoint_is_taken(store: MemoryStore) -> None:  # P1
    shard = process(store, every_steps=2)
    shard.push(0, 1)  # the schedule cuts
    before = bits_of(shard.shard)
    shard.push(2)
    taken = shard.checkpointer.take()
    shard.checkpointer.save_pending()
    assert bits_in(shard.state_in(shard.id_of(1)), shard.shard) == before
    assert bits_in(shard.state_in(CheckpointId.of(taken)), shard.shard) == bits_of(shard.shard)
    assert (CheckpointId.of(taken), shard.numbers()) == (shard.id_of(2), [1, 2]), "the older cut has the lower number"


def test_a_push_that_copies_what_it_moves_is_counted_as_a_stall(store: MemoryStore) -> None:
    shard = process(store, every_steps=2)

    def request(step: int, seconds: float) -> float:
        push(shard.shard, step, gradient_of(shard.shard, step))
        shard.host.run_exclusive(lambda served: shard.host.after_request(served, seconds))
        return shard.checkpointer.record.stall_s

    assert (request(0, 8.0), request(1, 9.0)) == (0.0, 0.0), "the second cuts, and has copied nothing"
    assert missing(shard)
    assert request(2, 0.5) == 0.5, "it copies what it moves"
    assert not missing(shard)
    assert request(3, 7.0) == 0.5


def test_what_the_saving_thread_has_copied_is_no_push_s_stall(store: MemoryStore) -> None:
    shard = process(store, every_steps=1)
    shard.plane.push(push_for(shard.shard, 0, gradient_of(shard.shard, 0)), 1.0)
    assert missing(shard)
    shard.checkpointer.save_pending()
    stalled_s = shard.checkpointer.record.stall_s  # by the copies, a lock's hold each
    shard.host.run_exclusive(lambda served: shard.host.after_request(served, 1e3))
    assert shard.checkpointer.record.stall_s == stalled_s


def keep_snapshots(shard: ShardProcess, copy: Copy) -> None:
    """Have snapshots be of copies that no push changes, as on a GPU."""
    storage = shard.shard.storage

    def snapshot() -> Snapshot:
        slots = {name: slot.copy() for name, slot in storage.slots.items()}
        return Snapshot(storage.layout, storage.weights.copy(), slots, copy, is_kept=True)

    storage.snapshot = snapshot  # type: ignore[method-assign]


def test_what_no_push_changes_is_copied_while_pushes_go_on(store: MemoryStore) -> None:
    shard = process(store, every_steps=2)

    def copy(*given: Any) -> None:
        shard.push(5)
        copy_partitions(*given)

    keep_snapshots(shard, copy)
    shard.push(0, 1)
    before = bits_of(shard.shard)
    shard.checkpointer.save_pending()
    assert bits_in(shard.state_in(shard.id_of(1)), shard.shard) == before
    assert shard.checkpointer.record.stall_s == 0.0
    assert 5 in shard.shard.updates.applied


def test_a_gpu_that_fails_while_it_is_copied_from_costs_the_checkpoint(store: MemoryStore) -> None:
    shard = process(store, every_steps=2)

    def copy(*given: Any) -> None:
        raise Unavailable("cuda:0 failed")

    keep_snapshots(shard, copy)
    shard.push(0, 1)
    shard.checkpointer.save_pending()
    record = shard.checkpointer.record
    assert (record.stored, record.failed, record.error) == (0, 1, "cuda:0 failed")
    with pytest.raises(Unavailable, match="cuda:0 failed"):
        shard.checkpointer.take()
    assert shard.numbers() == []


def test_an_incarnation_that_replaces_one_with_a_cut_stalls_nothing(store: MemoryStore) -> None:  # P12
    shard = process(store, consistency="sync:2", every_steps=2)
    for step in range(2):
        shard.push(step)
    shard.reach(1)  # which cuts
    assert missing(shard)
    shard.lifecycle.roll_back(0, incarnation=1)
    shard.host.run_exclusive(lambda served: shard.host.after_request(served, 1e3))
    assert shard.checkpointer.record.stall_s == 0.0


def test_by_seconds(store: MemoryStore) -> None:
    shard = process(store, every_s=30.0)
    shard.push(0)
    shard.now_s = 30.0
    shard.push(1)
    shard.checkpointer.save_pending()
    assert list(shard.state_in(shard.id_of(1)).applied.intervals()) == [(0, 2)]


def test_what_has_not_moved_is_not_stored_again(store: MemoryStore) -> None:
    shard = process(store)
    shard.push(0)
    first = shard.checkpointer.take()
    assert shard.checkpointer.take() == first
    assert (shard.numbers(), shard.checkpointer.record.stored) == ([1], 1)
    shard.push(1)
    assert shard.checkpointer.take() != first
    assert shard.numbers() == [1, 2]


def test_one_that_was_found_damaged_is_forgotten_and_another_one_taken_once(store: MemoryStore) -> None:
    shard = process(store, consistency="sync:2")
    shard.push(0, 1)
    first = shard.checkpointer.take(1)
    second = shard.checkpointer.take(1, damaged=CheckpointId.of(first).folder)
    assert (second.number, second.applied) == (2, first.applied)
    assert shard.checkpointer.saved.at_round(1) == [CheckpointId.of(second)], "nor is it returned to"
    assert shard.checkpointer.take(1, damaged=CheckpointId.of(first).folder) == second, "the same request, sent again"
    assert shard.checkpointer.take(1) == second


def test_the_thread_saves_by_itself_and_ends(store: MemoryStore) -> None:
    shard = process(store, every_steps=1)
    shard.checkpointer.start()
    try:
        shard.push(0)
    finally:
        shard.checkpointer.stop()
    shard.checkpointer.save_pending()
    assert shard.checkpointer.record.stored == 1
    assert not shard.checkpointer._thread.is_alive()


# --- rounds ---


def test_in_rounds_the_start_of_a_round_is_saved_before_its_steps_are_folded(store: MemoryStore) -> None:  # P12
    shard = process(store, consistency="sync:2", every_steps=2)
    shard.push(0, 1)
    assert shard.checkpointer.pending is None, "the round is full, and the next one was not requested yet (P10)"
    shard.push(2)
    shard.checkpointer.save_pending()
    stored = shard.state_in(shard.id_of(1))
    assert (stored.round, list(stored.applied.intervals())) == (1, [(0, 2)])
    assert shard.checkpointer.saved.rounds_and_chains()[0] == [1]


def test_in_rounds_a_full_round_is_committed_by_a_drained_checkpoint(store: MemoryStore) -> None:  # P8, P10
    shard = process(store, consistency="sync:2")
    shard.push(0, 1)
    stored = shard.checkpointer.take(1)
    assert (stored.round, stored.applied) == (1, ((0, 2),))


def test_in_rounds_another_round_than_this_shard_s_is_refused(store: MemoryStore) -> None:  # P11
    shard = process(store, consistency="sync:2")
    shard.push(0)
    with pytest.raises(StaleRound):
        shard.checkpointer.take(1)
    assert shard.numbers() == []


def test_a_round_that_was_named_is_saved_when_it_is_reached(store: MemoryStore) -> None:  # P12
    shard = process(store, consistency="sync:2")
    shard.checkpointer.name_ahead(2)
    shard.push(0, 1, 2, 3)
    assert shard.checkpointer.pending is None
    shard.reach(2)
    shard.checkpointer.save_pending()
    assert shard.checkpointer.saved.rounds_and_chains()[0] == [2]


def test_a_round_that_was_named_where_the_shard_stands_already_is_saved_at_once(store: MemoryStore) -> None:
    shard = process(store, consistency="sync:2")
    shard.checkpointer.name_ahead(0)
    assert shard.checkpointer.pending is not None


# --- a store that fails ---

STAGES = [("create", "variables-"), ("create", "slots-"), ("create", "manifest"), ("names", "claims/shard-0")]


@pytest.mark.parametrize(("operation", "within"), STAGES)
def test_a_failure_is_counted_and_never_acknowledged_and_leaves_nothing_behind(
    store: MemoryStore, operation: str, within: str
) -> None:
    shard = process(store)
    shard.push(0)
    before = dict(store.contents)
    fault = store.fail(operation, within)
    with pytest.raises(StoreFailed, match="no space left"):
        shard.checkpointer.take()
    assert fault.fired == 1
    assert store.contents == before, "a full disk must not be filled further"
    record = shard.checkpointer.record
    assert (record.stored, record.failed, record.error) == (0, 1, "memory://test: no space left on device")
    shard.push(1)
    stored = shard.checkpointer.take()
    assert bits_in(shard.state_in(CheckpointId.of(stored)), shard.shard) == bits_of(shard.shard)
    assert (record.stored, record.failed, record.error) == (1, 1, "")


def test_a_failure_by_the_schedule_costs_that_checkpoint_and_no_push(store: MemoryStore) -> None:
    shard = process(store, every_steps=2)
    fault = store.fail("create", "manifest")
    shard.push(0, 1)
    shard.checkpointer.save_pending()
    shard.now_s = 1.0
    shard.push(2, 3)
    shard.checkpointer.save_pending()
    assert (fault.fired, shard.checkpointer.record.failed, shard.checkpointer.record.stored) == (1, 1, 1)
    assert list(shard.state_in(shard.id_of(2)).applied.intervals()) == [(0, 3)]


def test_files_that_cannot_be_removed_either_are_no_checkpoint(store: MemoryStore) -> None:
    shard = process(store)
    shard.push(0)
    faults = [store.fail("create", "manifest"), store.fail("delete", "slots-")]
    with pytest.raises(StoreFailed):
        shard.checkpointer.take()
    assert [fault.fired for fault in faults] == [1, 1]
    assert shard.numbers() == []


# --- incarnations ---


def test_an_older_incarnation_s_checkpoint_is_dropped(store: MemoryStore) -> None:  # P3
    older, newer = process(store), process(store)
    older.push(0)
    before = dict(store.contents)
    with pytest.raises(Superseded):
        older.checkpointer.take()
    assert store.contents == before
    assert isinstance(older.lifecycle.claims.superseded, Superseded), "it ends"  # P23
    newer.push(0)
    newer.checkpointer.take()
    assert newer.stored() == ["p5/s0/i2/c1"]


def test_a_checkpoint_that_is_dropped_for_a_newer_claim_is_counted_as_failed(store: MemoryStore) -> None:
    shard = process(store, every_steps=1)
    shard.push(0)
    claim_incarnation(store, "shard-0")  # and its process dies
    shard.checkpointer.save_pending()
    record = shard.checkpointer.record
    assert (record.stored, record.failed) == (0, 1)
    assert "another process has claimed incarnation 2 of shard-0" in record.error


def test_an_incarnation_that_is_replaced_while_it_saves_leaves_no_checkpoint(store: MemoryStore) -> None:  # P3
    shard = process(store)
    shard.push(0)
    create = store.create

    def overtaken(name: str, content: bytes | memoryview) -> None:
        create(name, content)
        if "slots-" in name:
            claim_incarnation(store, "shard-0")

    store.create = overtaken  # type: ignore[method-assign]
    with pytest.raises(Superseded):
        shard.checkpointer.take()
    assert shard.numbers() == []


def test_after_a_return_what_was_saved_before_it_is_not_handed_out(store: MemoryStore) -> None:  # P7, P12
    """The same steps, and other weights: gradients need not have equal bits."""
    shard = process(store, consistency="sync:2")
    shard.push(0, 1)
    before = shard.checkpointer.take(1)
    shard.lifecycle.roll_back(0, incarnation=1)
    for step in (0, 1):
        push(shard.shard, step, gradient_of(shard.shard, step + 1000))
    stored = shard.checkpointer.take(1)
    assert stored.applied == before.applied
    assert (stored.incarnation, before.incarnation) == (2, 1)
    assert bits_in(shard.state_in(CheckpointId.of(stored)), shard.shard) == bits_of(shard.shard)
