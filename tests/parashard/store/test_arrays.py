"""Arrays as a file's content: the bytes that safetensors itself would write, and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from safetensors.numpy import save

from parashard.store.arrays import from_bytes, to_bytes

DTYPES = ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"]
arrays = st.builds(
    lambda dtype, shape: np.arange(np.prod(shape)).astype(dtype).reshape(shape),
    st.sampled_from(DTYPES),
    array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), arrays, max_size=9))
def test_a_content_is_that_of_the_library_and_comes_back(by_name: dict[str, np.ndarray]) -> None:
    content = bytes(to_bytes(by_name))
    assert content == save(by_name)
    found = from_bytes(content)
    assert found.keys() == by_name.keys()
    for name, array in found.items():
        assert array.dtype == by_name[name].dtype
        np.testing.assert_array_equal(array, by_name[name])


def test_what_is_no_content_is_refused() -> None:
    with pytest.raises(ValueError, match="header"):
        from_bytes(b"{}")
