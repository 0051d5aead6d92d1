"""Group commit: what many wait for, one fsync makes durable, and every wait is bounded."""

import errno
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from parashard.errors import NotReady, QueueFull
from support.log_cases import DEADLINE_S, Disk, append, opened, read


@contextmanager
def stuck_disk(disk: Disk, waiting: int = 4) -> Iterator[ThreadPoolExecutor]:
    """Let no sync end within the block; threads that wait for one end whatever happens."""
    disk.may_sync.clear()
    with ThreadPoolExecutor(waiting) as threads:
        try:
            yield threads
        finally:
            disk.may_sync.set()


def test_many_waiters_share_one_fsync(tmp_path):
    log = opened(tmp_path, fsync=True, disk=(disk := Disk()))
    positions = append(log, *range(4))
    with stuck_disk(disk) as threads:
        waits = [threads.submit(log.wait_durable, position, DEADLINE_S) for position in positions]
        assert disk.syncing.wait(DEADLINE_S)
        assert not any(wait.done() for wait in waits)
    assert [wait.result(0) for wait in waits] == [None] * 4
    assert (disk.syncs, log.fsyncs) == (1, 1)
    log.close()


def test_what_is_written_during_an_fsync_needs_the_next_one(tmp_path):
    log = opened(tmp_path, fsync=True, disk=(disk := Disk()))
    with stuck_disk(disk) as threads:
        waits = [threads.submit(log.wait_durable, *append(log, 0), DEADLINE_S)]
        assert disk.syncing.wait(DEADLINE_S)
        later = append(log, 1, 2, 3)  # the owner does not wait for the disk
        waits += [threads.submit(log.wait_durable, position, DEADLINE_S) for position in later]
    assert [wait.result(0) for wait in waits] == [None] * 4
    assert disk.syncs == 2
    log.close()


def test_what_is_durable_is_not_waited_for_again(tmp_path):
    log = opened(tmp_path, fsync=True, disk=(disk := Disk()))
    append(log, 0, 1)
    log.wait_durable(1, DEADLINE_S)
    for position in (-1, 0, 1):  # -1: a duplicate of a push that a checkpoint has, before anything is logged
        log.wait_durable(position, 0.0)
    assert disk.syncs == 1
    log.close()


def test_without_fsync_no_push_waits_and_the_process_may_die(tmp_path):
    log = opened(tmp_path, disk=(disk := Disk()))
    log.wait_durable(*append(log, 5), 0.0)
    assert (disk.syncs, log.fsyncs) == (0, 0)
    assert read(tmp_path)[0] == [5]  # nothing is left in the process's memory
    log.close()


def test_a_slow_disk_is_answered_with_queue_full_and_the_push_comes_again(tmp_path):
    log = opened(tmp_path, fsync=True, disk=(disk := Disk()))
    with stuck_disk(disk) as threads:
        leader = threads.submit(log.wait_durable, *append(log, 0), DEADLINE_S)
        assert disk.syncing.wait(DEADLINE_S)
        append(log, 1)
        for position in (0, 1):
            with pytest.raises(QueueFull, match=rf"has not taken record {position} in 0\.0 s"):
                log.wait_durable(position, 0.0)
    leader.result(0)
    log.wait_durable(log.position - 1, DEADLINE_S)  # the duplicate that follows
    assert (disk.syncs, log.failed) == (2, "")
    log.close()


def test_a_roll_during_an_fsync_loses_nothing(tmp_path):
    log = opened(tmp_path, fsync=True, disk=(disk := Disk()))
    with stuck_disk(disk) as threads:
        leader = threads.submit(log.wait_durable, *append(log, 0), DEADLINE_S)
        assert disk.syncing.wait(DEADLINE_S)
        append(log, 1)
        log.roll()
        append(log, 2)
    leader.result(0)
    assert disk.syncs == 1
    log.wait_durable(2, DEADLINE_S)
    assert disk.syncs == 3  # the full segment too: record 1 is in it
    assert read(tmp_path)[0] == [0, 1, 2]
    log.close()


def test_a_failed_fsync_ends_all_waits(tmp_path):
    log = opened(tmp_path, fsync=True, disk=(disk := Disk(sync_error=errno.EIO)))
    positions = append(log, *range(4))
    with stuck_disk(disk) as threads:
        waits = [threads.submit(log.wait_durable, position, DEADLINE_S) for position in positions]
        assert disk.syncing.wait(DEADLINE_S)
    assert [wait.result(0) for wait in waits] == [None] * 4
    assert (log.failed, log.failures) == ("fsync: Input/output error", 1)
    log.close()


def test_a_log_fails_once_however_many_see_it(tmp_path):
    log = opened(tmp_path, fsync=True, disk=(disk := Disk(sync_error=errno.EIO)))
    with stuck_disk(disk) as threads:
        leader = threads.submit(log.wait_durable, *append(log, 0), DEADLINE_S)
        assert disk.syncing.wait(DEADLINE_S)
        disk.room_bytes = 0
        append(log, 1)
        log.wait_durable(1, 0.0)
    leader.result(0)
    assert (log.failed, log.failures) == ("write: No space left on device", 1)
    log.close()


def test_a_segments_name_is_durable_before_its_first_record_is(tmp_path, monkeypatch):
    folders: list[str] = []
    monkeypatch.setattr(
        "parashard_server.durability.write_ahead_log.log.sync_folder", lambda folder: folders.append(folder.name)
    )
    monkeypatch.setattr(
        "parashard_server.durability.write_ahead_log.log.sync_upwards",
        lambda folder: folders.append(f"{folder.name} and up"),
    )
    log = opened(tmp_path / "shard", fsync=True)
    for _ in range(2):
        for step in (1, 2):
            log.wait_durable(*append(log, step), DEADLINE_S)
        log.roll()
    assert folders == ["shard and up", "shard"]  # once a segment; the first may have made every folder
    log.close()


def test_a_wait_for_a_log_that_is_closed_fails(tmp_path):
    log = opened(tmp_path, fsync=True)
    append(log, 0)
    log.close()
    with pytest.raises(NotReady, match="the push log is closed"):
        log.wait_durable(0, DEADLINE_S)


def test_what_was_never_appended_is_not_waited_for(tmp_path):
    log = opened(tmp_path, fsync=True)
    with pytest.raises(AssertionError, match="record 0 has not been appended"):
        log.wait_durable(log.position, DEADLINE_S)
    log.close()
