"""Compiled loops refuse what does not fit, round scalars as NumPy does, and depend on every file of their folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard_server.state.kernels import compiling, fused, rules
from support.kernel_cases import drawn, update


def test_code_depends_on_every_file_of_the_kernels() -> None:
    files = set(Path(rules.__file__).parent.glob("*.py"))
    assert len(files) > 5
    assert all(set(declared._sources) == files for declared in compiling.LOOPS.values())


def arrays_of(**changed: np.ndarray) -> list[np.ndarray]:
    """Return the vectors of `adagrad`, some of them changed."""
    arrays = {name: np.ones(10, np.float32) for name in ("weights", "gradient", "accumulator")}
    return list((arrays | changed).values())


@pytest.mark.parametrize("name", ["weights", "gradient", "accumulator"])
@pytest.mark.parametrize(
    "array",
    [
        np.ones(9, np.float32),
        np.ones(11, np.float32),
        np.ones(20, np.float32)[::2],
        np.ones(10, np.float64),
        np.ones((10, 1), np.float32),
        np.array(1.0, np.float32),
    ],
    ids=["shorter", "longer", "with gaps", "float64", "two dimensions", "no dimension"],
)
def test_arrays_that_do_not_fit_are_refused_untouched(name: str, array: np.ndarray) -> None:
    arrays = arrays_of(**{name: array})
    before = [a.tobytes() for a in arrays]
    with pytest.raises(ValueError, match="contiguous and of one length"):
        update(fused, "adagrad", *arrays, learning_rate=0.1, epsilon=1e-8, weight_decay=0.0, clip=np.inf, scale=1.0)
    assert [a.tobytes() for a in arrays] == before


@pytest.mark.parametrize("last", [np.ones(9, np.float32), np.ones(20, np.float32)[::2]])
def test_lamb_refuses_them_too(last: np.ndarray) -> None:
    vectors = [np.ones(10, np.float32) for _ in range(3)]
    settings: dict[str, Any] = dict.fromkeys(("learning_rate", "epsilon", "weight_decay", "clip", "scale"), 1.0)
    with pytest.raises(ValueError, match=r"lamb: vectors must be contiguous and of one length"):
        update(fused, "lamb", *vectors, last, beta1=0.9, beta2=0.9, t=1, **settings)
    assert all((vector == 1.0).all() for vector in vectors)


@pytest.mark.parametrize("slot", [0, 3, 16])
def test_a_slot_of_rows_has_one_number_for_each(slot: int) -> None:
    arrays = [np.ones(8, np.float32), np.ones(8, np.float32), np.ones(slot, np.float32)]
    values: dict[str, Any] = dict.fromkeys(("learning_rate", "epsilon", *rules.OF_PREPARED), 1.0)
    with pytest.raises(ValueError, match="rowwise_adagrad: vectors must be"):
        fused.update("rowwise_adagrad", values, *arrays)
    assert all((array == 1.0).all() for array in arrays)


def test_one_element_has_any_stride() -> None:
    weights, gradient = np.ones(8, np.float32)[::8], np.ones(8, np.float32)[::8]
    fused.accumulate(weights, gradient)
    assert weights.tolist() == [2.0]


def test_a_gradient_may_begin_at_any_byte() -> None:
    gradient = np.frombuffer(b"\0" + drawn(2, 100).tobytes(), np.float32, offset=1)
    total, expected = drawn(1, 100), drawn(1, 100)
    fused.accumulate(total, gradient)
    assert total.tobytes() == (expected + gradient).tobytes()


@pytest.mark.parametrize("value", [0.1, 1 / 3, -2.5e-42, 3.4028235e38, 1e39, -np.inf, np.nan, -0.0])
def test_a_scalar_is_rounded_as_numpy_does(value: float) -> None:
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    weights, expected = np.full(3, 2.0, np.float32), np.full(3, 2.0, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        expected -= rounded * expected
    fused.decay(weights, value)
    assert weights.tobytes() == expected.tobytes()
