"""Sums of gradients by row: those of `np.add.at`, bit by bit (P35)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.layers.row_sums import sum_by_place


def added(gradients: Any, places: Any, rows: int) -> Any:
    """One after the other, in their order."""
    total = np.zeros((rows, gradients.shape[1]), gradients.dtype)
    np.add.at(total, places, gradients)
    return total


@given(
    places=st.lists(st.integers(0, 6), max_size=40),
    elements=st.integers(1, 5),
    dtype=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 99),
)
def test_rows_are_sums_in_the_order_of_look_ups(places: list[int], elements: int, dtype: Any, seed: int) -> None:
    sizes = 10.0 ** np.random.default_rng(seed).integers(-8, 8, (len(places), elements))
    gradients = (np.random.default_rng(seed).normal(size=sizes.shape) * sizes).astype(dtype)
    found = sum_by_place(gradients, np.array(places, np.int64), 7, np)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, added(gradients, places, 7))


def test_a_row_that_nobody_looked_up_is_zero_and_the_result_is_new() -> None:
    gradients = np.ones((2, 3), np.float32)
    found = sum_by_place(gradients, np.array([1, 1]), 3, np)
    assert found.tolist() == [[0, 0, 0], [2, 2, 2], [0, 0, 0]]
    assert not np.shares_memory(found, gradients)
    assert gradients.tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize(
    "gradients",
    [
        np.broadcast_to(np.float32([[1], [2], [3]]), (3, 4)),
        np.arange(12, dtype=np.float32).reshape(4, 3).T,
        np.arange(24, dtype=np.float32).reshape(3, 8)[:, ::2],
    ],
)
def test_views_of_any_strides_are_read_as_they_are(gradients: Any) -> None:
    places = np.array([0, 9, 1, 9, 0, 9])[::2]
    np.testing.assert_array_equal(sum_by_place(gradients, places, 2, np), added(gradients, places, 2))


@pytest.mark.gpu
def test_a_gpu_adds_to_the_same_sums(xp_gpu: Any) -> None:
    rng = np.random.default_rng(0)
    gradients, places = rng.normal(size=(500, 8)).astype(np.float32), rng.integers(0, 20, 500)
    found = sum_by_place(xp_gpu.asarray(gradients), xp_gpu.asarray(places), 25, xp_gpu)
    np.testing.assert_allclose(xp_gpu.asnumpy(found), added(gradients, places, 25), rtol=1e-5, atol=1e-6)
