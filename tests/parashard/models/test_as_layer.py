"""A list of layers within a larger model: what it computes, and its gradient by its own inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parashard as ps
from support.model_cases import start

L = ps.layers
RNG = np.random.default_rng(4)


def made(layers: list[Any], shape: tuple[int, ...]) -> Any:
    return ps.Sequential(layers, input_shape=shape, loss="mean_squared_error")


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "dense": (lambda: made([L.Dense(5), L.ReLU(), L.Dense(3)], (4,)), (4,)),
    "one-layer": (lambda: made([L.Dense(2, bias=False)], (4,)), (4,)),
    "no-variables-first": (lambda: made([L.Flatten(), L.Tanh(), L.Dropout(0.4), L.Dense(3)], (2, 3)), (2, 3)),
    "no-variables-last": (lambda: made([L.Dense(6), L.LayerNorm(), L.GELU()], (4,)), (4,)),
    "images": (lambda: made([L.Conv2D(2), L.MaxPool2D(), L.Flatten(), L.Dense(2)], (6, 4)), (6, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_by_inputs_is_that_of_finite_differences(name: str) -> None:
    make, shape = MODELS[name]
    model, inputs = make(), RNG.normal(size=(3, *shape))
    variables = start(model, np.float64)
    outputs, back = model.as_layer(variables, inputs, 5, np)
    weights = RNG.normal(size=outputs.shape)

    def total(moved: Any) -> float:
        return float((model.as_layer(variables, moved, 5, np)[0] * weights).sum())

    by_inputs, own = back(weights.copy(), True)  # which it may overwrite
    assert own.keys() == variables.keys()
    assert by_inputs.shape == inputs.shape
    expected = np.zeros_like(inputs)
    for at in np.ndindex(inputs.shape):
        step = np.zeros_like(inputs)
        step[at] = 1e-6
        expected[at] = (total(inputs + step) - total(inputs - step)) / 2e-6
    np.testing.assert_allclose(by_inputs, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_by_variables_are_those_of_the_model_alone(name: str) -> None:
    make, shape = MODELS[name]
    model, inputs = make(), RNG.normal(size=(3, *shape))
    variables = start(model, np.float64)
    outputs, back = model.as_layer(variables, inputs, 5, np)
    alone, pull_back = model.forward(variables, inputs, 5, np)
    np.testing.assert_array_equal(outputs, alone)
    due = pull_back(np.ones_like(outputs))
    for to_input in (True, False):
        found = back(np.ones_like(outputs), to_input)[1]
        assert found.keys() == due.keys()
        for name_, values in due.items():
            np.testing.assert_array_equal(found[name_], values)


def test_what_is_not_asked_for_is_not_computed() -> None:
    asked: list[bool] = []

    class Asked(L.Layer):
        name = "asked"

        def apply(self, weights: Any, x: Any, at: Any) -> Any:
            def back(gradient: Any, to_input: bool) -> Any:
                asked.append(to_input)
                return gradient, {}

            return x, back

    model = made([Asked(), L.Dense(2)], (3,))
    variables = start(model)
    outputs, back = model.as_layer(variables, np.ones((2, 3), np.float32), None, np)
    assert back(outputs, False)[0] is None
    assert asked == []
    assert back(outputs, True)[0] is not None
    assert asked == [True]
