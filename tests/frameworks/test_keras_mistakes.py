"""What of a Keras model cannot be trained: each is refused in a sentence."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parashard.errors import ConfigurationError, WrongModel
from support.keras_cases import Counting, Y, batch, compiled, first_values, keras, keras_variables, layers, model, net


class Largest(keras.metrics.Metric):
    """The largest output: no sum."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.most


def unbuilt() -> Any:
    made = keras.Sequential([layers.Dense(3)])
    made.compile(loss="mse")
    return made


def overriding(method: str) -> Callable[[], Any]:
    kind = type("Own", (keras.Sequential,), {method: lambda self, *arguments, **named: None})

    def made() -> Any:
        own = kind([keras.Input((4,)), layers.Dense(3)])
        own.compile(loss="mse")
        return own

    return made


def replaced() -> Any:
    made = compiled(layers.Dense(3))
    made.train_step = lambda data: {}
    return made


def same_names() -> Any:
    return compiled(layers.Dense(3, name="a"), Two(name="b"))


class Two(layers.Layer):
    def build(self, shape: Any) -> None:
        self.first = self.add_weight(name="w", shape=(3,))
        self.second = self.add_weight(name="w", shape=(3,))

    def call(self, inputs: Any) -> Any:
        return inputs * self.first + self.second


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: model(lambda: 3), "model() returned int; due is a compiled keras.Model"),
    "not callable": (lambda: model(3), "model is a keras.Model, its class or a factory, found int"),
    "not built": (lambda: model(unbuilt), "has no weights yet: begin it with keras.Input(shape)"),
    "not compiled": (
        lambda: model(lambda: keras.Sequential([keras.Input((4,)), layers.Dense(3)])),
        "sequential is not compiled: model.compile(loss=",
    ),
    "a train_step that is set": (lambda: model(replaced), "Sequential overrides train_step, which workers do not call"),
    "nothing to train": (lambda: model(lambda: compiled(layers.ReLU())), "sequential has no trainable weight"),
    "one path twice": (lambda: model(same_names), "two weights have the path 'sequential/b/w': name their layers"),
    "no such state": (
        lambda: model(net, state={"*/x": "sum"}),
        "state: '*/x' matches none of the weights: sequential/",
    ),
    "a trained state": (
        lambda: model(net, state={"*/bias": "sum"}),
        "state: 'sequential/dense/bias' is trained; allowed: weights that are not trainable",
    ),
    "whole numbers averaged": (
        lambda: model(lambda: compiled(Counting("int32"), layers.Dense(3)), state={"*/count": "average:0.1"}),
        "state: 'sequential/counting/count' of int32 is 'average:0.1'; allowed: counter for whole numbers",
    ),
    "state of a layer": (
        lambda: model(lambda: compiled(Counting(), layers.Dense(3))),
        "'sequential/counting/count' is written while a step is computed",
    ),
    "a metric that is no sum": (
        lambda: model(lambda: compiled(layers.Dense(1), loss="mse", metrics=[Largest(name="largest")])),
        "metric 'largest' is not known to be a sum over examples",
    ),
    "a loss of several numbers": (
        lambda: model(
            lambda: compiled(
                layers.Dense(3), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
            )
        ),
        "the loss must be one number, the mean over a batch; found shape (8,)",
    ),
    "the same model each time": (
        lambda: model(itertools.repeat(net()).__next__).to_user_object({}),
        "the factory returns the same model each time: give the model itself",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(mistake: str) -> None:
    make, says = MISTAKES[mistake]
    with pytest.raises((ConfigurationError, WrongModel)) as refused:
        make().check(batch())
    assert says in str(refused.value)


@pytest.mark.parametrize("method", keras_variables.NOT_CALLED)
def test_a_method_that_nobody_calls_is_refused(method: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Own overrides {method}, which workers do not call: "):
        model(overriding(method))


def test_each_public_method_of_keras_trainer_is_called_or_refused() -> None:
    trainer = next(kind for kind in keras.Model.__mro__ if kind.__module__ == "keras.src.trainers.trainer")
    public = {name for name, value in vars(trainer).items() if callable(value) and not name.startswith("_")}
    called = {"compute_loss", "get_metrics_result", "reset_metrics"}
    of_the_user = {"compile", "compile_from_config", "get_compile_config"}
    assert public - set(keras_variables.NOT_CALLED) == called | of_the_user


@pytest.mark.parametrize(("first", "outside"), [(1, 3), (-1, -1)])
def test_targets_that_are_no_class_of_the_outputs_are_refused(first: int, outside: int) -> None:
    """On JAX Keras computes a loss of them, to which they add nothing."""
    given = model(net)
    values = first_values(given)
    given.evaluate(values, batch(), np)  # where Keras builds the loss, which PyTorch would refuse to do
    for call in (given.loss_and_gradients, given.evaluate):
        with pytest.raises(WrongModel, match=f"have class {outside}; the outputs have classes 0 to 2"):
            call(values, batch(targets=Y + first), np)


def test_a_class_that_the_loss_leaves_out_needs_no_output() -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    given = model(lambda: compiled(layers.Dense(3), loss=loss, metrics=[]))
    assert np.isfinite(given.loss_and_gradients(first_values(given), batch(targets=Y - 1), np)[0])
