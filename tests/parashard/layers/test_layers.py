"""Every layer and loss against finite differences, in any shape; what a layer leaves alone; mistakes are sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard import layers as L
from parashard.errors import ConfigurationError, WrongModel
from parashard.layers.losses import mean_squared_error, sigmoid_cross_entropy, softmax_cross_entropy
from parashard.layers.row_sums import summed_by_row
from parashard.models.networks import PooledConv2D
from parashard.models.sequential import Sequential
from support.model_cases import OnBoth
from support.tiers import fewer

WIDTH = 1e-6
EVALUATION, STEP = L.Pass(np), L.Pass(np, (7, 11, 0))

LAYERS = {
    "dense": (L.Dense(3), (4,)),
    "dense, no bias, of positions": (L.Dense(2, bias=False), (3, 4)),
    "conv same": (L.Conv2D(2, 3), (4, 3, 2)),
    "conv valid, even, grey": (L.Conv2D(3, 2, "valid"), (4, 5)),
    "conv no bias": (L.Conv2D(2, 1, bias=False), (2, 3, 2)),
    "pool": (L.MaxPool2D(), (5, 4, 2)),
    "pooled conv": (PooledConv2D(2, 3), (4, 5)),
    "norm": (L.LayerNorm(), (5,)),
    "norm of positions": (L.LayerNorm(1e-3), (3, 4)),
    "relu": (L.ReLU(), (3, 2)),
    "gelu": (L.GELU(), (6,)),
    "tanh": (L.Tanh(), (6,)),
    "sigmoid": (L.Sigmoid(), (2, 3)),
    "flatten": (L.Flatten(), (2, 3)),
    "dropout": (L.Dropout(0.4), (4, 3)),
    "embedding": (L.Embedding(5, 3), (4,)),
}
each_layer = pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS.keys())


def weights_of(layer: Any, shape: Any, rng: Any) -> dict[str, Any]:
    return {name: rng.normal(size=variable.shape) for name, variable in layer.variables(shape).items()}


def inputs_of(layer: Any, shape: Any, n: int, rng: Any) -> Any:
    return rng.integers(0, layer.values, (n, *shape)) if layer.of_indices else rng.normal(size=(n, *shape))


def slope(function: Callable[[], float], values: Any) -> Any:
    """Return the central differences of a function by each element of an array that it reads."""
    found = np.zeros_like(values)
    for at in np.ndindex(values.shape):
        kept = values[at]
        ends = []
        for sign in (1, -1):
            values[at] = kept + sign * WIDTH
            ends.append(function())
        values[at] = kept
        found[at] = (ends[0] - ends[1]) / (2 * WIDTH)
    return found


@pytest.mark.parametrize("at", [EVALUATION, STEP], ids=["evaluation", "step"])
@each_layer
@given(n=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
@fewer(10)
def test_gradients_are_those_of_finite_differences(layer: Any, shape: Any, at: Any, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights, x = weights_of(layer, shape, rng), inputs_of(layer, shape, n, rng)
    output, pull_back = layer.apply(weights, x, at)
    assert output.shape == (n, *layer.output_shape(shape))
    towards = rng.normal(size=output.shape)
    by_input, gradients = pull_back(towards.copy(), not layer.of_indices)

    def total() -> float:
        return float((layer.apply(weights, x, at)[0] * towards).sum())

    assert gradients.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_allclose(gradients[name], slope(total, values), rtol=1e-5, atol=1e-6, err_msg=name)
    if not layer.of_indices:
        np.testing.assert_allclose(by_input, slope(total, x), rtol=1e-5, atol=1e-6)


@each_layer
def test_a_layer_keeps_float32_writes_into_nothing_it_was_given_and_uses_what_cupy_has(layer: Any, shape: Any) -> None:
    rng = np.random.default_rng(0)
    x = inputs_of(layer, shape, 3, rng)
    x = x if layer.of_indices else x.astype(np.float32)
    weights = {name: values.astype(np.float32) for name, values in weights_of(layer, shape, rng).items()}
    before = {name: values.copy() for name, values in weights.items()}
    for held in (x, *weights.values()):
        held.flags.writeable = False
    output, pull_back = layer.apply(weights, x, L.Pass(OnBoth(), (1, 2, 3)))
    kept = output.copy()
    by_input, gradients = pull_back(np.ones_like(output), True)
    assert output.dtype == np.float32
    assert all(value.dtype == np.float32 for value in gradients.values())
    assert by_input is None or (by_input.dtype, by_input.shape) == (np.float32, x.shape)
    np.testing.assert_array_equal(output, kept)
    assert all(np.array_equal(weights[name], values) for name, values in before.items())


def class_labels(n: int, rng: Any) -> Any:
    return rng.integers(0, 4, (n, 2))


LOSSES: dict[Any, Callable[[int, Any], Any]] = {
    softmax_cross_entropy: class_labels,
    sigmoid_cross_entropy: lambda n, rng: rng.random((n, 2, 4)).round(),
    mean_squared_error: lambda n, rng: rng.normal(size=(n, 2, 4)),
}


@pytest.mark.parametrize("loss", LOSSES)
@given(n=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
@fewer(4)
def test_the_gradient_of_a_loss_is_that_of_finite_differences(loss: Any, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    outputs, targets = rng.normal(size=(n, 2, 4)), LOSSES[loss](n, rng)
    _, gradient = loss(outputs, targets, OnBoth())
    expected = slope(lambda: float(loss(outputs, targets, np)[0]), outputs)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss", LOSSES)
@given(n=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
@fewer(4)
def test_the_gradient_of_a_weighted_loss_is_that_of_finite_differences(loss: Any, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    outputs, targets, weights = rng.normal(size=(n, 2, 4)), LOSSES[loss](n, rng), rng.random(n)
    _, gradient = loss(outputs, targets, OnBoth(), weights)
    expected = slope(lambda: float(loss(outputs, targets, np, weights)[0]), outputs)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_weighted_loss_is_the_sum_of_weighted_losses_over_the_examples(loss: Any) -> None:
    rng = np.random.default_rng(0)
    outputs, targets, weights = rng.normal(size=(3, 2, 4)), LOSSES[loss](3, rng), np.array([2.0, 0.0, 0.5])
    each = [float(loss(outputs[i : i + 1], targets[i : i + 1], np)[0]) for i in range(3)]
    assert float(loss(outputs, targets, np, weights)[0]) == pytest.approx(np.dot(weights, each) / 3)


@given(indices=st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_rows_are_summed_by_their_index(indices: list[int]) -> None:
    gradient = np.arange(2.0 * len(indices)).reshape(-1, 2) + 1
    expected = np.zeros((7, 2))
    np.add.at(expected, indices, gradient)
    np.testing.assert_array_equal(summed_by_row(gradient, np.array(indices), 7, OnBoth()), expected)


def model(*stack: Any, shape: Any = (4,), loss: Any = "softmax_cross_entropy", **more: Any) -> Any:
    return Sequential(stack, input_shape=shape, loss=loss, **more)


def pushed(made: Any, inputs: Any, targets: Any) -> Any:
    weights = {name: np.zeros(variable.shape, np.float32) for name, variable in made.initial_variables().items()}
    outputs, pull_back = made.forward(weights, inputs, 0, np)
    return pull_back(made._loss(outputs, targets, np)[1])


ONES = np.ones((2, 4), np.float32)
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "no layer": (model, "there is no layer"),
    "nothing to train": (lambda: model(L.ReLU()), "no layer has variables"),
    "a class": (lambda: model(L.Dense), "layer 0 is a layer, such as ps.layers.Dense(10); found <class"),
    "a window too large": (
        lambda: model(L.Conv2D(2, 5, "valid"), shape=(4, 4)),
        "layer 0, Conv2D(channels=2, kernel=5, padding='valid'",
    ),
    "no image": (lambda: model(L.Dense(3), L.MaxPool2D()), "layer 1, MaxPool2D(): an image has the shape"),
    "no block": (lambda: model(L.MaxPool2D(), shape=(4, 1)), "an image of shape (4, 1) has no block of 2x2 pixels"),
    "an embedding behind": (lambda: model(L.Dense(3), L.Embedding(3, 2)), "layer 1, Embedding(values=3, units=2"),
    "a scalar": (lambda: model(L.Dense(3), shape=()), "layer 0, Dense(units=3, bias=True"),
    "a scalar to normalise": (lambda: model(L.LayerNorm(), shape=()), "no axis to normalise along"),
    "no shape": (lambda: model(L.Dense(3), shape=4), "input_shape is a tuple of whole numbers of at least 1"),
    "an unknown loss": (lambda: model(L.Dense(3), loss="mse"), "loss 'mse' is unknown; allowed: softmax_cross_entropy"),
    "an unknown metric": (lambda: model(L.Dense(3), metrics=["acc"]), "metric 'acc' is unknown; allowed: accuracy"),
    "no unit": (lambda: L.Dense(0), "Dense: units must be a whole number of at least 1, found 0"),
    "no channel": (lambda: L.Conv2D(0), "Conv2D: channels must be"),
    "no window": (lambda: L.Conv2D(1, 0), "Conv2D: kernel must be"),
    "another padding": (lambda: L.Conv2D(1, padding="full"), "padding is 'same' or 'valid', found 'full'"),  # type: ignore[arg-type]
    "another start": (lambda: L.Dense(1, initializer="zeros"), "Dense: initializer is glorot_uniform, he_normal or"),
    "a rate of one": (lambda: L.Dropout(1.0), "Dropout: rate is between 0 and 0.99, found 1.0"),
    "no epsilon": (lambda: L.LayerNorm(0.0), "LayerNorm: epsilon is a float greater than 0, found 0.0"),
    "no row": (lambda: L.Embedding(0, 3), "Embedding: values must be a whole number"),
    "other inputs": (
        lambda: pushed(model(L.Dense(3), shape=(5,)), ONES, np.zeros(2, int)),
        "an example's inputs have shape (4,); the model's input_shape is (5,)",
    ),
    "a class too many": (lambda: pushed(model(L.Dense(3)), ONES, np.array([0, 3])), "found class 3; the outputs have"),
    "a negative class": (lambda: pushed(model(L.Dense(3)), ONES, np.array([0, -1])), "found class -1"),
    "values for classes": (lambda: pushed(model(L.Dense(3)), ONES, np.zeros(2)), "targets are float64 of shape (2,)"),
    "targets of another shape": (
        lambda: pushed(model(L.Dense(3), loss="mean_squared_error"), ONES, np.zeros(2)),
        "mean_squared_error: targets have shape (2,), and the outputs (2, 3)",
    ),
    "a number without a row": (
        lambda: pushed(model(L.Embedding(3, 2), L.Flatten(), L.Dense(2)), ONES.astype(int) * 3, np.zeros(2, int)),
        "Embedding: inputs are 3 to 3; allowed: whole numbers of 0 to 2",
    ),
    "called without weights": (lambda: model(L.Dense(3))(ONES), "call what trainer.model() returns"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(mistake: str) -> None:
    make, says = MISTAKES[mistake]
    with pytest.raises((ConfigurationError, WrongModel)) as refused:
        make()
    assert says in str(refused.value)
