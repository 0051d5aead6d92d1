"""The value that a job file names, and what a partition's gradient looks like on the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.encodings.encoding import Encoding
from parashard.errors import ConfigurationError
from parashard.plan.partition import Partition
from parashard.protocol.messages import DType, Slice

fractions = st.integers(1, 10**9 // 2 - 1).map(lambda billionths: billionths / 10**9)
encodings = st.one_of(
    st.sampled_from(["float32", "bfloat16", "float16", "int8"]).map(Encoding),
    fractions.map(lambda fraction: Encoding("topk", fraction)),
)


@given(encodings)
def test_an_encoding_comes_out_of_its_text(encoding):
    assert Encoding.parse(str(encoding)) == encoding


def test_the_forms():
    assert [str(Encoding.parse(text)) for text in ("float32", "int8", "topk:0.01", "topk:0.010")] == [
        "float32", "int8", "topk:0.01", "topk:0.01",
    ]  # fmt: skip
    assert Encoding.parse("topk:0.25").dtype is DType.TOPK
    assert [kind for kind in ("float32", "bfloat16", "float16", "int8") if Encoding(kind).has_residue] == ["int8"]
    assert Encoding("topk", 0.1).has_residue


@pytest.mark.parametrize(
    "text",
    ["", "Int8", "int8 ", "int8:2", "topk", "topk:", "topk:0", "topk:0.0", "topk:0.5", "topk:1e-2", "topk:.1",
     "topk:nan", "topk:-0.1", "topk:0.0000000001", "topk:0.1\n"],
)  # fmt: skip
def test_any_other_text_is_refused_with_what_is_allowed(text):
    with pytest.raises(ConfigurationError, match=r"allowed: float32, bfloat16, float16, int8, or topk:FRACTION with"):
        Encoding.parse(text)


@pytest.mark.parametrize(("kind", "fraction"), [("int4", 0.0), ("int8", 0.1), ("topk", 0.0), ("topk", 0.5)])
def test_a_value_that_has_no_text_cannot_be(kind, fraction):
    with pytest.raises(ConfigurationError, match="allowed: float32"):
        Encoding(kind, fraction)


def slice_of(text: str, rows: int, row_elements: int = 1) -> Slice:
    return Encoding.parse(text).slice_of(Partition("w", 0, rows), row_elements)


@pytest.mark.parametrize(
    ("text", "elements", "size_bytes"),
    [
        ("float32", 1000, 4000),
        ("bfloat16", 1000, 2000),
        ("float16", 1000, 2000),
        ("int8", 1000, 4 * 4 + 1000),
        ("int8", 1024, 4 * 4 + 1024),
        ("topk:0.01", 1000, 8 * 10),
        ("topk:0.01", 1001, 8 * 11),
        ("topk:0.01", 3, 8),
        ("topk:0.07", 100, 8 * 7),  # in floats 0.07 * 100 > 7
    ],
)
def test_the_length_on_the_wire(text, elements, size_bytes):
    piece = slice_of(text, elements)
    assert piece.dtype is Encoding.parse(text).dtype
    assert piece.size_bytes == size_bytes
    assert slice_of(text, 1, elements) == Slice(Partition("w", 0, 1), elements, piece.dtype, piece.kept)


@given(encodings, st.integers(1, 5000))
def test_no_slice_is_longer_than_its_gradient(encoding, rows):
    piece = encoding.slice_of(Partition("w", 0, rows), 1)
    assert piece.size_bytes < 4 * rows or (piece.dtype is DType.FLOAT32 and piece.size_bytes == 4 * rows)


def test_what_would_not_get_shorter_or_cannot_be_numbered_goes_as_float32():
    assert slice_of("int8", 1).dtype is DType.FLOAT32
    assert slice_of("int8", 2).dtype is DType.INT8
    assert slice_of("topk:0.01", 2).dtype is DType.FLOAT32
    assert slice_of("topk:0.01", 1 << 16, 1 << 16).dtype is DType.TOPK
    assert slice_of("topk:0.01", 1 << 16, (1 << 16) + 1).dtype is DType.FLOAT32
