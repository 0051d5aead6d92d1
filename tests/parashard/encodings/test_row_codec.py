"""Gradients of rows, encoded: a row is a function of its own values, and bytes that cannot be right are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.encodings import codec
from parashard.encodings.codec import INT8_SCALE_LARGEST, decode_rows, dtype_of, encode_rows
from parashard.errors import MalformedFrame, NonFiniteGradient
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.optimizers import SGD
from parashard.plan.variables import Float32s
from parashard.protocol.messages import DType, RowSlice
from support.encoding_cases import KERNELS, LARGEST, gradients

DTYPES = [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.INT8]
ENCODED = DTYPES[1:]
both = pytest.mark.parametrize("kernels", KERNELS, ids=["reference", "compiled"])
some_rows = st.tuples(st.integers(1, 9), st.integers(1, 17)).flatmap(
    lambda shape: gradients(st.just(shape[0] * shape[1])).map(lambda flat: flat.reshape(shape))
)


def payload_of(values: Float32s, dtype: DType, rows: slice = slice(None)) -> bytes:
    return b"".join(part[rows].tobytes() for part in encode_rows("user", values, dtype))


def slice_of(values: Float32s, dtype: DType) -> RowSlice:
    return RowSlice("user", len(values), values.shape[1], dtype)


def round_trip(values: Float32s, dtype: DType) -> Float32s:
    return decode_rows(slice_of(values, dtype), memoryview(payload_of(values, dtype)))


def table_of(encoding: str, row_elements: int) -> EmbeddingTable:
    return EmbeddingTable("user", row_elements, SGD(1.0), encoding=encoding)  # type: ignore[arg-type]


def int8(kernels, values: Float32s) -> tuple[Float32s, np.ndarray]:
    scales, codes = np.empty(len(values), np.float32), np.empty(values.size, np.int8)
    kernels.to_int8_rows(values.reshape(-1), scales, codes)
    return scales, codes.reshape(values.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@given(some_rows, st.data())
def test_rows_encoded_together_have_the_bytes_of_each_alone(dtype, values, data):  # P35
    cut = data.draw(st.integers(0, len(values)))
    for rows in (slice(0, cut), slice(cut, None)):
        assert payload_of(values, dtype, rows) == payload_of(values[rows].copy(), dtype)
        piece = slice_of(values[rows], dtype)
        assert len(payload_of(values, dtype, rows)) == piece.size_bytes - piece.keys_bytes <= piece.float32_bytes


@pytest.mark.parametrize("dtype", ENCODED)
@given(some_rows)
def test_what_was_decoded_is_encoded_and_decoded_as_it_is(dtype, values):
    once = round_trip(values, dtype)
    assert np.isfinite(once).all()
    if dtype is DType.INT8:  # max|x| / 127 times 127 may be another number than max|x|
        np.testing.assert_allclose(round_trip(once, dtype), once, rtol=1e-6)
    else:
        assert round_trip(once, dtype).tobytes() == once.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("address", range(4))
def test_rows_may_begin_at_any_address(dtype, address):
    values = np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)
    content = payload_of(values, dtype)
    found = decode_rows(slice_of(values, dtype), memoryview(bytes(address) + content)[address:])
    assert found.flags.aligned
    assert found.tobytes() == round_trip(values, dtype).tobytes()


@given(some_rows)
def test_the_compiled_rows_of_int8_have_the_bits_of_the_reference(values):
    (scales, codes), (expected_scales, expected) = (int8(kernels, values) for kernels in KERNELS)
    assert scales.tobytes() == expected_scales.tobytes()
    assert codes.tobytes() == expected.tobytes()
    decoded = [np.empty(values.size, np.float32) for _ in KERNELS]
    for kernels, into in zip(KERNELS, decoded, strict=True):
        kernels.from_int8_rows(scales, codes.reshape(-1), into)
    assert decoded[0].tobytes() == decoded[1].tobytes()


@both
@given(some_rows)
def test_a_row_of_int8_is_off_by_half_of_its_own_scale_at_most(kernels, values):
    scales, codes = int8(kernels, values)
    assert np.abs(codes.astype(int)).max() <= 127
    wide = values.astype(np.float64)
    due = np.abs(wide).max(1) / 127
    scale = np.where(scales == 0, 2 * 127 * float(np.finfo(np.float32).tiny), scales.astype(np.float64))
    np.testing.assert_allclose(scales[scales > 0], np.minimum(due, LARGEST / 128)[scales > 0], rtol=1e-6)
    error = np.abs(wide - codes.astype(np.float64) * scales.astype(np.float64)[:, None])
    beyond = np.where(due > LARGEST / 128, LARGEST / 127, 0.0)
    assert (error <= (scale / 2 + beyond)[:, None] + np.abs(wide) * 2.0**-22).all()


@both
def test_rows_of_int8_round_to_nearest_and_ties_to_even(kernels):
    values = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.49, -0.51], [0.0] * 8, [2.0**-140] * 8], np.float32)
    scales, codes = int8(kernels, values)
    assert scales.tolist() == [1.0, 0.0, 0.0]
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, 0, -1], [0] * 8, [0] * 8]


@pytest.mark.parametrize("dtype", ENCODED)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_encoded(dtype, wrong):
    values = np.ones((3, 4), np.float32)
    values[1, 2] = wrong
    with pytest.raises(NonFiniteGradient, match="table 'user': the gradient of a row"):
        encode_rows("user", values, dtype)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, -np.inf, LARGEST])
def test_a_scale_that_no_row_has_is_malformed(scale):
    values = np.ones((3, 4), np.float32)
    content = bytearray(payload_of(values, DType.INT8))
    content[4:8] = np.float32(scale).tobytes()
    with pytest.raises(MalformedFrame, match="table 'user': a row has a scale that is not in"):
        decode_rows(slice_of(values, DType.INT8), memoryview(content))


def test_the_greatest_scale_leaves_every_code_finite():
    content = np.float32(INT8_SCALE_LARGEST).tobytes() + np.array([-128, 127], np.int8).tobytes()
    assert np.isfinite(decode_rows(RowSlice("user", 1, 2, DType.INT8), memoryview(content))).all()


@pytest.mark.parametrize(("dtype", "infinity"), [(DType.BFLOAT16, 0x7F80), (DType.FLOAT16, 0x7C00)])
def test_a_half_that_is_not_finite_is_refused(dtype, infinity):
    for code in (infinity, infinity + 1, infinity | 0x8000):
        with pytest.raises(NonFiniteGradient, match="table 'user'"):
            decode_rows(RowSlice("user", 1, 2, dtype), memoryview(np.array([0, code], np.uint16).tobytes()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("off", [-1, 1])
def test_a_payload_of_another_length_is_malformed(dtype, off):
    values = np.ones((3, 4), np.float32)
    content = payload_of(values, dtype)
    with pytest.raises(MalformedFrame, match=f"table 'user': 3 rows in {dtype.name} have {len(content)} bytes, found"):
        decode_rows(slice_of(values, dtype), memoryview((content + b"\0")[: len(content) + off]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_have_no_bytes(dtype):
    values = np.empty((0, 3), np.float32)
    assert payload_of(values, dtype) == b""
    assert round_trip(values, dtype).shape == (0, 3)


@pytest.mark.parametrize(
    ("encoding", "row_elements", "dtype"),
    [
        ("float32", 4, DType.FLOAT32),
        ("bfloat16", 1, DType.BFLOAT16),
        ("float16", 4, DType.FLOAT16),
        ("int8", 2, DType.INT8),
        ("int8", 1, DType.FLOAT32),
    ],
)
def test_a_row_of_one_number_needs_no_scale(encoding, row_elements, dtype):
    table = table_of(encoding, row_elements)
    assert dtype_of(table) is dtype
    piece = RowSlice("user", table.keys_per_step_max, row_elements, dtype)
    assert piece.size_bytes <= table.push_bytes_max == piece.float32_bytes
    codec.warm_up_rows([table])
