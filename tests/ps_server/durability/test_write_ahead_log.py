"""The push log of one incarnation: positions, segments, what is deleted, and that a bad disk never stops training."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from parashard_server.durability.write_ahead_log.records import HEAD_BYTES, HEADER_BYTES, LogIdentity
from parashard_server.durability.write_ahead_log.replay import replay
from parashard_server.durability.write_ahead_log.segments import CHECK_BYTES, check_free_space
from support.log_cases import DEADLINE_S, IDENTITY, Disk, append, files, opened, read

RECORD_BYTES = HEAD_BYTES + 12  # of the gradients of 3 elements


def test_positions_rise_by_one_from_where_the_last_incarnation_ended(tmp_path):
    log = opened(tmp_path, incarnation=4, first_position=17)
    assert append(log, 5, 3) == [17, 18]
    log.roll()
    assert append(log, 4) == [19]
    assert log.position == 20
    log.close()


def test_what_a_push_was_comes_back(tmp_path):
    log = opened(tmp_path)
    log.append(8, None, staleness=None, skipped=True)
    append(log, 9)
    log.close()
    empty, dense = replay(tmp_path, IDENTITY, 0, 1000)
    assert (empty.step, empty.gradient, empty.staleness, empty.skipped) == (8, None, None, True)
    assert (dense.step, dense.gradient.tolist(), dense.staleness) == (9, [9.0, 10.0, 11.0], 9)


def test_a_shard_without_variables_has_a_log_too(tmp_path):
    log = opened(tmp_path)
    append(log, 1, elements=0)
    log.close()
    assert [record.gradient.shape for record in replay(tmp_path, IDENTITY, 0, 1000)] == [(0,)]


def test_bytes_and_files_are_reported(tmp_path):
    log = opened(tmp_path / "made" / "when needed")
    append(log, 0, 1)
    assert log.bytes == 2 * RECORD_BYTES
    (file,) = (tmp_path / "made" / "when needed").iterdir()
    assert (file.name, file.stat().st_size) == ("i00000001-n00000001-p000000000000.log", HEADER_BYTES + log.bytes)
    log.close()


def test_a_write_that_the_kernel_cuts_short_is_continued(tmp_path, monkeypatch):
    def writev(descriptor: int, pieces: list[memoryview]) -> int:
        return os.write(descriptor, b"".join(pieces)[:5])

    log = opened(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", writev)
        append(log, 0, 1)
    log.close()
    assert read(tmp_path)[0] == [0, 1]


# --- segments ---


def test_segments_go_when_no_checkpoint_needs_them(tmp_path):
    log = opened(tmp_path)
    for step in range(3):
        append(log, step)
        log.roll()
    segments = files(tmp_path)
    log.delete_below(0)
    assert files(tmp_path) == segments
    log.delete_below(1)
    assert files(tmp_path) == segments[1:]
    log.delete_below(2**60)
    assert files(tmp_path) == segments[3:]  # the one being written stays
    append(log, 7)
    log.close()
    assert read(tmp_path, 3) == ([7], read(tmp_path, 3)[1])


def test_a_segment_is_deleted_as_a_whole_or_not(tmp_path):
    log = opened(tmp_path)
    append(log, 0, 1, 2)
    log.roll()
    log.delete_below(2)
    assert read(tmp_path, 2)[0] == [2]
    log.close()


def test_an_incarnation_that_was_followed_deletes_nothing(tmp_path):  # P3
    zombie = opened(tmp_path, incarnation=1)
    append(zombie, 0)
    zombie.roll()
    successor = opened(tmp_path, incarnation=2, first_position=1)
    before = files(tmp_path)
    zombie.delete_below(9)
    assert files(tmp_path) == before
    successor.delete_below(9)  # it may delete what older incarnations left
    assert files(tmp_path) == before[-1:]
    for log in (zombie, successor):
        log.close()


def test_only_what_is_this_shards_for_certain_is_deleted(tmp_path):
    strange = tmp_path / "i00000001-n00000009-p000000000000.log"
    notes, misnamed = tmp_path / "notes.log", tmp_path / "i1-n1-p0.log"
    for path in (strange, notes, misnamed):
        path.write_bytes(b"not ours")
    log = opened(tmp_path, incarnation=2)
    append(log, 0)
    log.roll()
    log.delete_below(9)  # goes on after the file that it could not delete
    assert files(tmp_path) == sorted([strange.name, notes.name, misnamed.name, "i00000002-n00000002-p000000000001.log"])
    log.close()


def test_another_runs_segments_stay(tmp_path):  # P2
    log = opened(tmp_path)
    append(log, 0)
    log.roll()
    log._identity = LogIdentity("run-2", "d" * 64, 1, 0)
    before = files(tmp_path)
    log.delete_below(9)
    assert files(tmp_path) == before
    log.close()


# --- a bad disk ---


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("fits_bytes", [0, 1, HEAD_BYTES, RECORD_BYTES - 1])
def test_a_failed_write_leaves_a_gap_and_training_goes_on(tmp_path, number, fits_bytes):  # P18
    disk = Disk(error=number)
    log = opened(tmp_path, disk=disk, fsync=True)
    append(log, 0)
    disk.room_bytes = fits_bytes
    assert append(log, 1) == [1]
    assert (log.failed, log.failures) == (f"write: {os.strerror(number)}", 1)
    disk.room_bytes = 1 << 30  # room again, but the segment's tail is not to be built upon
    assert append(log, 2) == [2]
    log.wait_durable(2, 0.0)
    assert (log.bytes, log.failures) == (RECORD_BYTES, 1)
    assert read(tmp_path)[0] == [0]
    log.close()


def test_the_next_checkpoints_segment_is_good_again(tmp_path):  # P18
    disk = Disk()
    log = opened(tmp_path, disk=disk, fsync=True)
    append(log, 0)
    disk.room_bytes = 9
    append(log, 1)
    disk.room_bytes = 1 << 30
    append(log, 2)
    log.roll()
    assert (log.failed, log.position) == ("", 3)
    log.wait_durable(2, 0.0)  # the checkpoint has it
    log.wait_durable(*append(log, 3), DEADLINE_S)
    assert (read(tmp_path, 3)[0], disk.syncs) == ([3], 1)
    steps, end = read(tmp_path, 0)  # from an older checkpoint
    assert (steps, end.position, end.reason) == ([0], 1, "gap")
    assert end.place.endswith("i00000001-n00000002-p000000000003.log, byte 0: the segment begins with record 3")
    log.close()


def test_a_failed_fsync_is_reported_and_nothing_more_is_written(tmp_path):
    disk = Disk(sync_error=errno.EIO)
    log = opened(tmp_path, disk=disk, fsync=True)
    log.wait_durable(*append(log, 0), DEADLINE_S)
    append(log, 1)
    assert (log.failed, log.failures, log.fsyncs, log.bytes) == ("fsync: Input/output error", 1, 0, RECORD_BYTES)
    disk.sync_error = 0
    log.reopen(2)
    log.wait_durable(*append(log, 2), DEADLINE_S)
    assert (log.failed, log.fsyncs, read(tmp_path, 2)[0]) == ("", 1, [2])
    log.close()


@pytest.mark.parametrize("room_bytes", [0, HEADER_BYTES - 1])
def test_a_segment_that_cannot_begin_is_a_failed_log(tmp_path, room_bytes):
    disk = Disk(room_bytes=room_bytes)
    log = opened(tmp_path, disk=disk)
    assert log.failed == "create: No space left on device"
    assert append(log, 0) == [0]
    assert files(tmp_path) == [], "the owner of a segment without a header is unknown"
    disk.room_bytes = 1 << 30
    log.roll()
    append(log, 1)
    assert (log.failed, read(tmp_path, 1)[0]) == ("", [1])
    log.close()


@pytest.mark.parametrize(
    ("size_mib", "room_mib", "fails"), [(32, 4, False), (32, 3, True), (1 << 20, 64, False), (1 << 20, 63, True)]
)
def test_a_log_leaves_room_for_what_cannot_be_done_without(size_mib, room_mib, fails):  # P21
    blocks = {"f_frsize": 4096, "f_blocks": size_mib << 8, "f_bavail": room_mib << 8}
    disk = SimpleNamespace(**blocks)
    if not fails:
        check_free_space(disk)
        return
    with pytest.raises(OSError, match=rf"^.Errno 28. {room_mib}\.0 MiB are left on the disk, and a log leaves "):
        check_free_space(disk)


def test_a_log_looks_at_the_room_that_is_left_now_and_then(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr("parashard_server.durability.write_ahead_log.segments.check_free_space", looks.append)
    log = opened(tmp_path)
    append(log, *range(8), elements=CHECK_BYTES // 16)  # a fourth of what is written between two looks
    assert len(looks) in (2, 3)
    log.close()


@pytest.mark.parametrize("begun", [True, False], ids=["a segment that is full", "none could be begun"])
def test_a_log_that_failed_gives_its_place_on_the_disk_up(tmp_path, begun):  # P21
    earlier = opened(tmp_path)
    append(earlier, 0)
    earlier.close()
    disk = Disk()
    log = opened(tmp_path, incarnation=2, first_position=1, disk=disk)
    append(log, 1)
    disk.room_bytes = 0
    append(log, 2)
    if not begun:
        log.roll()
    log.give_up(2)
    assert files(tmp_path) == []
    assert [link for link in map(target_of, Path("/proc/self/fd").iterdir()) if link.startswith(str(tmp_path))] == []
    append(log, 3)
    log.wait_durable(3, 0.0)
    disk.room_bytes = 1 << 30
    log.roll()
    append(log, 4)
    assert (log.failed, read(tmp_path, 4)[0]) == ("", [4])
    log.close()


def test_a_log_that_works_again_keeps_what_it_writes(tmp_path):
    disk = Disk()
    log = opened(tmp_path, disk=disk)
    disk.room_bytes = 0
    append(log, 0)
    disk.room_bytes = 1 << 30
    log.roll()
    append(log, 1)
    log.give_up(1)
    assert read(tmp_path, 1)[0] == [1]
    log.close()


def test_a_folder_that_cannot_be_is_a_failed_log(tmp_path):
    (tmp_path / "file").touch()
    log = opened(tmp_path / "file" / "below")
    assert (append(log, 0), log.failed) == ([0], "create: Not a directory")
    log.delete_below(1)
    log.close()


def test_a_log_never_goes_back(tmp_path):
    log = opened(tmp_path, first_position=5)
    append(log, 0)
    with pytest.raises(AssertionError, match="would repeat"):
        log.reopen(5)
    log.close()


def test_no_descriptor_is_left_open(tmp_path):
    for fsync in (False, True):
        disk = Disk()
        log = opened(tmp_path / str(fsync), disk=disk, fsync=fsync)
        for step in range(3):
            append(log, step)
            log.roll()
        log.wait_durable(2, DEADLINE_S)
        disk.sync_error = errno.EIO
        log.wait_durable(*append(log, 3), DEADLINE_S)
        log.roll()
        log.close()
    descriptors = Path("/proc/self/fd")
    assert [link for link in map(target_of, descriptors.iterdir()) if link.startswith(str(tmp_path))] == []


def target_of(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:  # another thread closed it just now
        return ""
