"""The bytes of the push log: what is written is read, and nothing else is."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import DamagedCheckpoint, LimitExceeded, NewerFormat
from parashard_server.durability.write_ahead_log.records import (
    HEAD_BYTES,
    HEADER_BYTES,
    SKIPPED,
    ZERO,
    LogIdentity,
    LogRecord,
    decode_head,
    decode_header,
    encode_head,
    encode_header,
    encode_rate,
)
from support.log_cases import IDENTITY, RECORD_BYTES_MAX, head_with

HEADER = encode_header(IDENTITY, incarnation=3, number=2, first_position=70)
SEED = decode_header(HEADER).seed


def head_of(payload: bytes | None, seed: int = SEED) -> bytes:
    view = None if payload is None else memoryview(payload)
    return encode_head(seed, position=7, step=5, payload=view, skipped=False, staleness=2)


def decoded(content: bytes, seed: int = SEED) -> LogRecord:
    head = decode_head(content[:HEAD_BYTES], seed, RECORD_BYTES_MAX)
    return head.record(bytearray(content[HEAD_BYTES:]), seed)


@given(
    gradient=st.none() | st.lists(st.floats(width=32), max_size=8),
    position=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**64 - 1),
    staleness=st.none() | st.integers(0, 2**63 - 1),
    skipped=st.booleans(),
    learning_rate=st.none() | st.floats(allow_nan=False),
)
def test_a_record_comes_back_bit_for_bit(gradient, position, step, staleness, skipped, learning_rate):
    payload = None if gradient is None else np.array(gradient, "<f4").tobytes()
    view = None if payload is None else memoryview(payload)
    rate = encode_rate(learning_rate)
    head = encode_head(
        SEED, position=position, step=step, payload=view, skipped=skipped, staleness=staleness, rate=rate
    )
    record = decoded(head + (payload or b"") + rate)
    assert (record.position, record.step, record.skipped) == (position, step, skipped)
    assert (record.staleness, record.learning_rate) == (staleness, learning_rate)
    assert (None if record.gradient is None else record.gradient.tobytes()) == payload


def test_the_readers_gradient_may_be_overwritten():
    record = decoded(head_of(bytes(8)) + bytes(8))
    record.gradient[:] = 4.0
    assert record.gradient.tolist() == [4.0, 4.0]


def test_a_header_comes_back():
    header = decode_header(HEADER)
    assert (header.run_mark, header.plan_version, header.shard) == (IDENTITY.run_mark, 1, 0)
    assert (header.incarnation, header.number, header.first_position) == (3, 2, 70)


def test_runs_and_jobs_have_marks_of_their_own():  # P2
    marks = {LogIdentity(run, job, 1, 0).run_mark for run in ("a", "ab") for job in ("b", "bb", "c")}
    assert len(marks) == 6


def test_any_changed_bit_of_a_header_is_seen():  # P18
    for bit in range(8 * HEADER_BYTES):
        with pytest.raises(DamagedCheckpoint):
            decode_header(flipped(HEADER, bit))


def test_any_changed_bit_of_a_record_is_seen():  # P18
    content = head_of(b"12345678") + b"12345678"
    for bit in range(8 * len(content)):
        with pytest.raises(DamagedCheckpoint):
            decoded(flipped(content, bit))


def test_a_record_of_another_segment_is_seen():  # a block of a file that was deleted may turn up in this one
    other = decode_header(encode_header(IDENTITY, incarnation=3, number=3, first_position=70)).seed
    for payload in (None, b"", b"12345678"):
        with pytest.raises(DamagedCheckpoint, match="head does not match"):
            decoded(head_of(payload, other) + (payload or b""))


def test_a_later_format_is_named():
    content = HEADER[:4] + struct.pack("<I", 2) + HEADER[8:-4]
    with pytest.raises(NewerFormat, match="a log of format 2, and this version reads format 1"):
        decode_header(content + struct.pack("<I", zlib.crc32(content)))


def test_a_short_header_is_refused():
    for length in range(HEADER_BYTES):
        with pytest.raises(DamagedCheckpoint):
            decode_header(HEADER[:length])


@pytest.mark.parametrize("declared_bytes", [0, 4, 8, 2**20, 2**63])
def test_a_length_is_believed_up_to_the_bound(declared_bytes):
    limit = HEAD_BYTES + 4
    content = head_with(0, declared_bytes, SEED)
    if HEAD_BYTES + declared_bytes <= limit:
        assert decode_head(content, SEED, limit).payload_bytes == declared_bytes
    else:
        with pytest.raises(LimitExceeded, match=rf"declares {HEAD_BYTES + declared_bytes} bytes; allowed are {limit}"):
            decode_head(content, SEED, limit)


@pytest.mark.parametrize(
    ("flags", "payload_bytes"), [(4, 0), (2**31, 0), (ZERO, 4), (SKIPPED | ZERO, 8), (0, 3), (SKIPPED, 5)]
)
def test_what_no_writer_writes_is_refused_whatever_its_checksum(flags, payload_bytes):
    with pytest.raises(DamagedCheckpoint, match=rf"flags {flags:#x} and {payload_bytes} bytes"):
        decode_head(head_with(flags, payload_bytes, SEED), SEED, RECORD_BYTES_MAX)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
