"""The files of a write-ahead log: their names, creation and writing, and which part of each is valid.

Knows descriptors and headers, not records. Called by `log` (writes) and `replay` (reads).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import NamedTuple, Self

from parashard.errors import DamagedCheckpoint, NewerFormat, StoreFailed, WrongRun
from parashard_server.durability.write_ahead_log.records import HEADER_BYTES, LogIdentity, SegmentHeader, decode_header

CHECK_BYTES = 256 << 10  # written between two checks of the free space
RESERVED_BYTES_MAX = 64 << 20

_NAME = re.compile(r"i([0-9]{8,20})-n([0-9]{8,20})-p([0-9]{12,20})\.log")


def segment_name(incarnation: int, number: int, first_position: int) -> str:
    """Return the file name of a segment; its position supersedes older segments from there on."""
    return f"i{incarnation:08d}-n{number:08d}-p{first_position:012d}.log"


class SegmentFile:
    """A segment that is being written.

    Parameters
    ----------
    descriptor : int
        Owned by this object.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unchecked_bytes = CHECK_BYTES

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create the file; OSError if it exists."""
        return cls(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600))

    def write(self, *pieces: bytes | memoryview) -> None:
        """Write the pieces end to end, without joining them; OSError may leave a part of them.

        Fails before the disk is full, to leave space for claims, records and checkpoints.
        """
        left = [memoryview(piece) for piece in pieces if memoryview(piece).nbytes]
        if self._unchecked_bytes >= CHECK_BYTES:
            self._unchecked_bytes = 0
            check_free_space(os.fstatvfs(self._descriptor))
        self._unchecked_bytes += sum(piece.nbytes for piece in left)
        while left:
            written = os.writev(self._descriptor, left)
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if left:  # a kernel writes at most 2 GiB in one call
                left[0] = left[0][written:]

    def sync(self) -> None:
        """Sync all written bytes to the disk."""
        os.fdatasync(self._descriptor)

    def duplicate(self) -> Self:
        """Return another handle of the same file, which can be synced after this one is closed."""
        return type(self)(os.dup(self._descriptor))

    def close(self) -> None:
        """Close this handle. An error is ignored: durable data was synced before."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def check_free_space(disk: os.statvfs_result) -> None:
    """Raise OSError if less than the reserve is free: an eighth of the disk, at most `RESERVED_BYTES_MAX`."""
    room_bytes, size_bytes = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    least_bytes = min(RESERVED_BYTES_MAX, size_bytes // 8)
    if room_bytes < least_bytes:
        text = f"{room_bytes / 2**20:.1f} MiB are left on the disk, and a log leaves {least_bytes / 2**20:.1f} MiB"
        raise OSError(errno.ENOSPC, text)


class Segment(NamedTuple):
    """A segment in a folder, by its file name; `read_header` checks its content.

    Attributes
    ----------
    first_position : int
        Of its first record.
    stop : int or None
        The first position of a later segment; None in the newest. A restarted shard begins its segment where its
        replay ended, so records of an older incarnation from there on are invalid, even if written later.
    """

    path: Path
    incarnation: int
    number: int
    first_position: int
    stop: int | None

    def read_header(self, identity: LogIdentity) -> SegmentHeader:
        """Return the header.

        Raises
        ------
        NewerFormat
            If a later version wrote it.
        DamagedCheckpoint
            If it does not match the file name.
        WrongRun
            If it is of another run, plan or shard.
        OSError
            If the file cannot be read.
        """
        with self.path.open("rb") as file:
            content = file.read(HEADER_BYTES)
        try:
            header = decode_header(content)
        except NewerFormat as error:
            raise NewerFormat(f"{self.path}: {error.message}") from None
        if (header.incarnation, header.number, header.first_position) != self._order:
            raise DamagedCheckpoint(
                f"the header is of {segment_name(header.incarnation, header.number, header.first_position)}"
            )
        if (header.run_mark, header.plan_version, header.shard) != (
            identity.run_mark,
            identity.plan_version,
            identity.shard,
        ):
            whose = "this run" if header.run_mark == identity.run_mark else "another run"
            raise WrongRun(
                f"{self.path}: a log of {whose}, plan {header.plan_version}, shard {header.shard}; this is shard "
                f"{identity.shard} of plan {identity.plan_version} of run {identity.run_id}"
            )
        return header

    @property
    def _order(self) -> tuple[int, int, int]:
        return self.incarnation, self.number, self.first_position


def find_segments(folder: Path) -> list[Segment]:
    """Return the segments of a folder, oldest incarnation first; none if there is no folder.

    Raises
    ------
    StoreFailed
        If the folder cannot be read.
    """
    segments: list[Segment] = []
    stop: int | None = None
    for incarnation, number, first_position in sorted(_names(folder), reverse=True):
        path = folder / segment_name(incarnation, number, first_position)
        segments.append(Segment(path, incarnation, number, first_position, stop))
        stop = first_position if stop is None else min(stop, first_position)
    return segments[::-1]


def _names(folder: Path) -> list[tuple[int, int, int]]:
    try:
        entries = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreFailed(f"{folder}: cannot list the push log: {error.strerror}") from None
    names = [(int(name[1]), int(name[2]), int(name[3])) for name in map(_NAME.fullmatch, entries) if name]
    return [name for name in names if segment_name(*name) in entries]  # canonical names only: not 007 for 7
