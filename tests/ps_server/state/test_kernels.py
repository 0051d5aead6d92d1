"""The fused kernels have the bits of the reference, however the vector is cut; and the folds beside the updates.

Rule P13.
"""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard_server.state.kernels import fused
from support import reference_rules as reference
from support.kernel_cases import COMMON, COUNTING, KERNELS, assert_same_bits, drawn, run, update
from support.tiers import fewer


@pytest.mark.parametrize("size", [0, 1, 7, 1000, 4099])
@pytest.mark.parametrize("kind", KERNELS)
def test_fused_and_reference_give_the_same_bits(kind: str, size: int) -> None:
    expected = run(reference, kind, size)
    assert all(np.isfinite(a).all() for a in expected)
    assert_same_bits(run(fused, kind, size), expected)


@pytest.mark.parametrize("kernels", [fused, reference])
@pytest.mark.parametrize("kind", [k for k in KERNELS if k != "lamb"])
@given(cuts=st.lists(st.integers(0, 1003), max_size=6).map(lambda cuts: tuple(sorted(cuts))))
@fewer(4)
def test_a_cut_changes_no_bit(kind: str, kernels: Any, cuts: tuple[int, ...]) -> None:
    assert_same_bits(run(kernels, kind, 1003, cuts), run(kernels, kind, 1003))


def test_lamb_sees_the_whole_variable() -> None:
    assert not np.array_equal(run(fused, "lamb", 1000, (300,))[0], run(fused, "lamb", 1000)[0])


@pytest.mark.parametrize("kernels", [fused, reference])
@pytest.mark.parametrize("kind", KERNELS)
def test_the_gradient_is_scaled_then_clipped_and_only_read(kernels: Any, kind: str) -> None:
    slots, own = KERNELS[kind]
    counter = {"t": 1} if kind in COUNTING else {}
    results = []
    for gradient, clip, scale in (([8.0, -8.0, 1.0], 0.5, 0.25), ([0.5, -0.5, 0.25], math.inf, 1.0)):
        arrays = [np.array([1.0, -2.0, 3.0], np.float32), *(np.zeros(3, np.float32) for _ in range(slots))]
        pushed = np.array(gradient, np.float32)
        pushed.flags.writeable = False
        update(kernels, kind, arrays[0], pushed, *arrays[1:], **COMMON | own | counter | {"clip": clip, "scale": scale})
        results.append(arrays)
    assert_same_bits(*results)
    assert not np.array_equal(results[0][0], [1.0, -2.0, 3.0])


@pytest.mark.parametrize("kernels", [fused, reference])
def test_sgd_at_minus_one_counts_exactly(kernels: Any) -> None:
    weights = np.zeros(5, np.float32)
    for i in (0, 3, 3, 4):
        one = np.eye(5, dtype=np.float32)[i]
        update(kernels, "sgd", weights, one, learning_rate=-1.0, weight_decay=0.0, clip=math.inf, scale=1.0)
    assert weights.tolist() == [1.0, 0.0, 0.0, 2.0, 1.0]


@pytest.mark.parametrize("kernels", [fused, reference])
@pytest.mark.parametrize("kind", [k for k in KERNELS if k != "ftrl"])
def test_a_zero_gradient_without_decay_leaves_fresh_weights(kernels: Any, kind: str) -> None:
    slots, own = KERNELS[kind]
    counter = {"t": 1} if kind in COUNTING else {}
    weights, zeros = drawn(0, 50), np.zeros(50, np.float32)
    state = [np.zeros(50, np.float32) for _ in range(slots)]
    update(kernels, kind, weights, zeros, *state, **COMMON | own | counter | {"weight_decay": 0.0})
    assert_same_bits([weights], [drawn(0, 50)])  # and no 0 / 0


@pytest.mark.parametrize("kernels", [fused, reference])
def test_ftrl_at_a_vanishing_rate_changes_nothing(kernels: Any) -> None:
    for array, before in zip(
        run(kernels, "ftrl", 20, learning_rate=0.0),
        [drawn(0, 20), np.zeros(20, np.float32), np.zeros(20, np.float32)],
        strict=True,
    ):
        assert_same_bits([array], [before])


@pytest.mark.parametrize("kernels", [fused, reference])
def test_ftrl_sets_small_coordinates_to_zero(kernels: Any) -> None:
    weights, z, n = np.zeros((3, 2), np.float32)
    own = KERNELS["ftrl"][1] | {"l1": 0.3}
    update(kernels, "ftrl", weights, np.array([0.2, 0.4], np.float32), z, n, **COMMON | own | {"scale": 1.0})
    assert weights[0] == 0.0
    assert weights[1] < 0.0


@pytest.mark.parametrize("size", [0, 1, 7, 1000, 4099])
def test_accumulate_has_the_same_bits(size: int) -> None:
    totals = []
    for kernels in (fused, reference):
        totals.append(drawn(1, size))
        kernels.accumulate(totals[-1], drawn(2, size))
    assert_same_bits(totals[:1], totals[1:])


@pytest.mark.parametrize("kernels", [fused, reference])
def test_accumulate_adds(kernels: Any) -> None:
    total = np.array([1.0, 2.0], np.float32)
    kernels.accumulate(total, np.array([0.5, -2.0], np.float32))
    assert total.tolist() == [1.5, 0.0]


@pytest.mark.parametrize("kernels", [fused, reference])
@pytest.mark.parametrize("size", [1, 7, 1 << 14, (1 << 14) + 1, 40_000])
def test_is_finite_sees_every_place(kernels: Any, size: int) -> None:
    largest = np.finfo(np.float32).max
    array = np.resize(np.array([0.0, -0.0, largest, -largest, 1e-45], np.float32), size)
    assert kernels.is_finite(array)
    for place in {0, size // 2, size - 1}:
        for bad in (np.nan, -np.nan, np.inf, -np.inf):
            damaged = array.copy()
            damaged[place] = bad
            damaged.flags.writeable = False
            assert not kernels.is_finite(damaged), (place, bad)


@pytest.mark.parametrize("kernels", [fused, reference])
def test_nothing_at_all_is_finite(kernels: Any) -> None:
    assert kernels.is_finite(np.empty(0, np.float32))
