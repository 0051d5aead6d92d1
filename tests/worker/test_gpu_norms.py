"""Norms and weighing on a GPU have NumPy's bits: the kernels compiled for this CPU, and, with one, on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parashard.client.pulled import aligned
from parashard.plan.flat import FlatLayout
from parashard.plan.variables import Variable, global_norm, norm_of
from parashard_worker.gpu_copies import weigh_kernel
from parashard_worker.gpu_norms import Norms, Pairs
from support.encoding_cases import drawn

SIZES = (1, 7, 8, 9, 15, 16, 127, 128, 129, 136, 255, 256, 257, 1000, 1033, 4099, 70_001)


def norms_of(cupy: Any, gradients: dict[str, np.ndarray]) -> dict[str, float]:
    layout = FlatLayout.of({name: Variable(name, gradient.shape) for name, gradient in gradients.items()})
    run = np.full(layout.elements, np.nan, np.float32)  # what lies between is not looked at
    for name, (place, _) in layout.places.items():
        run[place] = gradients[name].reshape(-1)
    stream = cupy.cuda.get_current_stream() if hasattr(cupy, "cuda") else SimpleNamespace(synchronize=lambda: None)
    norms = Norms(cupy, layout, list(gradients), aligned)
    norms.ask(cupy.asarray(run), stream)
    stream.synchronize()
    return dict(norms.squares())


def test_squares_are_added_in_the_order_of_numpy(cupy_somewhere: Any) -> None:
    gradients = {f"v{size}": drawn(size, size) for size in SIZES}
    gradients["shaped"] = drawn(2, 3000).reshape(5, 60, 10)
    gradients["denormal"] = (drawn(3, 500).view(np.uint32) & np.uint32(0x807FFFFF)).view(np.float32)
    gradients["large"] = np.full(300, np.finfo(np.float32).max, np.float32)
    found = norms_of(cupy_somewhere, gradients)
    assert list(found) == sorted(gradients)
    for name, gradient in gradients.items():
        assert norm_of([found[name]]) == global_norm({name: gradient}), name
        assert found[name] == np.square(gradient, dtype=np.float64).sum(), name
    assert found["denormal"] > 0
    assert norm_of(found.values()) == global_norm(gradients)


def test_no_variables_have_no_norm(cupy_somewhere: Any) -> None:
    assert norm_of(norms_of(cupy_somewhere, {}).values()) == 0.0


@pytest.mark.parametrize("numbers", [0, 5, 128, 129, 1000, 1 << 20, (1 << 20) + 3])
def test_parts_are_whole_and_short(numbers: int) -> None:
    lengths = Pairs(numbers).lengths
    assert lengths.sum() == numbers
    assert lengths.max() <= 128
    assert numbers <= 128 or lengths.min() >= 64


@pytest.mark.parametrize("weight", [0.3, 1e-38, 3e38, 2.0**-149])
def test_weighing_rounds_as_the_host_does(cupy_somewhere: Any, weight: float) -> None:
    values, kinds = drawn(1, 1000), np.arange(1000, dtype=np.uint8) % 3
    values[:300] = (values[:300].view(np.uint32) & np.uint32(0x807FFFFF)).view(np.float32)
    there = cupy_somewhere.asarray(values)
    weigh_kernel(cupy_somewhere)(cupy_somewhere.asarray(kinds), np.float32(weight), there)
    with np.errstate(over="ignore"):
        values[kinds == 2] *= np.float32(weight)
    np.testing.assert_array_equal(np.array(there.get()).view(np.uint32), values.view(np.uint32))


def test_sums_of_squares_are_added_alike_whatever_type_they_have() -> None:
    """Python's `sum` adds its own floats more exactly than NumPy's from 3.12 on."""
    small = [1.0, 2.0**-53, 2.0**-53]
    assert norm_of(small) == norm_of(np.array(small)) == 1.0
