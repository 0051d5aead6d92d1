"""Collection: newer checkpoints replace older ones, except those that may still be needed (P8, P12)."""

from __future__ import annotations

from typing import Any

from parashard.checkpoints.retention import CommonRounds
from parashard.store.claims import claim_incarnation
from support.checkpoint_cases import write_job
from support.shard_process import ADAM, ShardProcess
from support.store_fakes import MemoryStore


def process(store: MemoryStore, *, consistency: str = "async", **checkpoint: Any) -> ShardProcess:
    options = {"every_s": 0.0, "every_steps": 1, **checkpoint}
    return ShardProcess(store, optimizer=ADAM, consistency=consistency, checkpoint=options)


def saved_after_each(shard: ShardProcess, *steps: int) -> None:
    for step in steps:
        shard.push(step)
        shard.checkpointer.save_pending()


def test_the_newest_are_kept_and_every_so_many_th(store: MemoryStore) -> None:
    shard = process(store, keep=2, keep_every=3)
    saved_after_each(shard, *range(8))
    assert shard.numbers() == [3, 6, 7, 8]
    files = {name.split("/")[3] for name in store.contents if name.startswith("shards/")}
    assert files == {f"i00000001-c0000000{number}" for number in (3, 6, 7, 8)}, "their files went with them"


def test_an_incarnation_collects_what_earlier_incarnations_left(store: MemoryStore) -> None:
    saved_after_each(process(store, keep=100), 0, 1, 2)
    shard = process(store, keep=2)
    saved_after_each(shard, 3)
    assert shard.stored() == ["p5/s0/i1/c3", "p5/s0/i2/c4"], "numbers go on"


def test_what_a_drained_checkpoint_is_made_of_is_kept(store: MemoryStore) -> None:  # P8
    shard = process(store, keep=1)
    saved_after_each(shard, 0)
    manifest = shard.catalogue.manifest(shard.id_of(1))
    write_job(store, 1, [manifest, manifest])
    saved_after_each(shard, 1, 2, 3)
    assert shard.numbers() == [1, 4]


def test_what_was_handed_out_is_kept_until_the_next_one_is(store: MemoryStore) -> None:  # P8: its manifest is under way
    shard = process(store, keep=1)
    saved_after_each(shard, 0)
    handed_out = shard.checkpointer.take()
    saved_after_each(shard, 1, 2)
    assert shard.numbers() == [1, 3]
    assert handed_out.number == 1
    shard.checkpointer.take()
    saved_after_each(shard, 3)
    assert shard.numbers() == [3, 4]


def test_in_rounds_nothing_is_deleted_that_all_may_have_to_return_to(store: MemoryStore) -> None:  # P12
    shard = process(store, consistency="sync:1", keep=1)
    for round_ in range(1, 4):
        shard.push(round_ - 1)
        shard.checkpointer.take(round_)
    assert shard.checkpointer.saved.rounds_and_chains()[0] == [1, 2, 3], (
        "no round is known to be complete on every shard"
    )
    shard.checkpointer.saved.common = CommonRounds(2, frozenset())
    shard.push(3)
    shard.checkpointer.take(4)
    assert shard.checkpointer.saved.rounds_and_chains()[0] == [2, 3, 4]


def test_nothing_is_deleted_by_an_older_incarnation(store: MemoryStore) -> None:  # P3
    shard = process(store, keep=1)
    saved_after_each(shard, 0)
    create = store.create

    def overtaken(name: str, content: bytes | memoryview) -> None:
        create(name, content)
        if "manifest" in name:
            claim_incarnation(store, "shard-0")

    store.create = overtaken  # type: ignore[method-assign]
    saved_after_each(shard, 1)
    assert shard.numbers() == [1, 2], "its last one was in time, and all else is its successor's business"


def test_a_collection_that_fails_costs_no_checkpoint(store: MemoryStore) -> None:
    shard = process(store, keep=1)
    saved_after_each(shard, 0)
    fault = store.fail("delete")
    saved_after_each(shard, 1)
    assert (fault.fired, shard.checkpointer.record.stored, shard.checkpointer.record.failed) == (1, 2, 0)


def test_one_that_was_found_damaged_does_not_stand_for_a_good_one(store: MemoryStore) -> None:
    shard = process(store, keep=2)
    saved_after_each(shard, 0, 1)
    shard.checkpointer.saved.forget(shard.id_of(2))
    saved_after_each(shard, 2)
    assert shard.numbers() == [1, 2, 3], "the damaged one is not deleted, and c1 is one of the newest two"
