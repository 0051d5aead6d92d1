"""Arrays as safetensors: bfloat16, which NumPy lacks, comes out as it went in, and other readers find BF16."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import save

from parashard.plan.embedding import BFLOAT16, floats_of, kept_as
from parashard.store.arrays import from_bytes, to_bytes, write_arrays

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda name: name != "__metadata__")
dtypes = st.sampled_from([np.dtype("f4"), np.dtype("f2"), np.dtype("u8"), np.dtype("u2"), BFLOAT16])
shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)


def array_of(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return other bytes for each element."""
    size_bytes = int(np.prod(shape)) * dtype.itemsize
    return (np.arange(size_bytes) % 251).astype(np.uint8).view(dtype).reshape(shape)


@given(st.dictionaries(names, st.builds(array_of, dtypes, shapes), max_size=5))
def test_arrays_come_out_as_they_went_in(arrays):
    found = from_bytes(to_bytes(arrays))
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in found.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in arrays.items()
    }


LIBRARY = ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"]


@given(
    st.dictionaries(names, st.builds(array_of, st.sampled_from(LIBRARY).map(np.dtype), shapes), max_size=9),
    st.none() | st.fixed_dictionaries({"about": st.text(max_size=5)}),
)
def test_a_content_is_the_library_s(arrays, about):
    assert bytes(to_bytes(arrays, about)) == save(arrays, about)


def test_another_reader_finds_bfloat16_by_its_name():
    values = kept_as(np.array([[1.5, -2.0]], np.float32), "bfloat16")
    found = dict(deserialize(bytes(to_bytes({"rows": values, "keys": np.array([7], np.uint64)}))))
    assert (found["rows"]["dtype"], list(found["rows"]["shape"])) == ("BF16", [1, 2])
    assert bytes(found["rows"]["data"]) == bytes.fromhex("c03f00c0")
    assert found["keys"]["dtype"] == "U64"


def test_a_file_has_the_same_and_what_a_reader_should_know(tmp_path: Path):
    values = kept_as(np.array([0.5, 3.0, -1.0], np.float32), "bfloat16")
    write_arrays(tmp_path / "it.safetensors", {"rows": values}, {"about": "rows"})
    content = (tmp_path / "it.safetensors").read_bytes()
    assert floats_of(from_bytes(content)["rows"]).tolist() == [0.5, 3.0, -1.0]
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length])["__metadata__"] == {"about": "rows"}


def file_of(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


def entry(dtype: str, elements: int, end: int) -> str:
    return f'{{"dtype": "{dtype}", "shape": [{elements}], "data_offsets": [0, {end}]}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 64,
        file_of("[]"),
        file_of("{"),
        file_of('{"x": 3}'),
        file_of('{"x": {"dtype": "BF16"}}'),
        file_of(f'{{"x": {entry("BF16", 1, 4)}}}', bytes(4)),
        file_of(f'{{"x": {entry("BF16", 1, 2)}}}', b"1"),
        file_of(f'{{"x": {entry("BF17", 1, 2)}}}', bytes(2)),
        file_of(f'{{"x": {entry("F8_E4M3", 1, 1)}}}', b"1"),
    ],
)
def test_what_is_no_such_file_is_refused(content):
    with pytest.raises(ValueError, match=r"."):
        from_bytes(content)


def test_what_a_file_says_of_itself_is_no_array():
    content = file_of(f'{{"__metadata__": {{"dtype": "BF16"}}, "x": {entry("U8", 1, 1)}}}', b"7")
    assert from_bytes(content)["x"].tobytes() == b"7"
