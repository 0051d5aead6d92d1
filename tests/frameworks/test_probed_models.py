"""A probe computes an earlier step once more between two steps: models have the same gradients and metrics after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch
from parashard.models.declaration import parts_of

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3


def torch_model() -> Any:
    nn = pytest.importorskip("torch", reason="NO TEST OF ps.torch: it is not installed").nn
    net = lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))  # noqa: E731
    return ps.torch.Model(net, loss=nn.functional.cross_entropy, metrics=["accuracy"])


def keras_model() -> Any:
    from support.keras_cases import compiled, layers

    def net() -> Any:
        return compiled(layers.Dense(6), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(3))

    return ps.keras.Model(net)


def jax_model() -> Any:
    jax = pytest.importorskip("jax", reason="NO TEST OF ps.jax: it is not installed")

    def loss(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
        kept = inputs if key is None else inputs * jax.random.bernoulli(key, 0.8, inputs.shape)
        return -jax.nn.log_softmax(kept @ parameters["w"])[jax.numpy.arange(len(targets)), targets].mean()

    return ps.jax.Model(lambda key: {"w": jax.random.normal(key, (4, 3))}, loss)


def step_of(model: Any, values: Any, step: int) -> tuple[Any, dict[str, Any], dict[str, list[float]]]:
    """Return the loss, gradients and metrics of a step."""
    loss, gradients = model.loss_and_gradients(values, Batch(step, 0, np.arange(8), X, Y), np)
    told = model.step_metrics() if hasattr(model, "step_metrics") else {}
    return float(loss), {n: np.array(g) for n, g in gradients.items()}, {n: list(s.values) for n, s in told.items()}


@pytest.mark.parametrize("make", [torch_model, keras_model, jax_model])
def test_a_step_is_the_same_after_a_probe(make: Callable[[], Any]) -> None:
    model = make()
    model.seed(3)
    initial = dict(parts_of(name, value) for name, value in model.initial_variables().items())
    values = {variable.name: value for variable, value in initial.items()}
    step_of(model, values, 1)
    plain = step_of(model, values, 2)
    moved = {name: value * np.float32(1.1) for name, value in values.items()}
    model.loss_and_gradients(moved, Batch(1, 0, np.arange(8), X, Y), np)  # the probe
    again = step_of(model, values, 2)
    assert again[0] == plain[0]
    assert again[2] == plain[2]
    for name, gradient in plain[1].items():
        assert again[1][name].tobytes() == gradient.tobytes()
