"""Keras models under a trainer: weights of examples, pieces of a step, trees of data, and what compile() said."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api.trained_state import trained_optimizer
from parashard.data.base import Batch
from parashard.errors import ConfigurationError

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="NO TEST OF ps.keras: it is not installed; `make test-frameworks` has it")
layers = keras.layers

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3
W = np.linspace(0, 2, 8).astype(np.float32)


def compiled(*stack: Any, **arguments: Any) -> Any:
    made = keras.Sequential([keras.Input((4,)), *(stack or (layers.Dense(3),))])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(**{"loss": loss, "metrics": ["accuracy"], "optimizer": "sgd", **arguments})
    return made


def first_values(ours: Any) -> dict[str, Any]:
    return {name: value[1] if isinstance(value, tuple) else value for name, value in ours.initial_variables().items()}


def test_weights_of_examples_are_keras_sample_weight() -> None:
    ours = ps.keras.Model(compiled)
    values = first_values(ours)
    weighted = Batch(0, 0, np.arange(8), X, Y, W)
    ours.check(weighted)
    loss, gradients = ours.loss_and_gradients(values, weighted, np)
    own = ours.to_user_object(values)
    due = own.evaluate(X, Y, sample_weight=W, batch_size=8, verbose=0, return_dict=True)
    assert loss == pytest.approx(due["loss"], rel=1e-5)
    found = {name: float(value) for name, value in ours.evaluate(values, weighted, np).items()}
    assert found == pytest.approx(due, rel=1e-5)
    each = [ours.loss_and_gradients(values, Batch(0, 0, np.arange(1), X[i:][:1], Y[i:][:1]), np)[1] for i in range(8)]
    for name, gradient in gradients.items():
        expected = sum(weight * one[name] for weight, one in zip(W, each, strict=True)) / 8
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_weighted_metrics_are_those_of_keras() -> None:
    ours = ps.keras.Model(lambda: compiled(metrics=[], weighted_metrics=["accuracy"]))
    values = first_values(ours)
    ours.check(Batch(0, 0, np.arange(8), X, Y, W))
    own = ours.to_user_object(values)
    for weights in (None, W):
        found = ours.evaluate(values, Batch(0, 0, np.arange(8), X, Y, weights), np)
        due = own.evaluate(X, Y, sample_weight=weights, batch_size=8, verbose=0, return_dict=True)
        assert float(found["accuracy"]) == pytest.approx(due["accuracy"])


def test_pieces_of_a_step_draw_their_own() -> None:
    ours = ps.keras.Model(lambda: compiled(layers.Dropout(0.5), layers.Dense(3)))
    values = first_values(ours)
    parts = (0, 1, 1, 2)
    losses = [float(ours.loss_and_gradients(values, Batch(5, 0, np.arange(8), X, Y, None, p), np)[0]) for p in parts]
    assert len(set(losses)) == 3
    assert losses[1] == losses[2]


def two_headed() -> Any:
    left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
    hidden = layers.Dense(3)(layers.Concatenate()([left, right]))
    made = keras.Model({"left": left, "right": right}, {"a": hidden, "b": layers.Dense(1, name="b")(hidden)})
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile("sgd", {"a": sparse, "b": "mse"}, metrics={"a": ["accuracy"]})
    return made


def listed() -> Any:
    left, right = keras.Input((4,)), keras.Input((4,))
    hidden = layers.Dense(3)(layers.Concatenate()([left, right]))
    made = keras.Model([left, right], [hidden, layers.Dense(1)(hidden)])
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile("sgd", [sparse, "mse"])
    return made


ONES = np.ones((8, 1), np.float32)


@pytest.mark.parametrize(
    ("make", "inputs", "targets"),
    [
        (two_headed, {"left": X, "right": X[::-1].copy()}, {"a": Y, "b": ONES}),
        (listed, (X, X[::-1].copy()), (Y, ONES)),
    ],
)
def test_several_inputs_and_targets_are_trained_judged_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], inputs: Any, targets: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = ps.Trainer(ps.keras.Model(make), strategy=ps.OneDeviceStrategy(threads=1))
    before = trainer.evaluate((inputs, targets))["loss"]
    history = trainer.fit(
        (inputs, targets),
        epochs=3,
        batch_size=4,
        gradient_accumulation=2,
        sample_weight=W,
        validation_data=(inputs, targets),
        verbose=0,
    )
    after = trainer.evaluate((inputs, targets))
    assert after["loss"] == pytest.approx(history.history["val_loss"][-1], rel=1e-4)
    assert after["loss"] < before
    own = trainer.model()
    assert after == pytest.approx(own.evaluate(inputs, targets, verbose=0, return_dict=True), rel=1e-4)
    found, due = trainer.predict(inputs, batch_size=3), own.predict(inputs, verbose=0)
    assert type(found) is type(due)
    for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(due), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# --- the optimizer of compile() ---


def test_the_optimizer_of_compile_is_the_trainers_where_it_is_given_none() -> None:
    given = ps.keras.Model(lambda: compiled(optimizer=keras.optimizers.AdamW(0.002, weight_decay=0.1)))
    assert trained_optimizer(None, given, 0).spec == ps.AdamW(0.002, epsilon=1e-7, weight_decay=0.1)
    assert trained_optimizer(ps.SGD(0.5), given, 0).spec == ps.SGD(0.5)
    assert trained_optimizer(None, ps.keras.Model(lambda: compiled(optimizer="sgd")), 0).spec == ps.SGD(0.01)


def test_what_scales_the_loss_in_keras_is_left_out() -> None:
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    assert trained_optimizer(None, ps.keras.Model(lambda: compiled(optimizer=scaled)), 0).spec == ps.SGD(0.5)


def excluding() -> Any:
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "none named": (
        lambda: compiled(optimizer="nadam"),
        "the trainer is given no optimizer, and that of compile() has no equal: keras.optimizers.Nadam",
    ),
    "amsgrad": (lambda: compiled(optimizer=keras.optimizers.Adam(amsgrad=True)), "amsgrad=True has no equal"),
    "excluded": (
        lambda: compiled(optimizer=excluding()),
        "keras.optimizers.AdamW: exclude_from_weight_decay is not taken over",
    ),
    "a constraint": (
        lambda: compiled(layers.Dense(3, kernel_constraint="max_norm")),
        "weight 'sequential/dense/kernel' has the constraint MaxNorm",
    ),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_the_shards_cannot_do_is_refused_by_its_name(setting: str) -> None:
    make, says = REFUSED[setting]
    with pytest.raises(ConfigurationError) as refused:
        ps.Trainer(ps.keras.Model(make))
    assert says in refused.value.message


def test_an_optimizer_that_excludes_is_refused_of_a_trainer_too() -> None:
    with pytest.raises(ConfigurationError, match="exclude_from_weight_decay is not taken over"):
        ps.Trainer(ps.keras.Model(compiled), excluding())
