"""A shard whose disk is full: pushes go on, saving is tried again, what is replaced goes first, and all is told."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from parashard.errors import StoreFailed
from parashard.store import Store
from support.shard_process import ADAM, ShardProcess
from support.store_fakes import MemoryStore


def no_space() -> StoreFailed:
    error = StoreFailed("memory://test: no space left on device")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


def process(store: Store, *, consistency: str = "async", **checkpoint: Any) -> ShardProcess:
    options = {"every_s": 0.0, "every_steps": 1, **checkpoint}
    return ShardProcess(store, optimizer=ADAM, consistency=consistency, checkpoint=options)


def pushed_at(shard: ShardProcess, step: int, now_s: float) -> None:
    shard.now_s = now_s
    shard.push(step)
    shard.checkpointer.save_pending()


def test_a_checkpoint_that_failed_is_tried_again_with_growing_pauses() -> None:  # P21
    store = MemoryStore()
    shard = process(store)
    store.fail("create", "variables", times=4, error=no_space())
    tried = []
    for step in range(32):
        before = shard.checkpointer.record.failed + shard.checkpointer.record.stored
        pushed_at(shard, step, float(step))
        tried += [step] * (shard.checkpointer.record.failed + shard.checkpointer.record.stored - before)
    assert tried == [0, 1, 3, 7, *range(15, 32)], "after 1, 2, 4 and 8 s; then at every step again"


def test_what_failed_by_time_need_not_wait_for_its_next_time() -> None:  # P21
    store = MemoryStore()
    shard = process(store, every_steps=0, every_s=600.0)
    store.fail("create", "variables", error=no_space())
    for step, now_s in enumerate([0.0, 600.0, 600.5, 601.0]):
        pushed_at(shard, step, now_s)
    assert (shard.checkpointer.record.failed, shard.checkpointer.record.stored) == (1, 1)


def test_older_checkpoints_are_deleted_before_another_is_written_to_a_full_disk() -> None:  # P21
    store = MemoryStore()
    shard = process(store, keep=3)
    for step in range(3):
        pushed_at(shard, step, 0.0)
    store.fail("create", "variables", error=no_space())
    pushed_at(shard, 3, 0.0)
    assert shard.numbers() == [1, 2, 3], "a single failure costs none"
    store.calls.clear()
    pushed_at(shard, 4, 1.0)
    deleted = [name for operation, name in store.calls if operation == "delete"]
    created = [place for place, (operation, _) in enumerate(store.calls) if operation == "create"]
    assert {name.split("/")[3] for name in deleted} == {"i00000001-c00000001", "i00000001-c00000002"}
    assert store.calls.index(("delete", deleted[-1])) < created[0]
    assert shard.numbers() == [3, 5]
    pushed_at(shard, 5, 2.0)
    assert shard.numbers() == [3, 5, 6], "and then as many as the job asks for"


def test_a_damaged_checkpoint_replaces_none() -> None:  # P21
    store = MemoryStore()
    shard = process(store, keep=3)
    for step in range(3):
        pushed_at(shard, step, 0.0)
    (name,) = (name for name in store.contents if "c00000003/variables" in name)
    store.contents[name] = store.contents[name][:-1]
    store.fail("create", "variables-", times=2, error=no_space())
    pushed_at(shard, 3, 0.0)
    pushed_at(shard, 4, 1.0)
    assert shard.checkpointer.record.failed == 2
    assert 2 in shard.numbers(), "the newest that is whole"
    assert 1 not in shard.numbers()


def test_another_error_of_the_store_deletes_nothing() -> None:
    store = MemoryStore()
    shard = process(store, keep=3)
    for step in range(3):
        pushed_at(shard, step, 0.0)
    store.fail("create", "variables", times=2, error=StoreFailed("s3://b: access denied"))
    pushed_at(shard, 3, 0.0)
    pushed_at(shard, 4, 1.0)
    assert shard.numbers() == [1, 2, 3]


def test_what_a_rollback_discarded_goes_although_it_was_handed_out() -> None:  # P12, P21
    store = MemoryStore()
    shard = process(store, consistency="sync:1", every_steps=0)
    for round_ in (1, 2):
        shard.push(round_ - 1)
        shard.checkpointer.take(round_)
    shard.lifecycle.roll_back(1, incarnation=1)
    shard.push(1)
    store.fail("create", "variables", times=2, error=no_space())
    for numbers in ([1, 2], [1]):  # the second attempt makes room, and leaves what the shards may return to
        with pytest.raises(StoreFailed):
            shard.checkpointer.take(2)
        assert shard.numbers() == numbers
