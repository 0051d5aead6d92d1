"""The bytes of the push log: what is written is read, and nothing else is."""

import struct
import zlib
from contextlib import suppress

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
    encode_payload,
)
from parashard_server.durability.write_ahead_log.row_parts import decode_rows, encode_rows
from parashard_server.state.rows.tables import RowGradients
from support.log_cases import IDENTITY, RECORD_BYTES_MAX, head_with

HEADER = encode_header(IDENTITY, incarnation=3, number=2, first_position=70)
SEED = decode_header(HEADER).seed


def head_of(payload: bytes | None, seed: int = SEED) -> bytes:
    pieces = [] if payload is None else [payload]
    return encode_head(seed, position=7, step=5, payload=pieces, zero=payload is None, skipped=False, staleness=2)


def decoded(content: bytes, seed: int = SEED) -> LogRecord:
    head = decode_head(content[:HEAD_BYTES], seed, RECORD_BYTES_MAX)
    return head.record(bytearray(content[HEAD_BYTES:]), seed)


floats = st.floats(width=32)
tables = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=200),
    st.integers(1, 3).flatmap(
        lambda elements: st.lists(
            st.tuples(st.integers(0, 2**64 - 1), st.lists(floats, min_size=elements, max_size=elements)), max_size=4
        ).map(lambda rows: (elements, rows))
    ),
    max_size=3,
)


def rows_of(drawn: dict) -> dict[str, RowGradients]:
    return {
        name: RowGradients(
            np.array([key for key, _ in rows], np.uint64),
            np.array([row for _, row in rows], np.float32).reshape(len(rows), elements),
        )
        for name, (elements, rows) in drawn.items()
    }


@given(
    gradient=st.none() | st.lists(floats, max_size=8),
    position=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**64 - 1),
    staleness=st.none() | st.integers(0, 2**63 - 1),
    skipped=st.booleans(),
    learning_rate=st.none() | st.floats(allow_nan=False),
    drawn=tables,
    norm=st.none() | st.floats(allow_nan=False),
)
def test_a_record_comes_back_bit_for_bit(gradient, position, step, staleness, skipped, learning_rate, drawn, norm):
    rows = rows_of(drawn)
    values = None if gradient is None else np.array(gradient, np.float32)
    payload = encode_payload(values, rows, learning_rate, norm)
    head = encode_head(
        SEED,
        position=position,
        step=step,
        payload=payload,
        zero=gradient is None,
        skipped=skipped,
        staleness=staleness,
        rows=bool(rows),
        rated=learning_rate is not None,
        normed=norm is not None,
    )
    record = decoded(head + b"".join(payload))
    assert (record.position, record.step, record.skipped) == (position, step, skipped)
    assert (record.staleness, record.learning_rate, record.norm) == (staleness, learning_rate, norm)
    assert (None if record.gradient is None else record.gradient.tobytes()) == (
        None if values is None else values.tobytes()
    )
    assert list(record.rows) == list(rows)
    for name, (keys, values) in record.rows.items():
        assert keys.tobytes() == rows[name].keys.tobytes()
        assert (values.shape, values.tobytes()) == (rows[name].values.shape, rows[name].values.tobytes())


@given(tables, st.integers(0, 400), st.integers(0, 255))
def test_rows_that_are_not_what_was_written_are_damage_or_other_rows(drawn, at, byte):  # no crash, no read beyond
    content = bytearray(b"".join(encode_rows(rows_of(drawn))))
    if content:
        content[at % len(content)] = byte
    with suppress(DamagedCheckpoint):
        decode_rows(memoryview(content))
    with suppress(DamagedCheckpoint):
        decode_rows(memoryview(content)[: at % (len(content) + 1)])


@pytest.mark.parametrize("length", [9, 2**40, 2**64 - 1])
@pytest.mark.parametrize("zero", [False, True])
def test_rows_that_begin_nowhere_are_damage(length, zero):
    pieces = [b"12345678", struct.pack("<Q", length)]
    head = encode_head(SEED, position=7, step=5, payload=pieces, zero=zero, skipped=False, staleness=2, rows=True)
    with pytest.raises(DamagedCheckpoint, match="the rows of step 5 begin"):
        decoded(head + b"".join(pieces))


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
