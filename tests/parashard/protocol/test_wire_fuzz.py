"""Arbitrary frames: whatever the bytes, decoding returns a value or says MalformedFrame or LimitExceeded.

And it never believes a length: memory stays within a small multiple of what really arrived.
"""

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parashard.errors import LimitExceeded, MalformedFrame
from parashard.plan.partition import Partition
from parashard.protocol import wire
from parashard.protocol.messages import (
    Ack,
    Buffers,
    FoundRows,
    PullRun,
    Push,
    PushResult,
    Slice,
    Target,
    VectorRun,
    Weights,
)

TARGET = Target("run-1", "d" * 64, 5, 1, 3)
PULL = PullRun(TARGET, 3, 12, 16, 64, 250)
PULL_OF_ROWS = PULL._replace(keys={"user": np.array([3, 9], np.uint64)})
RUNS = (VectorRun(20, memoryview(bytes(8))), VectorRun(40, memoryview(bytes(24))))
PRESENT = FoundRows(np.array([True, False]), np.ones((1, 2), np.float32))
SLICES = (Slice(Partition("w", 0, 2), 3),)
FRAMES: dict[str, bytes] = {
    "push": wire.encode_push(Push(TARGET, "worker-0", 7, SLICES, True, 4, Buffers([bytes(range(10)), bytes(14)])))[0],
    "ack": wire.encode_ack(Ack(PushResult.APPLIED, 9, 2)),
    "pull": wire.encode_pull(PULL),
    "weights": wire.encode_weights(Weights(300, RUNS)),
    "rows": wire.encode_weights(Weights(300, RUNS, {"user": PRESENT})),
}
DECODERS: dict[str, Callable[[bytes], Any]] = {
    "push": lambda frame: wire.push_from(*wire.decode_push(frame)),
    "ack": wire.decode_ack,
    "pull": wire.decode_pull,
    "weights": lambda frame: wire.decode_weights(frame, PULL),
    "rows": lambda frame: wire.decode_weights(frame, PULL_OF_ROWS),
}
kinds = pytest.mark.parametrize("kind", sorted(DECODERS))


def decode_or_refuse(kind: str, frame: bytes) -> None:
    try:
        DECODERS[kind](frame)
    except (MalformedFrame, LimitExceeded):
        return


@kinds
@given(st.binary(max_size=200))
def test_random_bytes(kind, frame):
    decode_or_refuse(kind, frame)


@kinds
@given(st.binary(max_size=60), st.binary(max_size=20))
@example(b"\x0a\x01\xff", b"")  # text that is not UTF-8
def test_random_headers_in_a_sound_frame(kind, header, payload):
    padding = bytes(-(8 + len(header)) % 16)
    decode_or_refuse(kind, struct.pack("<4sI", wire.MAGIC, len(header)) + header + padding + payload)


@kinds
def test_every_truncation(kind):
    for length in range(len(FRAMES[kind])):
        decode_or_refuse(kind, FRAMES[kind][:length])


@kinds
def test_every_single_bit_flipped(kind):
    for bit in range(8 * len(FRAMES[kind])):
        frame = bytearray(FRAMES[kind])
        frame[bit // 8] ^= 1 << bit % 8
        decode_or_refuse(kind, bytes(frame))


@kinds
@given(st.data())
def test_pieces_of_frames_glued_together(kind, data):
    pieces = [
        data.draw(st.sampled_from(sorted(FRAMES.values())))[data.draw(st.integers(0, 30)) :][
            : data.draw(st.integers(0, 60))
        ]
        for _ in range(3)
    ]
    decode_or_refuse(kind, b"".join(pieces))


@kinds
@pytest.mark.parametrize("declared_bytes", [100, wire.HEADER_BYTES_MAX, wire.HEADER_BYTES_MAX + 1, 2**32 - 1])
def test_a_declared_length_allocates_nothing(kind, declared_bytes):
    frame = struct.pack("<4sI", wire.MAGIC, declared_bytes) + bytes(16)
    tracemalloc.start()
    try:
        with pytest.raises((MalformedFrame, LimitExceeded)):
            DECODERS[kind](frame)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16_384


def test_a_push_of_an_exabyte_costs_only_its_frame():
    slices = (Slice(Partition("w", 0, 2**62), 2**60),)
    header = wire.push_header(Push(TARGET, "w", 1, slices, False, None, Buffers()))
    header.total_bytes = 2**63
    frame = wire.encode_frame(header, [memoryview(b"abcd")])
    tracemalloc.start()
    try:
        header, payload = wire.decode_push(frame)
        push = wire.push_from(header, payload)
        assert (header.total_bytes, push.slices[0].elements, bytes(payload)) == (2**63, 2**122, b"abcd")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16_384
