"""The arithmetic of the encodings: compared with NumPy's own and with the bits, and compiled as in the reference."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.encodings import compiled
from support import encoding_reference as reference
from support.encoding_cases import KERNELS, LARGEST, drawn, gradients

SIZES = (0, 1, 7, 255, 256, 257, 5000)
both = pytest.mark.parametrize("kernels", KERNELS, ids=["reference", "compiled"])


def halves(kernels: Any, kind: str, values: np.ndarray) -> np.ndarray:
    codes = np.empty(values.size, np.uint16)
    getattr(kernels, f"to_{kind}")(values, codes)
    return codes


def back(kernels: Any, kind: str, codes: np.ndarray) -> tuple[np.ndarray, bool]:
    values = np.empty(codes.size, np.float32)
    return values, getattr(kernels, f"from_{kind}")(codes, values)


def int8(kernels: Any, values: np.ndarray, residue: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (scales, codes, left)."""
    scales = np.empty(-(-values.size // 256), np.float32)
    codes, left = np.empty(values.size, np.int8), np.empty(values.size, np.float32)
    kernels.to_int8(values, residue, scales, codes, left)
    return scales, codes, left


def topk(kernels: Any, values: np.ndarray, residue: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (indices, values kept, left)."""
    indices, largest = np.empty(kept, np.uint32), np.empty(kept, np.float32)
    left = np.empty(values.size, np.float32)
    kernels.to_topk(values, residue, indices, largest, left)
    return indices, largest, left


def assert_same_bits(found: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


# --- bfloat16 ---


def nearest_bfloat16(value: float) -> int:
    """Return the code whose value is nearest, of two as near the even one, by trying both that it may be."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    below = bits >> 16
    candidates = [code for code in (below, below + 1) if code & 0x7FFF <= 0x7F7F] or [below]

    def distance(code: int) -> tuple[float, int]:
        (candidate,) = struct.unpack("<f", struct.pack("<I", code << 16))
        return abs(candidate - value), code & 1

    return min(candidates, key=distance)


@both
@given(gradients(st.integers(1, 40)))
def test_bfloat16_is_the_nearest_ties_to_even(kernels, values):
    assert halves(kernels, "bfloat16", values).tolist() == [nearest_bfloat16(float(value)) for value in values]


@both
def test_every_finite_bfloat16_comes_back(kernels):
    codes = np.arange(1 << 16, dtype=np.uint16)
    codes = codes[codes & 0x7FFF <= 0x7F7F]
    values, finite = back(kernels, "bfloat16", codes)
    assert finite
    np.testing.assert_array_equal(halves(kernels, "bfloat16", values), codes)


# --- float16 ---


@both
@given(gradients(st.integers(1, 40)))
def test_float16_is_numpys_but_never_infinite(kernels, values):
    expected = np.clip(values, -65504, 65504).astype(np.float16)
    np.testing.assert_array_equal(halves(kernels, "float16", values), expected.view(np.uint16))


@both
def test_every_finite_float16_comes_back(kernels):
    codes = np.arange(1 << 16, dtype=np.uint16)
    codes = codes[codes & 0x7FFF <= 0x7BFF]
    values, finite = back(kernels, "float16", codes)
    assert finite
    np.testing.assert_array_equal(values.view(np.uint32), codes.view(np.float16).astype(np.float32).view(np.uint32))
    np.testing.assert_array_equal(halves(kernels, "float16", values), codes)


@both
@pytest.mark.parametrize(("kind", "infinity"), [("bfloat16", 0x7F80), ("float16", 0x7C00)])
@pytest.mark.parametrize("extra", [0, 1, 0x8000])
def test_a_value_that_is_not_finite_is_seen(kernels, kind, infinity, extra):
    codes = np.zeros(100, np.uint16)
    codes[77] = infinity + extra
    assert not back(kernels, kind, codes)[1]
    codes[77] = (infinity + extra & 0x8000) | (infinity - 1)
    assert back(kernels, kind, codes)[1]


# --- int8 ---


@both
@given(gradients(st.integers(1, 600)))
def test_int8_is_off_by_half_a_scale_at_most(kernels, values):
    scales, codes, left = int8(kernels, values, np.zeros_like(values))
    decoded = np.empty_like(values)
    kernels.from_int8(scales, codes, decoded)
    assert np.isfinite(decoded).all()
    assert np.isfinite(left).all()
    assert codes.min() >= -127
    scale = np.repeat(scales.astype(np.float64), 256)[: values.size]
    ulp = np.abs(values).astype(np.float64) * 2.0**-23  # x / scale and code times scale are rounded too
    cut = np.where(scale == reference.INT8_SCALE_LARGEST, LARGEST / 127, 0.0)
    dropped = np.where(scale == 0, 127 * float(np.finfo(np.float32).tiny), 0.0)
    error = np.abs(values.astype(np.float64) - decoded)
    assert (error <= scale / 2 + 2 * ulp + cut + dropped).all()
    np.testing.assert_array_equal(left, values - decoded)


@both
def test_the_largest_of_a_block_has_code_127(kernels):
    values = np.linspace(-3, 2, 300, dtype=np.float32)
    scales, codes, _ = int8(kernels, values, np.zeros_like(values))
    np.testing.assert_array_equal(scales, np.abs([values[0], values[-1]]) / np.float32(127))
    assert (codes[0], codes[-1]) == (-127, 127)


@both
@pytest.mark.parametrize("tiny", [0.0, 2.0**-149, 100 * 2.0**-126])
def test_a_block_too_small_for_a_scale_stays_behind_whole(kernels, tiny):
    values = np.full(256, tiny, np.float32)
    scales, codes, left = int8(kernels, values, np.zeros_like(values))
    assert (scales.tolist(), codes.any()) == ([0.0], False)
    np.testing.assert_array_equal(left, values)


# --- topk ---


@both
def test_topk_keeps_the_largest_and_of_equal_ones_the_first(kernels):
    values = np.array([1, -3, 0, 3, 2, -3, 3], np.float32)
    indices, kept, left = topk(kernels, values, np.zeros_like(values), 3)
    assert (indices.tolist(), kept.tolist(), left.tolist()) == ([1, 3, 5], [-3, 3, -3], [1, 0, 0, 0, 2, 0, 3])


@both
@given(gradients(st.integers(1, 200)), st.data())
def test_topk_sends_or_leaves_every_element_and_none_left_is_larger(kernels, values, data):
    count = data.draw(st.integers(1, values.size))
    indices, kept, left = topk(kernels, values, np.zeros_like(values), count)
    decoded = np.empty_like(values)
    kernels.from_topk(indices, kept, decoded)
    assert (indices[1:] > indices[:-1]).all()
    np.testing.assert_array_equal(decoded + left, values)
    assert not left[indices].any()
    assert np.abs(left).max() <= np.abs(kept).min()


# --- the two are one ---


@given(gradients(st.integers(1, 300)), st.data())
def test_compiled_kernels_have_the_bits_of_the_reference(values, data):
    residue = data.draw(gradients(st.just(values.size)))
    count = data.draw(st.integers(1, values.size))
    for kind in ("bfloat16", "float16"):
        assert_same_bits((halves(compiled, kind, values),), (halves(reference, kind, values),))
    assert_same_bits(int8(compiled, values, residue), int8(reference, values, residue))
    assert_same_bits(topk(compiled, values, residue, count), topk(reference, values, residue, count))


@pytest.mark.parametrize("size", SIZES)
def test_compiled_kernels_have_the_bits_of_the_reference_at_every_length(size):
    values, residue = drawn(1, size), drawn(2, size)
    for kind in ("bfloat16", "float16"):
        codes = halves(reference, kind, values)
        assert_same_bits((halves(compiled, kind, values),), (codes,))
        assert_same_bits((back(compiled, kind, codes)[0],), (back(reference, kind, codes)[0],))
    encoded = int8(reference, values, residue)
    assert_same_bits(int8(compiled, values, residue), encoded)
    for count in {min(size, 1), size // 3, size}:
        assert_same_bits(topk(compiled, values, residue, count), topk(reference, values, residue, count))
    found, expected = np.empty(size, np.float32), np.empty(size, np.float32)
    compiled.from_int8(*encoded[:2], found)
    reference.from_int8(*encoded[:2], expected)
    assert_same_bits((found,), (expected,))
