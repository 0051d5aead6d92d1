"""Outputs (n, 1) against targets (n,): a loss that broadcasts them is refused, and Keras reshapes them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.errors import JobFailed

os.environ.setdefault("KERAS_BACKEND", "jax")

DRAWN = np.random.default_rng(0)
X = DRAWN.standard_normal((64, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 3.0], np.float32)


def torch_model(right: bool, zero: bool = False) -> Any:
    torch = pytest.importorskip("torch")

    def net() -> Any:
        torch.manual_seed(0)
        linear = torch.nn.Linear(3, 1)
        if zero:
            torch.nn.init.zeros_(linear.weight)
        return linear

    return ps.torch.Model(net, lambda o, t: ((o[:, 0] - t if right else o - t) ** 2).mean())


def jax_model(right: bool) -> Any:
    jax = pytest.importorskip("jax")

    def apply(parameters: Any, inputs: Any) -> Any:
        return inputs @ parameters["w"]

    def loss(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
        outputs = apply(parameters, inputs)
        return ((outputs[:, 0] - targets if right else outputs - targets) ** 2).mean()

    return ps.jax.Model(lambda key: {"w": jax.random.normal(key, (3, 1))}, loss, apply=apply)


def fitted(model: Any) -> Any:
    trainer = ps.Trainer(model, ps.Adam(0.05), ps.OneDeviceStrategy())
    return trainer.fit((X, Y), epochs=2, batch_size=32, verbose=0).history["loss"]


@pytest.mark.parametrize("make", [torch_model, lambda right: torch_model(right, zero=True), jax_model])
def test_a_loss_that_broadcasts_is_refused(make: Any) -> None:
    with pytest.raises(JobFailed, match=r"outputs have shape \(32, 1\) and targets \(32,\), which broadcast"):
        fitted(make(False))
    losses = fitted(make(True))
    assert losses[1] < losses[0]


def test_keras_gives_both_the_same_shape() -> None:
    keras = pytest.importorskip("keras")

    def network() -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse")
        return model

    flat = ps.Trainer(ps.keras.Model(network), strategy=ps.OneDeviceStrategy()).fit((X, Y), batch_size=32, verbose=0)
    column = ps.Trainer(ps.keras.Model(network), strategy=ps.OneDeviceStrategy()).fit(
        (X, Y[:, None]), batch_size=32, verbose=0
    )
    assert flat.history["loss"] == column.history["loss"]


def test_a_loss_of_pytorch_that_raises_names_the_shapes() -> None:
    torch = pytest.importorskip("torch")
    model = ps.torch.Model(lambda: torch.nn.Linear(3, 2), torch.nn.functional.mse_loss)
    with pytest.raises(
        JobFailed, match=r"the loss of outputs of shape \(32, 2\) and targets of shape \(32,\) raised Runt"
    ):
        fitted(model)
