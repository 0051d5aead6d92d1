"""Replay: reads a write-ahead log, record by record, up to its end or the first damage.

Knows files and records; does not know what a push does: recovery pushes the records again, and the shard's applied set
skips those in its checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from parashard.errors import DamagedCheckpoint, LimitExceeded
from parashard_server.durability.write_ahead_log.records import (
    HEAD_BYTES,
    HEADER_BYTES,
    LogIdentity,
    LogRecord,
    decode_head,
)
from parashard_server.durability.write_ahead_log.segments import Segment, find_segments

EndReason = Literal["end", "torn tail", "damage", "gap"]


class LogEnd(NamedTuple):
    """Where a replay ended.

    Attributes
    ----------
    position : int
        Of the first record that was not read: where the next incarnation's log begins.
    reason : str
        "end": everything was read. "torn tail": the last record is incomplete, so it was never acknowledged as
        durable. "damage": a checksum failed. "gap": records are missing before later ones.
    place : str
        File, offset in bytes and what was found there; empty if the log has no file.
    """

    position: int
    reason: EndReason
    place: str


class Replay:
    """A single-use iterator over a log; see `replay`."""

    def __init__(self, folder: Path, identity: LogIdentity, from_position: int, record_bytes_max: int) -> None:
        self._segments = find_segments(folder)
        self._identity = identity
        self._record_bytes_max = record_bytes_max
        self._next = from_position
        self._ended: LogEnd | None = None

    @property
    def ended(self) -> LogEnd:
        """Where and why the replay ended; only after its last record."""
        assert self._ended is not None, "the replay has not been read to its end"
        return self._ended

    def __iter__(self) -> Iterator[LogRecord]:
        """Yield every record in order. Memory: one record."""
        end = LogEnd(self._next, "end", "")
        for segment in self._segments:
            if segment.stop is not None and segment.stop <= self._next:
                continue  # before `from_position`, or superseded by a later incarnation
            if segment.first_position > self._next:
                end = self._end("gap", segment, 0, f"the segment begins with record {segment.first_position}")
            else:
                end = yield from self._records_of(segment)
            if end.reason in ("damage", "gap"):
                break  # after a torn tail the next segment decides: it continues there, or leaves a gap
        self._ended = end

    def _records_of(self, segment: Segment) -> Generator[LogRecord, None, LogEnd]:
        position, offset = segment.first_position, 0
        try:
            size_bytes = segment.path.stat().st_size
            if size_bytes < HEADER_BYTES:
                return self._end("torn tail", segment, 0, f"a header of {size_bytes} bytes")
            header = segment.read_header(self._identity)
            with segment.path.open("rb") as file:
                offset = file.seek(HEADER_BYTES)
                while segment.stop is None or position < segment.stop:
                    content = file.read(HEAD_BYTES)
                    if not content:
                        break
                    if len(content) < HEAD_BYTES:
                        return self._end("torn tail", segment, offset, f"a head of {len(content)} bytes")
                    head = decode_head(content, header.seed, self._record_bytes_max)
                    if head.position != position:
                        raise DamagedCheckpoint(f"record {head.position} lies where {position} belongs")
                    if position < self._next:
                        file.seek(head.payload_bytes, os.SEEK_CUR)
                    else:
                        payload = bytearray(head.payload_bytes)
                        arrived = file.readinto(payload)
                        if arrived < head.payload_bytes:
                            what = f"{arrived} of a gradient's {head.payload_bytes} bytes"
                            return self._end("torn tail", segment, offset, what)
                        record = head.record(payload, header.seed)
                        self._next = position + 1
                        yield record
                    position += 1
                    offset += HEAD_BYTES + head.payload_bytes
        except (OSError, DamagedCheckpoint, LimitExceeded) as error:
            return self._end("damage", segment, offset, str(error))
        return self._end("end", segment, offset, "nothing more")

    def _end(self, reason: EndReason, segment: Segment, offset: int, what: str) -> LogEnd:
        return LogEnd(self._next, reason, f"{segment.path}, byte {offset}: {what}")


def replay(folder: Path, identity: LogIdentity, from_position: int, record_bytes_max: int) -> Replay:
    """Iterate over the records of a log from a position on, once; then `ended` has where and why it ended.

    Parameters
    ----------
    folder : Path
        Folder of the segments; if it does not exist the log is empty.
    from_position : int
        The first wanted record: the `log_position` of the restored checkpoint.
    record_bytes_max : int
        Largest size of a record, head and payload; a larger one is damage, and not allocated.

    Raises
    ------
    WrongRun
        While iterating, if a segment that must be read is of another run, plan or shard.
    StoreFailed
        If the folder cannot be read. A file that cannot be read is damage.
    """
    return Replay(folder, identity, from_position, record_bytes_max)
