"""Compiled Keras models with a batch, and what a step of Keras itself computes of them: for the tests of `ps.keras`.

Where Keras is not installed what imports this is skipped. `test_keras_backends` runs the tests on the other backend.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch

os.environ.setdefault("KERAS_BACKEND", "jax")
keras: Any = pytest.importorskip(
    "keras", reason="NO TEST OF ps.keras: it is not installed; `make test-frameworks` has it"
)
layers: Any = keras.layers
keras_variables: Any = importlib.import_module("parashard.models.keras.variables")
BACKEND = keras.config.backend()

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3
WEIGHTS = [
    "sequential/dense/kernel",
    "sequential/dense/bias",
    "sequential/dense_1/kernel",
    "sequential/dense_1/bias",
]


def batch(step: int = 0, targets: Any = Y) -> Batch:
    return Batch(step, 0, np.arange(8), X, targets)


def compiled(*stack: Any, **arguments: Any) -> Any:
    made = keras.Sequential([keras.Input((4,)), *stack])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(**{"loss": loss, "metrics": ["accuracy"], **arguments})
    return made


def plain() -> Any:
    return compiled(
        layers.Dense(5, activation="relu", kernel_regularizer=keras.regularizers.L2(0.1)),
        layers.ActivityRegularization(l2=0.1),
        layers.Dense(3),
    )


def figures(found: Any) -> dict[str, float]:
    return {name: float(value) for name, value in found.items()}


class Counting(layers.Layer):
    def __init__(self, counted: str = "float32") -> None:
        super().__init__()
        self._counted = counted

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(name="count", shape=(), initializer="zeros", trainable=False, dtype=self._counted)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.count.assign(self.count + 2)
        return inputs


def net() -> Any:
    return compiled(layers.Dense(5, activation="relu"), layers.Dropout(0.5), layers.Dense(3))


def model(make: Any = net, seed: int = 3, **arguments: Any) -> Any:
    found = ps.keras.Model(make, **arguments)
    found.seed(seed)
    return found


def first_values(ours: Any) -> dict[str, Any]:
    return {name: value[1] if isinstance(value, tuple) else value for name, value in ours.initial_variables().items()}


def kinds(ours: Any) -> dict[str, str]:
    values = {name: value[0] for name, value in ours.initial_variables().items() if isinstance(value, tuple)}
    return {name: variable.state or "frozen" for name, variable in values.items()}


def alone(made: Any, values: Any) -> tuple[float, dict[str, Any]]:
    """Return the loss and the gradients that a training step of Keras itself computes."""
    for variable in made.trainable_variables:
        variable.assign(values[variable.path])
    if BACKEND == "torch":
        import torch

        loss = made.compute_loss(x=X, y=torch.from_numpy(Y), y_pred=made(torch.from_numpy(X), training=True))
        loss.backward()
        return loss.item(), {v.path: v.value.grad.numpy() for v in made.trainable_variables}
    import jax

    made.compute_loss(x=X, y=Y, y_pred=made(X))  # builds the loss
    made.optimizer = None  # it would only scale the loss, by one

    def computed(trained: Any, fixed: Any, x: Any, y: Any) -> Any:
        loss, (_, _, after, _) = made.compute_loss_and_updates(trained, fixed, [], x, y, None, training=True)
        return loss, after

    state = [v.value for v in made.trainable_variables], [v.value for v in made.non_trainable_variables]
    (loss, _), gradients = jax.jit(jax.value_and_grad(computed, has_aux=True))(*state, X, Y)
    return float(loss), {
        v.path: np.asarray(gradient) for v, gradient in zip(made.trainable_variables, gradients, strict=True)
    }
