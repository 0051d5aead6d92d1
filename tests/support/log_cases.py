"""What the tests of the push log share: an identity, gradients, and a disk with faults to order."""

from __future__ import annotations

import errno
import os
import struct
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from parashard_server.durability.write_ahead_log.log import WriteAheadLog, open_log
from parashard_server.durability.write_ahead_log.records import LogIdentity, LogRecord
from parashard_server.durability.write_ahead_log.replay import LogEnd, replay
from parashard_server.durability.write_ahead_log.segments import SegmentFile
from support.waiting import DEADLINE_S

IDENTITY = LogIdentity("run-1", "d" * 64, plan_version=1, shard=0)
RECORD_BYTES_MAX = 1 << 20


@dataclass
class Disk:
    """Creates segments on the real disk, counts their syncs, and fails or waits as a test says."""

    room_bytes: int = 1 << 40
    error: int = errno.ENOSPC
    syncs: int = 0
    sync_error: int = 0
    may_sync: threading.Event = field(default_factory=threading.Event)
    syncing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_sync.set()

    def create(self, path: Path) -> DiskFile:
        return DiskFile(SegmentFile.create(path), self)


class DiskFile:
    """A segment's file on a `Disk`."""

    def __init__(self, file: SegmentFile, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, *pieces: bytes | memoryview) -> None:
        content = b"".join(pieces)
        fitting = content[: self._disk.room_bytes]
        self._disk.room_bytes -= len(fitting)
        self._file.write(fitting)
        if len(fitting) < len(content):
            raise OSError(self._disk.error, os.strerror(self._disk.error))

    def sync(self) -> None:
        self._disk.syncing.set()
        assert self._disk.may_sync.wait(DEADLINE_S)
        if self._disk.sync_error:
            raise OSError(self._disk.sync_error, os.strerror(self._disk.sync_error))
        self._file.sync()
        self._disk.syncs += 1

    def duplicate(self) -> DiskFile:
        return DiskFile(self._file.duplicate(), self._disk)

    def close(self) -> None:
        self._file.close()


def opened(
    folder: Path, incarnation: int = 1, first_position: int = 0, *, fsync: bool = False, disk: Disk | None = None
) -> WriteAheadLog:
    return open_log(folder, IDENTITY, incarnation, first_position, fsync=fsync, create=(disk or Disk()).create)


def gradient_of(step: int, elements: int = 3) -> np.ndarray:
    return np.arange(elements, dtype=np.float32) + np.float32(step)


def append(log: WriteAheadLog, *steps: int, elements: int = 3) -> list[int]:
    return [log.append(step, gradient_of(step, elements), staleness=step, skipped=False) for step in steps]


def read(folder: Path, from_position: int = 0, record_bytes_max: int = RECORD_BYTES_MAX) -> tuple[list[int], LogEnd]:
    """Return the steps that a replay yields, after a look at their gradients, and its end."""
    replaying = replay(folder, IDENTITY, from_position, record_bytes_max)
    records = list(replaying)
    for record in records:
        assert_sound(record)
    assert [record.position for record in records] == list(range(from_position, from_position + len(records)))
    return [record.step for record in records], replaying.ended


def assert_sound(record: LogRecord) -> None:
    assert record.gradient is not None
    assert record.gradient.tolist() == gradient_of(record.step, len(record.gradient)).tolist()
    assert (record.staleness, record.skipped) == (record.step, False)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def head_with(flags: int, payload_bytes: int, seed: int) -> bytes:
    """Return the head of a record 0 that declares what no writer would, under a right checksum."""
    content = struct.pack("<QQIqQI", 0, 5, flags, 2, payload_bytes, 0)
    return content + struct.pack("<I", zlib.crc32(content, seed))
