"""A slice comes out of its bytes within its encoding's bound; bytes that cannot be right are refused."""

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.encodings import codec
from parashard.encodings.codec import decode, warm_up
from parashard.encodings.encoding import Encoding
from parashard.errors import InvalidRequest, MalformedFrame, NonFiniteGradient
from parashard.plan.partition import Partition
from parashard.plan.variables import Float32s, Variable
from parashard.protocol.messages import DType, Slice
from support.encoding_cases import drawn, gradients
from support.tiers import fewer

TEXTS = ("float32", "bfloat16", "float16", "int8", "topk:0.1")


def slice_of(text: str, elements: int) -> Slice:
    return Encoding.parse(text).slice_of(Partition("w", 0, elements), 1)


def encoded(piece: Slice, values: Float32s) -> tuple[bytearray, Float32s]:
    """Return (bytes, what they leave out)."""
    payload, left = np.empty(piece.size_bytes, np.uint8), np.zeros(piece.elements, np.float32)
    codec.encode(piece, values, payload, np.zeros_like(left), left)
    return bytearray(payload), left


def decoded(piece: Slice, payload: bytes | bytearray | memoryview) -> Float32s:
    into = np.full(piece.elements, np.nan, np.float32)
    decode(piece, memoryview(payload), into)
    return into


@pytest.mark.parametrize("text", TEXTS)
@fewer(4)
@given(values=gradients(st.integers(1, 600)))
def test_what_is_decoded_and_what_is_left_out_are_the_gradient(text, values):
    piece = slice_of(text, values.size)
    payload, left = encoded(piece, values)
    found = decoded(piece, payload)
    if piece.dtype in (DType.BFLOAT16, DType.FLOAT16):
        exact = np.clip(values, -65504, 65504) if piece.dtype is DType.FLOAT16 else values.astype(np.float64)
        bits, smallest = (8, 0.0) if piece.dtype is DType.BFLOAT16 else (11, 2.0**-25)
        assert (np.abs(found - exact) <= np.maximum(np.abs(exact) * 2.0**-bits, max(smallest, 2.0**-134))).all()
    else:  # exact but for the rounding of two sums
        np.testing.assert_allclose(found.astype(np.float64) + left, values, rtol=2.0**-22)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("offset", range(4))
def test_a_slice_may_lie_at_any_address_and_is_not_written_to(text, offset):
    values = drawn(0, 1001)
    piece = slice_of(text, values.size)
    payload, _ = encoded(piece, values)
    moved = bytes(offset) + bytes(payload) + b"behind"
    found = decoded(piece, memoryview(moved)[offset : offset + len(payload)])
    np.testing.assert_array_equal(found, decoded(piece, payload))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_of_another_length_is_malformed(text, change):
    piece = slice_of(text, 100)
    with pytest.raises(MalformedFrame, match=f"'w'.* has {piece.size_bytes + change} bytes where {piece.size_bytes} w"):
        decoded(piece, bytes(piece.size_bytes + change))


def test_scratch_of_another_length_is_the_callers_mistake():
    piece = slice_of("int8", 100)
    with pytest.raises(ValueError, match="100 elements cannot be decoded into 99"):
        decode(piece, memoryview(bytes(piece.size_bytes)), np.empty(99, np.float32))


@pytest.mark.parametrize(("text", "bits"), [("bfloat16", 0x7F80), ("bfloat16", 0xFFC0), ("float16", 0x7C00)])
def test_an_encoded_value_that_is_not_finite_is_refused(text, bits):
    piece = slice_of(text, 100)
    codes = np.zeros(100, np.uint16)
    codes[99] = bits
    with pytest.raises(NonFiniteGradient, match=r"'w': a slice in \w+ holds NaN or infinity"):
        decoded(piece, codes.tobytes())


@pytest.mark.parametrize("scale", [-1e-9, np.nan, np.inf, -np.inf, 2.7e36])
def test_a_scale_out_of_range_is_malformed(scale):
    piece = slice_of("int8", 300)
    payload = np.array([1, scale], np.float32).tobytes() + bytes([128]) * 300
    with pytest.raises(MalformedFrame, match=r"a scale that is not in \[0, 2.65846e\+36\]"):
        decoded(piece, payload)


def test_no_code_times_the_largest_scale_is_infinite():
    piece = slice_of("int8", 256)
    payload = np.array([np.finfo(np.float32).max / 128], np.float32).tobytes() + bytes([128, 127] * 128)
    assert np.isfinite(decoded(piece, payload)).all()


@pytest.mark.parametrize("indices", [[0, 0], [5, 4], [0, 20], [0, 2**32 - 1], [2**31, 2**31 + 1]])
def test_indices_that_do_not_ascend_within_the_slice_are_malformed(indices):
    piece = Slice(Partition("w", 0, 20), 1, DType.TOPK, 2)
    payload = np.array(indices, np.uint32).tobytes() + np.ones(2, np.float32).tobytes()
    with pytest.raises(MalformedFrame, match="indices that are not ascending, or not below 20"):
        decoded(piece, payload)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_kept_value_that_is_not_finite_is_refused(value):
    piece = Slice(Partition("w", 0, 20), 1, DType.TOPK, 2)
    with pytest.raises(NonFiniteGradient):
        decoded(piece, np.array([0, 1], np.uint32).tobytes() + np.array([1, value], np.float32).tobytes())


class Recorder:
    """Kernels that note what kinds of arrays they were given."""

    def __init__(self) -> None:
        self.kinds: set[tuple[str, tuple[tuple[str, bool], ...]]] = set()

    def __getattr__(self, name: str) -> Callable[..., bool]:
        def kernel(*arrays: np.ndarray) -> bool:
            assert all(array.flags.aligned and array.flags.c_contiguous for array in arrays)
            self.kinds.add((name, tuple((str(array.dtype), array.flags.writeable) for array in arrays)))
            return True

        return kernel


@pytest.mark.parametrize("text", TEXTS)
def test_the_warm_up_meets_every_kind_of_array_that_will_come(text, monkeypatch):
    values = drawn(0, 1001)
    piece = slice_of(text, values.size)
    payload, _ = encoded(piece, values)
    recorder = Recorder()
    monkeypatch.setattr(codec, "kernels", lambda: recorder)
    warm_up([Variable("w", (1001,), encoding=text)])
    before = set(recorder.kinds)
    assert len(before) == (0 if text == "float32" else 2)
    values.flags.writeable = False
    encoded(piece, values)
    for source in (payload, bytes(payload), memoryview(b"x" + payload)[1:]):
        decoded(piece, source)
    assert recorder.kinds == before


def test_a_frozen_variable_needs_no_kernel(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(codec, "kernels", lambda: recorder)
    warm_up([Variable("w", (1001,), encoding="int8", frozen=True)])
    assert recorder.kinds == set()


def test_no_element_kept_is_a_gradient_of_zero():
    piece = Slice(Partition("w", 0, 20), 1, DType.TOPK, 0)
    assert not decoded(piece, b"").any()


@pytest.mark.parametrize("dtype", list(DType))
@given(data=st.data())
def test_any_bytes_are_refused_or_finite(dtype, data):
    kept = data.draw(st.integers(0, 30)) if dtype is DType.TOPK else 0
    piece = Slice(Partition("w", 0, data.draw(st.integers(1, 20))), 1, dtype, kept)
    payload = data.draw(st.binary(min_size=piece.size_bytes, max_size=piece.size_bytes))
    with contextlib.suppress(InvalidRequest):
        assert np.isfinite(decoded(piece, payload)).all()
