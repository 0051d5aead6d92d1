"""Frames: what goes in comes out, the payload lies where it can be read in place, and bounds are checked first."""

import struct
from typing import get_args
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard._proto import tensor_pb2
from parashard.errors import LimitExceeded, MalformedFrame
from parashard.plan.embedding import RowDtype, kept_as, kept_dtype
from parashard.plan.partition import Partition
from parashard.protocol import wire
from parashard.protocol.messages import (
    MESSAGE_BYTES_MAX,
    Ack,
    Buffers,
    DType,
    FoundRows,
    PullRun,
    Push,
    PushResult,
    RowSlice,
    Slice,
    Target,
    VectorRun,
    Weights,
)

u32s, u64s = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
targets = st.builds(Target, texts, texts, u32s, u32s, u64s)
partitions = st.tuples(texts, u64s, u64s).filter(lambda p: p[1] < p[2]).map(lambda p: Partition(*p))
slices = st.one_of(
    st.builds(Slice, partitions, u64s, st.sampled_from([d for d in DType if d is not DType.TOPK]), st.just(0)),
    st.builds(Slice, partitions, u64s, st.just(DType.TOPK), u64s),
)
pushes = st.builds(
    Push,
    target=targets,
    worker=texts,
    step=u64s,
    slices=st.lists(slices, max_size=4).map(tuple),
    skipped=st.booleans(),
    pulled_version=st.none() | u64s,
    payload=st.lists(st.binary(max_size=30), max_size=4).map(Buffers),
    traceparent=st.just(""),
    learning_rate=st.none() | st.floats(min_value=0.0, exclude_min=True),
    void=st.booleans(),
    rows=st.lists(
        st.builds(RowSlice, texts, u64s, u64s, st.sampled_from([d for d in DType if d is not DType.TOPK])), max_size=3
    ).map(tuple),
    norm=st.none() | st.floats(min_value=0.0),
)
acks = st.builds(Ack, st.sampled_from(PushResult), u64s, st.none() | u64s)
pulls = st.builds(
    PullRun,
    targets,
    st.none() | u64s,
    st.none() | u64s,
    u64s,
    u64s,
    st.none() | u64s,
    keys=st.just({}),
    least_version=u64s,
)

TARGET = Target("run", "digest", 1, 0, 1)


def push_of(payload: bytes | memoryview, worker: str = "") -> Push:
    return Push(TARGET, worker, 1, (), False, None, Buffers([payload]))


def framed(push: Push) -> bytes:
    return wire.encode_push(push)[0]


@given(pushes, st.integers(1, 100))
def test_a_push_comes_out_as_it_went_in_whatever_its_messages_hold(push, size_bytes):
    with mock.patch.object(wire, "MESSAGE_BYTES", size_bytes):
        first, rest = wire.encode_push(push)
        header, payload = wire.decode_push(first)
        messages = [payload, *rest]
    assert header.total_bytes == push.payload.nbytes == sum(map(len, messages))
    assert all(len(message) == size_bytes for message in messages[:-1])
    assert 0 <= len(messages[-1]) <= size_bytes
    found = wire.push_from(header, memoryview(b"".join(messages)))
    assert found.payload.whole() == push.payload.whole()
    assert found._replace(payload=push.payload) == push


def test_a_push_that_begins_with_more_than_it_declares_is_malformed():
    header = wire.push_header(push_of(b"abcd"))
    with pytest.raises(MalformedFrame, match="a push of 4 bytes begins with 5"):
        wire.decode_push(wire.encode_frame(header, [memoryview(b"abcde")]))


@given(acks)
def test_an_ack_comes_out_as_it_went_in(ack):
    assert wire.decode_ack(wire.encode_ack(ack)) == ack


@given(pulls)
def test_a_pull_comes_out_as_it_went_in(run):
    assert wire.decode_pull(wire.encode_pull(run)) == run


KEYS = st.dictionaries(texts, st.lists(u64s, max_size=20).map(lambda keys: np.array(keys, np.uint64)), max_size=3)


@given(pulls, KEYS)
def test_the_keys_of_a_pull_come_out_as_they_went_in(run, keys):
    found = wire.decode_pull(wire.encode_pull(run._replace(keys=keys)))
    assert {name: of_table.tolist() for name, of_table in found.keys.items()} == {
        name: of_table.tolist() for name, of_table in keys.items()
    }
    assert found._replace(keys=run.keys) == run


@given(pulls, KEYS, st.integers(1, 4), st.randoms(use_true_random=False), st.sampled_from(get_args(RowDtype)))
def test_rows_come_out_as_they_went_in_behind_a_run(run, keys, elements, random, dtype):
    asked = run._replace(keys=keys, length_bytes=4 + run.length_bytes)
    moved = VectorRun(asked.offset_bytes, memoryview(b"1234"))
    rows = {}
    for name, of_table in keys.items():
        present = np.array([random.random() < 0.5 for _ in of_table], np.bool_)
        values = np.array([random.random() for _ in range(int(present.sum()) * elements)], np.float32)
        rows[name] = FoundRows(present, kept_as(values.reshape(-1, elements), dtype))
    found = wire.decode_weights(wire.encode_weights(Weights(7, (moved,), rows)), asked)
    assert (found.version, found.runs) == (7, (moved,))
    assert list(found.rows) == list(rows)
    for name, (present, values) in rows.items():
        assert found.rows[name].present.tolist() == present.tolist()
        assert found.rows[name].values.dtype == kept_dtype(dtype)
        assert found.rows[name].values.tobytes() == values.tobytes()


TWO = PullRun(TARGET, None, None, 0, 0, keys={"user": np.array([1, 2], np.uint64)})


@pytest.mark.parametrize(
    ("tables", "payload", "says"),
    [
        ([("item", 0, 1)], b"\0", "asked for rows of"),
        ([], b"", "asked for rows of"),
        ([("user", 2**40, 2**20)], b"\3" + bytes(8), rf"rows of {1 + 4 * 2**60} bytes in one answer; allowed are"),
        ([("user", 1, 1)], b"\3" + bytes(4), "2 of the keys have a row, 1 came"),
        ([("user", 2, 1)], b"\7" + bytes(8), ""),
        ([("user", 1, 1)], b"\1" + bytes(5), "runs of 0 bytes in a payload of 1"),
        ([("user", 1, 1)], b"", "runs of 0 bytes in a payload of -5"),
        ([("user", 1, 1, tensor_pb2.DTYPE_FLOAT16)], b"", "payload of -3"),
        ([("user", 1, 1, tensor_pb2.DTYPE_BFLOAT16)], b"", "payload of -3"),
        ([("user", 1, 1, tensor_pb2.DTYPE_INT8)], b"\1" + bytes(4), "rows of table 'user' in the encoding 4"),
        ([("user", 1, 1, 0)], b"\1" + bytes(4), "rows of table 'user' in the encoding 0"),
    ],
)
def test_an_answer_that_is_not_the_rows_asked_for_is_malformed(tables, payload, says):
    reply = tensor_pb2.PullReply(
        tables=[
            tensor_pb2.TableRows(table=name, present=rows, row_elements=n, dtype=dtype)
            for name, rows, n, dtype in ((*table, tensor_pb2.DTYPE_FLOAT32)[:4] for table in tables)
        ]
    )
    frame = wire.encode_frame(reply, [memoryview(payload)] if payload else [])
    if not says:  # bits beyond the keys mean nothing
        assert wire.decode_weights(frame, TWO).rows["user"].present.tolist() == [True, True]
        return
    with pytest.raises((MalformedFrame, LimitExceeded), match=says):
        wire.decode_weights(frame, TWO)


def test_nothing_and_zero_are_told_apart():
    push = push_of(b"")
    for version in (None, 0):  # P16
        pulled = push._replace(pulled_version=version)
        assert wire.push_from(*wire.decode_push(framed(pulled))).pulled_version == version
    for known in (None, 0):
        for round_, step in [(None, 0), (0, None), (0, 0), (None, None)]:  # P11
            run = wire.decode_pull(wire.encode_pull(PullRun(TARGET, round_, step, 0, 0, known)))
            assert (run.round, run.step, run.known_version) == (round_, step, known)
    for staleness in (None, 0):
        ack = Ack(PushResult.APPLIED, 0, staleness)
        assert wire.decode_ack(wire.encode_ack(ack)) == ack


@given(u64s, st.lists(st.floats(width=32), min_size=1, max_size=30), st.data())
def test_weights_come_out_bit_by_bit_where_they_went_in(version, values, data):
    content = np.asarray(values, "<f4").data.cast("B")
    bounds = sorted(data.draw(st.sets(st.integers(0, len(content)), max_size=6)))
    runs = tuple(VectorRun(100 + a, content[a:b]) for a, b in zip(bounds[::2], bounds[1::2], strict=False))
    asked = PullRun(TARGET, None, None, 100, len(content), known_version=0)
    decoded = wire.decode_weights(wire.encode_weights(Weights(version, runs)), asked)
    assert decoded == Weights(version, runs)


@given(st.text("abc", max_size=40), st.binary(max_size=40))
def test_the_payload_is_aligned_and_lies_behind_zeros(worker, payload):
    frame = framed(push_of(payload, worker))
    begin = len(frame) - len(payload)
    (head_bytes,) = struct.unpack_from("<I", frame, 4)
    assert begin % wire.PAYLOAD_ALIGNMENT_BYTES == 0
    assert begin - (8 + head_bytes) < wire.PAYLOAD_ALIGNMENT_BYTES
    assert not any(frame[8 + head_bytes : begin])


def test_the_layout_is_that_of_the_contract():
    frame = wire.encode_weights(Weights(5, (VectorRun(8, memoryview(b"abcd")),)))
    header = b"\x08\x05" + b"\x12\x01\x08" + b"\x1a\x01\x04"
    assert frame == b"PSF1" + b"\x08\x00\x00\x00" + header + b"abcd"
    assert wire.encode_weights(Weights(5, ())) == b"PSF1" + b"\x02\x00\x00\x00" + b"\x08\x05" + bytes(6)


def test_a_decoded_payload_is_a_view_of_the_frame():
    frame = framed(push_of(b"x" * 64))
    _, payload = wire.decode_push(frame)
    assert isinstance(payload, memoryview)
    assert payload.obj is frame


def test_the_largest_message_passes_and_one_more_byte_does_not():
    header = wire.push_header(push_of(bytes(MESSAGE_BYTES_MAX + 1)))
    frame = wire.encode_frame(header, [memoryview(bytes(MESSAGE_BYTES_MAX))])
    assert len(frame) <= wire.FRAME_BYTES_MAX
    assert len(wire.decode_push(frame)[1]) == MESSAGE_BYTES_MAX
    with pytest.raises(LimitExceeded, match=f"{MESSAGE_BYTES_MAX + 1} bytes"):
        wire.decode_push(frame + b"\0")


def test_the_limit_of_a_payload_counts_bytes_whatever_its_elements():
    values = np.zeros(MESSAGE_BYTES_MAX // 4 + 1, np.float32)
    with pytest.raises(LimitExceeded, match=f"{values.nbytes} bytes"):
        wire.encode_weights(Weights(1, (VectorRun(0, values.data),)))


def test_a_header_over_its_bound_is_refused_on_both_sides():
    with pytest.raises(LimitExceeded, match="header"):
        framed(push_of(b"", "w" * wire.HEADER_BYTES_MAX))
    declared = struct.pack("<4sI", wire.MAGIC, wire.HEADER_BYTES_MAX + 1)
    with pytest.raises(LimitExceeded, match="header"):
        wire.decode_frame(declared, tensor_pb2.PushHeader)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"", "at least 8 bytes, found 0"),
        (b"PSF1\0\0\0", "at least 8 bytes, found 7"),
        (b"PSF2" + bytes(12), "begins with b'PSF1', found b'PSF2'"),
        (b"GET / HTTP/1.1\r\n\r\n", "found b'GET '"),
        (b"PSF1" + struct.pack("<I", 100) + bytes(20), "declares 112 bytes before its payload but has 28"),
        (b"PSF1" + struct.pack("<I", 8) + b"\xff" * 8, "not a PushHeader"),
    ],
)
def test_what_is_not_a_frame_is_malformed(frame, says):
    with pytest.raises(MalformedFrame, match=says):
        wire.decode_push(frame)


def test_a_pull_with_a_payload_is_malformed():
    frame = wire.encode_frame(tensor_pb2.PullHeader(), [memoryview(b"abc")])
    with pytest.raises(MalformedFrame, match="a pull of 0 rows has a payload of 3 bytes"):
        wire.decode_pull(frame)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "unknown dtype 0; allowed: 1 to 5"),
        ({"dtype": 6}, "unknown dtype 6; allowed: 1 to 5"),
        ({"dtype": 4, "kept": 1}, "keeps 1 elements, and is not DTYPE_TOPK"),
        ({"dtype": 1, "row_start": 3, "row_stop": 3}, r"the rows \[3, 3\)"),
        ({"dtype": 1, "row_start": 3, "row_stop": 2}, r"the rows \[3, 2\)"),
    ],
)
def test_a_slice_that_cannot_be_is_malformed(fields, says):
    header = tensor_pb2.PushHeader(slices=[tensor_pb2.TensorSlice(**{"variable": "w", "row_stop": 1} | fields)])
    with pytest.raises(MalformedFrame, match=f"slice of 'w'.*{says}"):
        wire.push_from(*wire.decode_push(wire.encode_frame(header)))


@pytest.mark.parametrize(
    ("dtype", "says"), [(0, "unknown dtype 0"), (6, "unknown dtype 6; allowed: 1 to 5"), (5, "are DTYPE_TOPK")]
)
def test_rows_in_an_encoding_that_they_cannot_have_are_malformed(dtype, says):
    header = tensor_pb2.PushHeader(rows=[tensor_pb2.RowSlice(table="user", rows=1, row_elements=2, dtype=dtype)])
    with pytest.raises(MalformedFrame, match=f"the rows of table 'user'.*{says}"):
        wire.push_from(*wire.decode_push(wire.encode_frame(header)))


# --- what a pull is answered with ---

SOME = PullRun(TARGET, None, None, 8, 16, known_version=3)  # bytes [8, 24) of which any part may have moved


def answer_of(*runs: tuple[int, int]) -> tensor_pb2.PullReply:
    return tensor_pb2.PullReply(version=5, run_offsets=[run[0] for run in runs], run_lengths=[run[1] for run in runs])


@pytest.mark.parametrize("runs", [[], [(8, 16)], [(8, 4), (12, 4)], [(12, 0), (20, 4)]], ids=str)
def test_runs_within_what_was_asked_for_are_taken(runs):
    assert wire.runs_within(answer_of(*runs), SOME, sum(length for _, length in runs)) == runs


@pytest.mark.parametrize(
    "runs",
    [
        [(4, 8)],  # begins before what was asked for
        [(8, 20)],  # and ends after it
        [(24, 4)],
        [(16, 4), (8, 4)],  # not ascending
        [(8, 8), (12, 8)],  # overlap
        [(8, 4), (8, 4)],
        [(2**64 - 4, 4)],
        [(8, 2**64 - 8), (2**64 - 4, 12)],  # lengths whose sum would wrap around in 64 bits
    ],
    ids=str,
)
def test_runs_outside_of_what_was_asked_for_are_malformed(runs):
    payload_bytes = sum(length for _, length in runs)
    for claimed_bytes in (payload_bytes, payload_bytes % 2**64):
        with pytest.raises(MalformedFrame, match=r"asked for bytes \[8, 24\)"):
            wire.runs_within(answer_of(*runs), SOME, claimed_bytes)


def test_runs_without_lengths_and_lengths_without_bytes_are_malformed():
    with pytest.raises(MalformedFrame, match="2 runs begin and 1 have a length"):
        wire.runs_within(tensor_pb2.PullReply(run_offsets=[8, 12], run_lengths=[4]), SOME, 4)
    with pytest.raises(MalformedFrame, match="runs of 8 bytes in a payload of 4"):
        wire.runs_within(answer_of((8, 8)), SOME, 4)


def test_a_reader_without_a_version_is_sent_everything():
    asked = SOME._replace(known_version=None)
    part = wire.encode_weights(Weights(5, (VectorRun(8, memoryview(bytes(12))),)))
    [(_, values)] = wire.decode_weights(part, SOME).runs
    with pytest.raises(MalformedFrame, match="asked for 16 bytes, answered with 12"):
        wire.check_answered(asked, values.nbytes)
    wire.check_answered(SOME, values.nbytes)


@pytest.mark.parametrize("result", [0, 4, 99])
def test_a_result_that_we_do_not_know_is_malformed(result):
    frame = wire.encode_frame(tensor_pb2.PushReply(result=result))
    with pytest.raises(MalformedFrame, match=f"unknown result {result}"):
        wire.decode_ack(frame)
