"""The format of a write-ahead log: a segment's header, and a record's head before its payload.

Pure: from values to bytes and back. Knows no file; called by `segments` and `replay`. All numbers are little-endian.

    segment   magic "PSL1", format u32, run 16 bytes, plan u32, shard u32, incarnation u64, number u64,
              first position u64, CRC-32 of all that u32
    record    position u64, step u64, flags u32, staleness i64 (-1: unknown), payload bytes u64,
              CRC-32 of the payload u32, CRC-32 of the head u32, payload: the gradient; with flag 8 what the push
              has for tables (`row_parts`), and its length u64; with flag 4 the learning rate f64; with flag 16 the
              norm of the step's gradient on all shards f64

Each record's checksums are seeded by its segment's, so that a record in a block of another file fails them. The head
has its own checksum to verify the length before it is used: a file that ends inside a record is a torn write, but a
changed length is damage.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from parashard.checkpoints.encoding import newer_format
from parashard.errors import DamagedCheckpoint, LimitExceeded, NewerFormat
from parashard.plan.partition import ELEMENT_BYTES
from parashard.plan.variables import Float32s
from parashard_server.core.update_policies import NO_ROWS
from parashard_server.durability.write_ahead_log.row_parts import decode_rows, encode_rows
from parashard_server.state.rows.tables import Pushed

MAGIC = b"PSL1"
FORMAT = 1
SKIPPED, ZERO, RATED, ROWS, NORMED = 1, 2, 4, 8, 16
"""Flags: the step was skipped; its gradient is zero and has no bytes; it has its own learning rate; rows; a norm."""

_HEADER = struct.Struct("<4sI16sIIQQQ")
_HEAD = struct.Struct("<QQIqQI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
HEAD_BYTES = _HEAD.size + _CHECKSUM.size
_REAL = struct.Struct("<d")
_LENGTH = struct.Struct("<Q")
EXTRA_BYTES = HEAD_BYTES + _LENGTH.size + 2 * _REAL.size
"""What a record has at most besides its gradient and what it has for tables."""


class LogIdentity(NamedTuple):
    """Run, plan and shard of a log; a segment of another one is refused."""

    run_id: str
    job_digest: str
    plan_version: int
    shard: int

    @property
    def run_mark(self) -> bytes:
        """The run and its job, as the 16 bytes in a segment's header."""
        return hashlib.sha256(f"{self.run_id}\0{self.job_digest}".encode()).digest()[:16]


class SegmentHeader(NamedTuple):
    """The first bytes of a segment; `seed` is where its records' checksums start."""

    run_mark: bytes
    plan_version: int
    shard: int
    incarnation: int
    number: int
    first_position: int
    seed: int


class LogRecord(NamedTuple):
    """One applied push.

    Attributes
    ----------
    position : int
        Its position in the log; rises by one with every record, across segments and incarnations.
    gradient : ndarray of float32, shape (elements,), or None
        In the shard's layout, finite; the reader's to overwrite. None: zero everywhere; of no elements: the push moved
        nothing.
    staleness : int or None
        Pushes that were applied between its pull and this push; None: unknown.
    learning_rate : float or None
        The step's own; None: the job's.
    rows : mapping of str to RowGradients
        What the push has for tables.
    norm : float or None
        Of the step's gradient on all shards, where these clip that of its batch.
    """

    position: int
    step: int
    gradient: Float32s | None
    skipped: bool
    staleness: int | None
    learning_rate: float | None = None
    rows: Pushed = NO_ROWS
    norm: float | None = None


class RecordHead(NamedTuple):
    """A record without its payload."""

    position: int
    step: int
    flags: int
    staleness: int
    payload_bytes: int
    payload_checksum: int

    def record(self, payload: bytearray, seed: int) -> LogRecord:
        """Return the record with this payload; its gradient is a view of it.

        Raises
        ------
        DamagedCheckpoint
            If the payload fails its checksum.
        """
        if zlib.crc32(payload, seed) != self.payload_checksum:
            raise DamagedCheckpoint(f"the gradient of step {self.step} does not match its checksum")
        norm_at = len(payload) - (_REAL.size if self.flags & NORMED else 0)
        end = rate_at = norm_at - (_REAL.size if self.flags & RATED else 0)
        rows = NO_ROWS
        if self.flags & ROWS:
            length_at = rate_at - _LENGTH.size
            end = length_at - _LENGTH.unpack_from(payload, length_at)[0] if length_at >= 0 else -1
            if end < 0 or (end and self.flags & ZERO) or end % ELEMENT_BYTES:
                raise DamagedCheckpoint(f"the rows of step {self.step} begin at byte {end} of {len(payload)}")
            rows = decode_rows(memoryview(payload)[end:length_at])
        return LogRecord(
            position=self.position,
            step=self.step,
            gradient=None if self.flags & ZERO else np.frombuffer(payload, "<f4", end // ELEMENT_BYTES),
            skipped=bool(self.flags & SKIPPED),
            staleness=None if self.staleness < 0 else self.staleness,
            learning_rate=_REAL.unpack_from(payload, rate_at)[0] if self.flags & RATED else None,
            rows=rows,
            norm=_REAL.unpack_from(payload, norm_at)[0] if self.flags & NORMED else None,
        )


def encode_header(identity: LogIdentity, incarnation: int, number: int, first_position: int) -> bytes:
    """Return a segment's header."""
    mine = (identity.run_mark, identity.plan_version, identity.shard)
    content = _HEADER.pack(MAGIC, FORMAT, *mine, incarnation, number, first_position)
    return content + _CHECKSUM.pack(zlib.crc32(content))


def decode_header(content: bytes) -> SegmentHeader:
    """Return the header in a segment's first HEADER_BYTES.

    Raises
    ------
    NewerFormat
        If they are the intact header of a later version.
    DamagedCheckpoint
        If they are not a valid header.
    """
    if len(content) < HEADER_BYTES:
        raise DamagedCheckpoint(f"a header has {HEADER_BYTES} bytes, found {len(content)}")
    magic, format_, run_mark, plan_version, shard, incarnation, number, first_position = _HEADER.unpack_from(content)
    (checksum,) = _CHECKSUM.unpack_from(content, _HEADER.size)
    if magic != MAGIC:
        raise DamagedCheckpoint(f"a segment begins with {MAGIC!r}, found {magic!r}")
    if checksum != zlib.crc32(content[: _HEADER.size]):
        raise DamagedCheckpoint("the header does not match its checksum")
    if format_ > FORMAT:
        raise NewerFormat(newer_format("a log", format_, FORMAT))
    if format_ != FORMAT:
        raise DamagedCheckpoint(f"the log has format {format_}; this program reads {FORMAT}")
    return SegmentHeader(run_mark, plan_version, shard, incarnation, number, first_position, checksum)


def encode_payload(
    gradient: Float32s | None,
    rows: Pushed = NO_ROWS,
    learning_rate: float | None = None,
    norm: float | None = None,
) -> list[bytes | memoryview]:
    """Return a record's payload in pieces, of which the large ones are views; a gradient of zeros (None) has none."""
    pieces: list[bytes | memoryview] = []
    if gradient is not None:
        pieces.append(gradient.astype("<f4", copy=False).view(np.uint8).data)
    if rows:
        of_rows = list(encode_rows(rows))
        pieces += [*of_rows, _LENGTH.pack(sum(map(len, of_rows)))]
    pieces += [_REAL.pack(number) for number in (learning_rate, norm) if number is not None]
    return pieces


def encode_head(
    seed: int,
    *,
    position: int,
    step: int,
    payload: Sequence[bytes | memoryview],
    zero: bool = False,
    skipped: bool,
    staleness: int | None,
    rows: bool = False,
    rated: bool = False,
    normed: bool = False,
) -> bytes:
    """Return the head of a record with this payload; `zero`, `rows`, `rated` and `normed` say what is in it."""
    flags = SKIPPED * skipped | ZERO * zero | RATED * rated | ROWS * rows | NORMED * normed
    stale = -1 if staleness is None else staleness
    checksum = seed
    for piece in payload:
        checksum = zlib.crc32(piece, checksum)
    head = _HEAD.pack(position, step, flags, stale, sum(map(len, payload)), checksum)
    return head + _CHECKSUM.pack(zlib.crc32(head, seed))


def decode_head(content: bytes, seed: int, record_bytes_max: int) -> RecordHead:
    """Return the verified head in HEAD_BYTES of a segment.

    Raises
    ------
    DamagedCheckpoint
        If they are not a valid head of this segment.
    LimitExceeded
        If the record is longer than `record_bytes_max`.
    """
    (checksum,) = _CHECKSUM.unpack_from(content, _HEAD.size)
    if checksum != zlib.crc32(content[: _HEAD.size], seed):
        raise DamagedCheckpoint("the record's head does not match its checksum")
    head = RecordHead(*_HEAD.unpack_from(content))
    if HEAD_BYTES + head.payload_bytes > record_bytes_max:
        raise LimitExceeded(
            f"the record declares {HEAD_BYTES + head.payload_bytes} bytes; allowed are {record_bytes_max}"
        )
    if head.flags & ~(SKIPPED | ZERO | RATED | ROWS | NORMED) or not _fits(head):
        raise DamagedCheckpoint(f"a record with flags {head.flags:#x} and {head.payload_bytes} bytes of gradient")
    return head


def _fits(head: RecordHead) -> bool:
    """Tell whether a payload can have so many bytes; where it has rows, they say themselves where they begin."""
    left = head.payload_bytes - _REAL.size * (bool(head.flags & RATED) + bool(head.flags & NORMED))
    if head.flags & ROWS:
        return left >= _LENGTH.size
    return left == 0 if head.flags & ZERO else left >= 0 == left % ELEMENT_BYTES
