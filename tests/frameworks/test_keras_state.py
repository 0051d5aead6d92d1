"""Weights of Keras models without a gradient: frozen, averaged, counted; and those that are scalars or unused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.hosted_xp import HostedXp, Watched, flat_of, there
from support.keras_cases import Counting, X, alone, batch, compiled, first_values, kinds, layers, model


def test_frozen_layers_are_frozen_and_normalisation_without_training_is() -> None:
    def partly() -> Any:
        first = layers.Dense(5)
        first.trainable = False
        norm = layers.BatchNormalization()
        norm.trainable = False
        return compiled(first, norm, layers.Dense(3))

    ours = model(partly)
    values = first_values(ours)
    assert kinds(ours) == dict.fromkeys(
        [
            "sequential/batch_normalization/beta",
            "sequential/batch_normalization/gamma",
            "sequential/batch_normalization/moving_mean",
            "sequential/batch_normalization/moving_variance",
            "sequential/dense/bias",
            "sequential/dense/kernel",
        ],
        "frozen",
    )
    gradients = ours.loss_and_gradients(values, batch(), np)[1]
    assert sorted(gradients) == ["sequential/dense_1/bias", "sequential/dense_1/kernel"]


def test_on_a_gpu_statistics_have_the_same_bits_and_no_number_is_looked_at() -> None:
    ours = model(lambda: compiled(layers.BatchNormalization(momentum=0.9), layers.Dense(3)))
    values = first_values(ours)
    due_loss, due = ours.loss_and_gradients(values, batch(), np)
    Watched.waits.clear()
    loss, found = ours.loss_and_gradients(flat_of(values), there(batch()), HostedXp())
    assert not Watched.waits
    assert np.asarray(loss).tobytes() == np.asarray(due_loss).tobytes()
    assert found.keys() == due.keys()
    assert all(np.asarray(found[name]).tobytes() == np.asarray(due[name]).tobytes() for name in due)


def test_statistics_of_batch_normalisation_are_pushed_as_the_batchs_own() -> None:
    ours = model(lambda: compiled(layers.BatchNormalization(momentum=0.9), layers.Dense(3)))
    values = first_values(ours)
    assert kinds(ours) == dict.fromkeys(
        ["sequential/batch_normalization/moving_mean", "sequential/batch_normalization/moving_variance"], "average:0.1"
    )
    pushed = ours.loss_and_gradients(values, batch(), np)[1]
    assert np.allclose(pushed["sequential/batch_normalization/moving_mean"], X.mean(0), atol=1e-5)
    assert np.allclose(pushed["sequential/batch_normalization/moving_variance"], X.var(0), atol=1e-5)
    due, found = alone(ours.to_user_object(values), values)
    assert ours.loss_and_gradients(values, batch(), np)[0] == due
    assert all(pushed[name].tobytes() == found[name].tobytes() for name in found)
    moved = {**values, "sequential/batch_normalization/moving_mean": X.mean(0)}
    assert not np.allclose(ours.predict(moved, X), ours.predict(values, X))


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "sum"), ("int32", "counter")])
def test_other_state_changes_as_it_is_declared(dtype: str, kind: str) -> None:
    ours = model(lambda: compiled(Counting(dtype), layers.Dense(3)), state={"*/count": kind})
    values = first_values(ours)
    name = "sequential/counting/count"
    assert kinds(ours) == {name: kind}
    pushed = ours.loss_and_gradients(values, batch(), np)[1][name]
    assert pushed.shape == values[name].shape
    owned = ours.to_user_object({**values, name: values[name] + pushed})
    assert int(owned.layers[0].count.numpy()) == 2


class Scaled(layers.Layer):
    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")
        self.unused = self.add_weight(name="unused", shape=(2,), initializer="ones")

    def call(self, inputs: Any) -> Any:
        return inputs * self.scale


def test_scalars_travel_as_one_row_and_an_unused_weight_has_no_gradient() -> None:
    ours = model(lambda: compiled(Scaled(), layers.Dense(3)))
    values = first_values(ours)
    assert values["sequential/scaled/scale"].shape == (1,)
    gradients = ours.loss_and_gradients(values, batch(), np)[1]
    assert gradients["sequential/scaled/scale"].shape == (1,)
    unused = gradients["sequential/scaled/unused"]
    assert unused is None or not unused.any()
    owned = ours.to_user_object({**values, "sequential/scaled/scale": np.full(1, 7, np.float32)})
    assert float(owned.layers[0].scale.numpy()) == 7.0
