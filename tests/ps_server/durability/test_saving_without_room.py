"""A shard whose disk is full: pushes go on, saving is tried again, what is replaced goes first, and all is told."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parashard._proto import shard_pb2
from parashard.errors import StoreFailed
from parashard.store import open_store
from parashard.store.base import Store
from support.shard_process import ADAM, ShardProcess, bits_of
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


# --- with a log ---


class FullFile:
    """A log's segment on a disk without room."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, *pieces: bytes | memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[list[ShardProcess]]:
    """Return the incarnations of a shard with a log, which saves nothing by itself; they are closed in the end."""
    incarnations: list[ShardProcess] = []
    yield incarnations
    for incarnation in incarnations:
        incarnation.close()


def next_incarnation(logged: list[ShardProcess], folder: Path, consistency: str = "async") -> ShardProcess:
    options = {"every_steps": 0, "every_s": 3600.0, "durability": "log", "log_fsync": False}
    logged.append(process(open_store(str(folder)), consistency=consistency, **options))
    return logged[-1]


def log_error(shard: ShardProcess) -> str:
    reply = shard_pb2.InspectReply()
    shard.log.describe(reply)
    return reply.log_error


@pytest.mark.parametrize("consistency", ["async", "sync:1"])
def test_a_log_that_failed_asks_for_the_checkpoint_that_makes_it_whole(  # P18, P21
    tmp_path: Path, logged: list[ShardProcess], consistency: str
) -> None:
    shard = next_incarnation(logged, tmp_path, consistency)
    shard.push(0)
    assert shard.log.current is not None
    assert shard.log.current._file is not None
    shard.log.current._file = FullFile(shard.log.current._file)  # type: ignore[assignment]
    shard.push(1)
    assert (shard.log.current.failed, log_error(shard)) == ("", "write: No space left on device"), (
        "a new segment has begun where there is room, and the checkpoint with what is lacking is not stored"
    )
    for step, now_s in ((2, 2.0), (3, 4.0)):  # in rounds the first one cut still lacks a step that was not logged
        shard.checkpointer.save_pending()
        pushed_at(shard, step, now_s)
    assert log_error(shard) == ""
    shard.push(4)
    again = next_incarnation(logged, tmp_path, consistency)
    assert again.shard.updates.held.stop() == 5
    assert bits_of(again.shard) == bits_of(shard.shard)


def test_a_log_that_fills_the_disk_is_deleted_for_a_checkpoint(
    tmp_path: Path, logged: list[ShardProcess]
) -> None:  # P21
    shard = next_incarnation(logged, tmp_path)
    shard.push(0, 1)
    assert shard.log.current is not None
    segments = [path.name for path in tmp_path.glob("log/**/*.log")]
    shard.log.current._file = FullFile(shard.log.current._file)  # type: ignore[assignment]
    shard.push(2)
    create, room = shard.store.create, [False]

    def full(name: str, content: bytes | memoryview) -> None:
        kept = {path.name for path in tmp_path.glob("log/**/*.log")}
        if "variables" in name and kept & set(segments):
            raise no_space()
        room[0] = True
        create(name, content)

    shard.store.create = full  # type: ignore[method-assign]
    for step, now_s in enumerate([1.0, 2.0, 4.0], start=3):
        assert not room[0]
        pushed_at(shard, step, now_s)
    assert (shard.checkpointer.record.failed, shard.checkpointer.record.stored, log_error(shard)) == (2, 1, "")
    shard.push(6)
    assert bits_of(next_incarnation(logged, tmp_path).shard) == bits_of(shard.shard)
