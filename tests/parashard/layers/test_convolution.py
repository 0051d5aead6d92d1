"""Convolution and pooling against plain loops, and the pullbacks as adjoints of the forward functions."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from parashard.layers.images import columns, columns_pull_back, max_pool, max_pool_pull_back, window
from support.tiers import fewer

geometry = given(
    height=st.integers(3, 6),
    width=st.integers(3, 6),
    channels=st.integers(1, 3),
    kernel=st.integers(1, 3),
    padding=st.sampled_from(["same", "valid"]),
)


@geometry
@fewer(4)
def test_columns_times_weight_is_the_convolution(
    height: int, width: int, channels: int, kernel: int, padding: Any
) -> None:
    rng = np.random.default_rng(0)
    images, weight = rng.random((2, height, width, channels)), rng.random((kernel, kernel, channels, 2))
    over = window(kernel, padding)
    if padding == "same":
        assert (over.output_length(height), over.output_length(width)) == (height, width)
    rows, cols = over.output_length(height), over.output_length(width)
    found = (columns(images, over, np) @ weight.reshape(-1, 2)).reshape(2, rows, cols, 2)
    padded = np.pad(images, ((0, 0), (over.before, over.after), (over.before, over.after), (0, 0)))
    for y in range(rows):
        for x in range(cols):
            seen = padded[:, y : y + kernel, x : x + kernel]
            np.testing.assert_allclose(found[:, y, x], np.einsum("nijc,ijco->no", seen, weight), rtol=1e-12)


@geometry
@fewer(4)
def test_the_pullback_is_the_adjoint_of_the_convolution(
    height: int, width: int, channels: int, kernel: int, padding: Any
) -> None:
    rng = np.random.default_rng(1)
    images, weight = rng.random((2, height, width, channels)), rng.random((kernel * kernel * channels, 3))
    over = window(kernel, padding)
    output = columns(images, over, np) @ weight
    gradient = rng.random(output.shape)
    back = columns_pull_back(gradient, weight, images.shape, over, np)
    np.testing.assert_allclose((back * images).sum(), (gradient * output).sum(), rtol=1e-12)


def test_an_even_kernel_pads_the_odd_pixel_after() -> None:
    over = window(2, "same")
    assert (over.before, over.after) == (0, 1)
    over = window(4, "same")
    assert (over.before, over.after) == (1, 2)


def test_pooling_takes_the_maximum_of_blocks_and_leaves_out_an_odd_rest() -> None:
    images = np.random.default_rng(2).random((2, 5, 7, 3))
    pooled, _ = max_pool(images, np)
    assert pooled.shape == (2, 2, 3, 3)
    for y in range(2):
        for x in range(3):
            block = images[:, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
            np.testing.assert_array_equal(pooled[:, y, x], block.max(axis=(1, 2)))


def test_pooling_sends_each_gradient_to_its_maximum() -> None:
    images = np.random.default_rng(3).random((1, 5, 4, 2))
    pooled, saved = max_pool(images, np)
    gradient = np.arange(1.0, 1 + pooled.size).reshape(pooled.shape)
    back = max_pool_pull_back(gradient, saved, np)
    np.testing.assert_array_equal(back[:, 4], 0)
    for y, x, c in np.ndindex(pooled.shape[1:]):
        at = np.argwhere(images[0, :, :, c] == pooled[0, y, x, c])[0]
        assert back[0, at[0], at[1], c] == gradient[0, y, x, c]
    assert back.sum() == gradient.sum()


def test_of_equal_maxima_the_first_one_gets_the_gradient() -> None:
    _, saved = max_pool(np.ones((1, 2, 2, 1)), np)
    back = max_pool_pull_back(np.full((1, 1, 1, 1), 3.0), saved, np)
    np.testing.assert_array_equal(back[0, :, :, 0], [[3, 0], [0, 0]])
