"""The optimizer of a Keras model that a trainer gives back has done what the shards have done; and the reverse."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="NO TEST OF KERAS' OPTIMIZERS: it is not installed")

import parashard as ps  # noqa: E402  # after Keras' backend is chosen
from parashard.errors import ConfigurationError  # noqa: E402

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]]) + 0.3).astype(np.float32)
ARGUMENTS: dict[str, Any] = {"batch_size": 40, "verbose": 0}
EARLY = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(EARLY, momentum=0.8, weight_decay=0.1),
    "Nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.8, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(EARLY, epsilon=1e-10),
    "AdamW": lambda: keras.optimizers.AdamW(0.05, epsilon=1e-10),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05, epsilon=1e-2),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.05, initial_accumulator_value=0.0),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.05),
    "RMSprop, all": lambda: keras.optimizers.RMSprop(0.05, momentum=0.8, centered=True, epsilon=1e-3),
    "Lamb": lambda: keras.optimizers.Lamb(0.05),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def network(make: Callable[[], Any]) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    model.compile(optimizer=make(), loss="mse")
    return model


def trainer(make: Callable[[], Any]) -> ps.Trainer:
    return ps.Trainer(ps.keras.Model(lambda: network(make)), strategy=ps.OneDeviceStrategy())


def weights(model: Any) -> np.ndarray:
    return np.concatenate([np.asarray(value).ravel() for value in model.get_weights()])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_model_goes_on_with_the_steps_rate_and_moments(name: str) -> None:
    ours = trainer(OPTIMIZERS[name])
    ours.fit((X, Y), epochs=5, **ARGUMENTS)
    own = ours.model()
    assert int(own.optimizer.iterations) == 5
    own.fit(X, Y, epochs=2, shuffle=False, **ARGUMENTS)
    ours.fit((X, Y), epochs=2, **ARGUMENTS)
    np.testing.assert_allclose(weights(own), weights(ours.model()), atol=1e-5)
    assert int(ours.model().optimizer.iterations) == 7


@pytest.mark.parametrize("name", ["momentum", "Adam", "RMSprop, all", "Adagrad"])
def test_a_trainer_goes_on_with_the_optimizer_of_a_model_that_keras_has_trained(name: str) -> None:
    model = network(OPTIMIZERS[name])
    model.fit(X, Y, epochs=5, shuffle=False, **ARGUMENTS)
    model.save("model.keras")
    ours = ps.Trainer(ps.keras.Model(keras.models.load_model("model.keras")), strategy=ps.OneDeviceStrategy())
    ours.fit((X, Y), epochs=2, **ARGUMENTS)
    model.fit(X, Y, epochs=2, shuffle=False, **ARGUMENTS)
    np.testing.assert_allclose(weights(ours.model()), weights(model), atol=1e-5)
    assert int(ours.model().optimizer.iterations) == 7


def test_what_is_saved_has_the_steps_and_the_rate_that_a_callback_has_set() -> None:
    ours = trainer(OPTIMIZERS["AdamW"])
    lower = ps.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    ours.fit((X, Y), epochs=3, callbacks=[lower], **ARGUMENTS)
    ours.model().save("own.keras")
    again = keras.models.load_model("own.keras").optimizer
    assert int(again.iterations) == 3
    assert float(again.learning_rate) == pytest.approx(0.05 / 8)
    assert any(np.abs(np.asarray(variable)).sum() > 0 for variable in again.variables[2:])


def test_an_optimizer_of_another_rule_is_left_as_it_was_compiled() -> None:
    ours = ps.Trainer(ps.keras.Model(lambda: network(OPTIMIZERS["Adam"])), ps.SGD(0.1), ps.OneDeviceStrategy())
    ours.fit((X, Y), epochs=2, **ARGUMENTS)
    assert int(ours.model().optimizer.iterations) == 0


def test_an_optimizer_that_has_trained_another_model_is_refused() -> None:
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="another")])
    other.compile(optimizer=OPTIMIZERS["Adam"](), loss="mse")
    other.fit(X, Y, **ARGUMENTS)
    with pytest.raises(
        ConfigurationError, match=r"has taken steps with '.*another.*', which is no weight of the model"
    ):
        ps.Trainer(ps.keras.Model(lambda: network(OPTIMIZERS["SGD"])), other.optimizer, ps.OneDeviceStrategy())
