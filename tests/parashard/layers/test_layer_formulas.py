"""Activations against their formulas, cross-entropy at its limits, dropout masks and their hash."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from parashard.layers import GELU, Pass, ReLU, Sigmoid, Tanh, sigmoid_cross_entropy, softmax_cross_entropy
from parashard.layers.dense import dropout_mask

FORMULAS = {
    ReLU(): lambda z: max(z, 0.0),
    Tanh(): math.tanh,
    Sigmoid(): lambda z: 1 / (1 + math.exp(-z)),
    GELU(): lambda z: 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
}


@pytest.mark.parametrize("layer", FORMULAS, ids=repr)
def test_activations_are_their_formulas(layer: Any) -> None:
    z = np.linspace(-4, 4, 41)
    output, pull_back = layer.apply({}, z, Pass(np))
    np.testing.assert_allclose(output, [FORMULAS[layer](value) for value in z], rtol=1e-14, atol=1e-15)
    slope, _ = pull_back(np.ones_like(z), True)
    width = 1e-6
    expected = [(FORMULAS[layer](v + width) - FORMULAS[layer](v - width)) / (2 * width) for v in z]
    away_from_kink = np.abs(z) > 1e-9
    np.testing.assert_allclose(slope[away_from_kink], np.array(expected)[away_from_kink], rtol=1e-6, atol=1e-9)


def test_gelu_is_close_to_the_normal_distribution_function() -> None:
    z = np.linspace(-5, 5, 101)
    output, _ = GELU().apply({}, z, Pass(np))
    exact = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in z]
    np.testing.assert_allclose(output, exact, atol=5e-4)


def test_cross_entropy_does_not_overflow() -> None:
    logits = np.array([[1e4, 0.0, -1e4], [-1e4, 0.0, 1e4]], np.float32)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        loss, gradient = softmax_cross_entropy(logits, np.array([0, 0]), np)
    assert float(loss) == 1e4  # (0 + 2e4) / 2
    np.testing.assert_array_equal(gradient, np.array([[0, 0, 0], [-0.5, 0, 0.5]], np.float32))


def test_cross_entropy_of_equal_logits_is_the_logarithm_of_the_classes() -> None:
    loss, gradient = softmax_cross_entropy(np.full((3, 8), 2.5), np.array([0, 4, 7]), np)
    assert float(loss) == pytest.approx(math.log(8), rel=1e-15)
    np.testing.assert_allclose(gradient.sum(axis=1), 0, atol=1e-15)


def test_sigmoid_cross_entropy_neither_overflows_nor_loses_a_small_loss() -> None:
    logits, targets = np.array([[1e4], [-1e4], [20.0]], np.float32), np.array([0.0, 0.0, 1.0])
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        loss, gradient = sigmoid_cross_entropy(logits, targets, np)
        small, _ = sigmoid_cross_entropy(logits[2:], targets[2:], np)
    assert float(loss) == pytest.approx(1e4 / 3)
    assert gradient[0, 0] == pytest.approx(1 / 3)
    assert (gradient[1, 0], gradient.dtype) == (0, np.float32)
    assert float(small) == pytest.approx(math.log1p(math.exp(-20)), rel=1e-5)


def test_a_mask_is_what_it_was() -> None:
    mask = dropout_mask((2, 7), 0.5, (1, 2, 3), np.float32, np)
    assert mask.dtype == np.float32
    assert "".join("x" if kept else "." for kept in mask.ravel()) == PINNED_MASK


PINNED_MASK = "xxxx.x...x.x.."


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.99])
def test_a_mask_drops_at_its_rate_and_keeps_the_mean(rate: float) -> None:
    mask = dropout_mask((1000, 100), rate, (1, 2, 3), np.float64, np)
    assert (mask == 0).mean() == pytest.approx(rate, abs=0.006)
    assert mask.mean() == pytest.approx(1, abs=0.1)
    assert len(np.unique(mask)) == 2
    assert mask.max() == pytest.approx(1 / (1 - rate), rel=1e-3)


def test_masks_differ_by_seed_step_and_layer() -> None:
    keys = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (12, 3, 3)]
    masks = {dropout_mask((64,), 0.5, key, np.float32, np).tobytes() for key in keys}
    assert len(masks) == len(keys)


@pytest.mark.gpu
def test_a_mask_is_the_same_on_a_gpu(xp_gpu: Any) -> None:
    for shape in ((1, 1), (3, 7), (128, 256)):
        here = dropout_mask(shape, 0.3, (1, 2, 3), np.float32, np)
        there = dropout_mask(shape, 0.3, (1, 2, 3), np.float32, xp_gpu)
        np.testing.assert_array_equal(xp_gpu.asnumpy(there), here)
