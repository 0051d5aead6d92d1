"""Values of scheduled functions: arrays and JSON come out as they went in, anything else is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.api.programs import calls as calls_module
from parashard.api.programs.calls import Calls, Failure, FunctionCall, PerWorker, decoded, encoded
from parashard.errors import BadData, ConfigurationError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(VALUES)
def test_what_json_has_comes_out_as_it_went_in(value: Any) -> None:
    found = decoded(encoded(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_arrays_come_out_as_they_went_in(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    (found, last), turned = decoded(
        encoded(([array, {"x": array[..., None]}], np.swapaxes(array, 0, -1) if shape else array))
    )
    assert (found.dtype, found.shape, found.tolist()) == (array.dtype, shape, array.tolist())
    assert last["x"].shape == (*shape, 1)
    np.testing.assert_array_equal(turned, np.swapaxes(array, 0, -1) if shape else array)


def test_a_number_of_numpy_stays_one() -> None:
    found = decoded(encoded([np.float32(0.1), np.int64(3), np.bool_(True)]))
    assert [type(value) for value in found] == [np.float32, np.int64, np.bool_]
    assert found == [np.float32(0.1), 3, True]


OTHERS = {
    "an object": (object(), "found object"),
    "a set": ({1}, "found set"),
    "text in an array": (np.array(["a"]), "found an array of <U1"),
    "objects in an array": (np.array([None]), "found an array of object"),
    "a masked array": (np.ma.array([1, 2], mask=[False, True]), "found a masked array, and a mask would be lost"),
    "complex numbers": (np.ones(2, np.complex64), "found an array of complex64"),
    "a key that is no text": ({1: 2}, "a dict has a key that is no text"),
    "a function": (print, "found builtin_function_or_method"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_anything_else_is_named(other: str) -> None:
    value, says = OTHERS[other]
    with pytest.raises(ConfigurationError, match=says):
        encoded([{"deep": (value,)}])


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ConfigurationError, match="nested more than"):
        encoded(value)


def test_a_number_of_more_digits_than_python_writes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be written: .*digits"):
        encoded({"scale": 10**5000})


def test_a_value_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "VALUE_BYTES_MAX", 100)
    encoded(np.zeros(100, np.uint8))
    with pytest.raises(ConfigurationError, match="have 101 bytes; allowed are 100"):
        encoded(np.zeros(101, np.uint8))


def test_a_call_its_result_and_its_error(tmp_path: Path) -> None:
    calls = Calls(tmp_path)
    calls.make()
    calls.write(7, FunctionCall("train:step", (np.arange(3), PerWorker(0, "train:data")), {"scale": 2}))
    found = calls.read(7)
    assert (found.function, found.args[0].tolist(), found.kwargs) == ("train:step", [0, 1, 2], {"scale": 2})
    assert found.args[1] == PerWorker(0, "train:data")
    calls.write_error(7, "it raised")
    assert calls.error(7) == Failure("it raised")
    calls.write_error(7, "it raised", "KeyError")
    assert calls.error(7) == Failure("it raised", "KeyError")
    calls.write_result(7, {"loss": 0.5})
    assert (calls.error(7), calls.result(7)) == (None, {"loss": 0.5}), "of a later attempt"
    calls.write(8, FunctionCall("train:step", (), {}))
    assert calls.drop_calls(lambda number: number == 7) > 0
    calls.drop_results(lambda number: False)
    assert sorted(path.name for path in (tmp_path / "calls").iterdir()) == ["7.result", "8.call"]
    calls.drop_result(7)
    with pytest.raises(BadData, match=r"7.result: cannot be read: No such file"):
        calls.result(7)


@pytest.mark.parametrize("content", [b"", b"\x00" * 40, encoded(3)[:-1], encoded([3]).replace(b"list", b"lisp")])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    calls = Calls(tmp_path)
    calls.make()
    (tmp_path / "calls" / "3.result").write_bytes(content)
    with pytest.raises(BadData, match=r"3.result: is damaged"):
        calls.result(3)
