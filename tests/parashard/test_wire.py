"""Frames: what goes in comes out, the payload lies where it can be read in place, and bounds are checked first."""

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parashard import wire
from parashard.errors import LimitExceeded, MalformedFrame
from parashard.messages import CHUNK_BYTES_MAX, PullRun, PushChunk, PushResult, Receipt, Slice, Target, Weights
from parashard.partition import Partition
from protos import tensor_pb2

u32s, u64s = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
targets = st.builds(Target, texts, texts, u32s, u32s, u64s)
slices = st.builds(Slice, st.builds(Partition, texts, u64s, u64s), u64s)
pushes = st.builds(
    PushChunk,
    target=targets,
    worker=texts,
    step=u64s,
    attempt=u64s,
    offset_bytes=u64s,
    total_bytes=u64s,
    slices=st.lists(slices, max_size=4).map(tuple),
    skipped=st.booleans(),
    pulled_version=st.none() | u64s,
    payload=st.binary(max_size=100),
)
receipts = st.builds(Receipt, st.sampled_from(PushResult), u64s, st.none() | u64s)
pulls = st.builds(PullRun, targets, st.none() | u64s, st.none() | u64s, u64s, u64s)

TARGET = Target("run", "digest", 1, 0, 1)


def push_of(payload: bytes | memoryview, worker: str = "") -> PushChunk:
    return PushChunk(TARGET, worker, 1, 2, 0, len(payload), (), False, None, payload)


@settings(deadline=None, max_examples=100)
@given(pushes)
def test_a_push_comes_out_as_it_went_in(chunk):
    assert wire.decode_push(wire.encode_push(chunk)) == chunk  # a memoryview equals the bytes that it shows


@settings(deadline=None, max_examples=100)
@given(receipts)
def test_a_receipt_comes_out_as_it_went_in(receipt):
    assert wire.decode_receipt(wire.encode_receipt(receipt)) == receipt


@settings(deadline=None, max_examples=100)
@given(pulls)
def test_a_pull_comes_out_as_it_went_in(run):
    assert wire.decode_pull(wire.encode_pull(run)) == run


def test_nothing_and_zero_are_told_apart():
    push = push_of(b"")
    for version in (None, 0):  # P16
        chunk = dataclasses.replace(push, pulled_version=version)
        assert wire.decode_push(wire.encode_push(chunk)).pulled_version == version
    for round_, step in [(None, 0), (0, None), (0, 0), (None, None)]:  # P11
        run = wire.decode_pull(wire.encode_pull(PullRun(TARGET, round_, step, 0, 0)))
        assert (run.round, run.step) == (round_, step)
    for staleness in (None, 0):
        receipt = Receipt(PushResult.APPLIED, 0, staleness)
        assert wire.decode_receipt(wire.encode_receipt(receipt)) == receipt


@settings(deadline=None, max_examples=50)
@given(u64s, st.lists(st.floats(width=32, allow_nan=False), max_size=30))
def test_weights_come_out_bit_by_bit(version, values):
    array = np.asarray(values, "<f4")
    weights = wire.decode_weights(wire.encode_weights(Weights(version, array.data.cast("B"))))
    assert weights.version == version
    assert bytes(weights.values) == array.tobytes()


@settings(deadline=None, max_examples=60)
@given(st.text("abc", max_size=40), st.binary(max_size=40))
def test_the_payload_is_aligned_and_lies_behind_zeros(worker, payload):
    frame = wire.encode_push(push_of(payload, worker))
    begin = len(frame) - len(payload)
    (head_bytes,) = struct.unpack_from("<I", frame, 4)
    assert begin % wire.PAYLOAD_ALIGNMENT_BYTES == 0
    assert begin - (8 + head_bytes) < wire.PAYLOAD_ALIGNMENT_BYTES
    assert not any(frame[8 + head_bytes : begin])


def test_the_layout_is_that_of_the_contract():
    frame = wire.encode_weights(Weights(5, memoryview(b"abcd")))
    assert frame == b"PSF1" + b"\x02\x00\x00\x00" + b"\x08\x05" + bytes(6) + b"abcd"


def test_a_decoded_payload_is_a_view_of_the_frame():
    frame = wire.encode_push(push_of(b"x" * 64))
    payload = wire.decode_push(frame).payload
    assert isinstance(payload, memoryview)
    assert payload.obj is frame


def test_the_largest_chunk_passes_and_one_more_byte_does_not():
    frame = wire.encode_push(push_of(bytes(CHUNK_BYTES_MAX)))
    assert len(frame) <= wire.FRAME_BYTES_MAX
    assert len(wire.decode_push(frame).payload) == CHUNK_BYTES_MAX
    with pytest.raises(LimitExceeded, match=f"{CHUNK_BYTES_MAX + 1} bytes"):
        wire.encode_push(push_of(bytes(CHUNK_BYTES_MAX + 1)))
    with pytest.raises(LimitExceeded, match=f"{CHUNK_BYTES_MAX + 1} bytes"):
        wire.decode_push(frame + b"\0")


def test_the_limit_of_a_payload_counts_bytes_whatever_its_elements():
    values = np.zeros(CHUNK_BYTES_MAX // 4 + 1, np.float32)
    with pytest.raises(LimitExceeded, match=f"{values.nbytes} bytes"):
        wire.encode_weights(Weights(1, values.data))


def test_a_header_over_its_bound_is_refused_on_both_sides():
    with pytest.raises(LimitExceeded, match="header"):
        wire.encode_push(push_of(b"", "w" * wire.HEADER_BYTES_MAX))
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
    frame = wire.encode_frame(tensor_pb2.PullHeader(), b"abc")
    with pytest.raises(MalformedFrame, match="no payload, found 3 bytes"):
        wire.decode_pull(frame)


def test_a_dtype_that_we_do_not_speak_is_malformed():
    header = tensor_pb2.PushHeader(slices=[tensor_pb2.TensorSlice(variable="w")])
    with pytest.raises(MalformedFrame, match=r"float32.*found dtype 0 for 'w'"):
        wire.decode_push(wire.encode_frame(header))


@pytest.mark.parametrize("result", [0, 5, 99])
def test_a_result_that_we_do_not_know_is_malformed(result):
    frame = wire.encode_frame(tensor_pb2.PushReply(result=result))
    with pytest.raises(MalformedFrame, match=f"unknown result {result}"):
        wire.decode_receipt(frame)
