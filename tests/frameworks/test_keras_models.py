"""Keras models: the gradients of Keras alone, or a sentence. `test_keras_backends` has the other backend."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.models.framework import WrongModel, step_seed
from parashard.models.judging import Totals

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="NO TEST OF ps.keras: it is not installed; `make test-frameworks` has it")
layers = keras.layers
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


class Largest(keras.metrics.Metric):
    """The largest output: no sum."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.most


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


def test_gradients_are_those_of_keras_alone_with_all_that_compile_and_the_layers_say() -> None:
    ours = model(plain)
    values = first_values(ours)
    loss, gradients = ours.loss_and_gradients(values, batch(5), np)
    due, found = alone(ours.own(values), values)
    assert loss == due
    assert {name: gradient.tobytes() for name, gradient in gradients.items()} == {
        name: gradient.tobytes() for name, gradient in found.items()
    }


def test_loss_weights_and_a_loss_by_name_count() -> None:
    def weighted(weight: float) -> Any:
        return lambda: compiled(layers.Dense(1), loss="mse", loss_weights=[weight], metrics=["mae"])

    targets = np.ones((8, 1), np.float32)
    once, thrice = (model(weighted(weight)) for weight in (1.0, 3.0))
    values = first_values(once)
    single, triple = (one.loss_and_gradients(values, batch(0, targets), np)[0] for one in (once, thrice))
    outputs = once.predict(values, X)
    assert single == pytest.approx(np.mean((outputs - 1) ** 2))
    assert triple == pytest.approx(3 * single)
    assert float(once.evaluate(values, batch(0, targets), np)["mae"]) == pytest.approx(np.mean(np.abs(outputs - 1)))


def test_a_step_computed_again_has_the_same_gradient_and_another_step_has_another() -> None:
    ours, elsewhere = model(), model()
    values = first_values(ours)
    first, _, again = (ours.loss_and_gradients(values, batch(step), np)[1] for step in (1, 2, 1))
    there = elsewhere.loss_and_gradients(values, batch(1), np)[1]
    other = ours.loss_and_gradients(values, batch(2), np)[1]
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert all(np.array_equal(first[name], there[name]) for name in first)
    assert any(not np.array_equal(first[name], other[name]) for name in first)


def test_what_is_drawn_without_a_seed_generator_is_seeded_too_or_refused() -> None:
    class Noise(layers.Layer):
        def call(self, inputs: Any, training: bool = False) -> Any:
            return inputs + keras.random.normal((4,)) if training else inputs

    ours = model(lambda: compiled(Noise(), layers.Dense(3)))
    values = first_values(ours)
    if BACKEND == "jax":
        with pytest.raises(ValueError, match="seeded random ops"):
            ours.check(batch())
        return
    first, again, other = (ours.loss_and_gradients(values, batch(step), np)[0] for step in (1, 1, 2))
    assert first == again != other


def test_a_factory_has_the_same_names_and_values_whatever_was_made_before() -> None:
    first, second = model(), model()
    one, two = first_values(first), first_values(second)
    assert list(one) == list(two) == WEIGHTS
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)
    assert not np.array_equal(one[WEIGHTS[0]], first_values(model(seed=4))[WEIGHTS[0]])


def test_making_a_model_leaves_the_users_generators_and_names_alone() -> None:
    keras.utils.set_random_seed(1)
    due, name = np.random.rand(), layers.Dense(1).name
    keras.utils.set_random_seed(1)
    model()
    number = 1 + int(name.rpartition("_")[2] or 0) if "_" in name else 1
    assert (np.random.rand(), layers.Dense(1).name) == (due, f"dense_{number}")


def test_an_instance_keeps_its_weights_and_is_not_written() -> None:
    instance = net()
    before = [np.array(variable.numpy()) for variable in instance.variables]
    ours = model(instance)
    values = first_values(ours)
    assert [value.tolist() for value in values.values()] == [v.numpy().tolist() for v in instance.trainable_variables]
    ours.loss_and_gradients(values, batch(), np)
    ours.evaluate(values, batch(), np)
    owned = ours.own({name: value + 1 for name, value in values.items()})
    assert all(np.array_equal(v.numpy(), value) for v, value in zip(instance.variables, before, strict=True))
    assert all(np.array_equal(v.numpy(), values[v.path] + 1) for v in owned.trainable_variables)


def test_pulled_arrays_are_neither_written_nor_needed_writable() -> None:
    ours = model()
    values = {name: value.copy() for name, value in ours.initial_variables().items()}
    for value in values.values():
        value.flags.writeable = False
    before = {name: value.copy() for name, value in values.items()}
    ours.loss_and_gradients(values, batch(), np)
    ours.evaluate(values, batch(), np)
    assert all(np.array_equal(before[name], values[name]) for name in values)


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


def test_statistics_of_batch_normalisation_are_pushed_as_the_batchs_own() -> None:
    ours = model(lambda: compiled(layers.BatchNormalization(momentum=0.9), layers.Dense(3)))
    values = first_values(ours)
    assert kinds(ours) == dict.fromkeys(
        ["sequential/batch_normalization/moving_mean", "sequential/batch_normalization/moving_variance"], "average:0.1"
    )
    pushed = ours.loss_and_gradients(values, batch(), np)[1]
    assert np.allclose(pushed["sequential/batch_normalization/moving_mean"], X.mean(0), atol=1e-5)
    assert np.allclose(pushed["sequential/batch_normalization/moving_variance"], X.var(0), atol=1e-5)
    due, found = alone(ours.own(values), values)
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
    owned = ours.own({**values, name: values[name] + pushed})
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
    owned = ours.own({**values, "sequential/scaled/scale": np.full(1, 7, np.float32)})
    assert float(owned.layers[0].scale.numpy()) == 7.0


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16", "mixed_float16"])
def test_a_policy_of_half_precision_is_kept(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    try:
        ours = model()
    finally:
        keras.config.set_dtype_policy("float32")
    values = first_values(ours)
    loss, gradients = ours.loss_and_gradients(values, batch(), np)
    assert np.isfinite(loss)
    assert {gradient.dtype for gradient in gradients.values()} == {np.dtype(np.float32)}
    assert ours.predict(values, X).dtype == np.float32
    assert ours.own(values).layers[0].dtype_policy.name == policy


def test_evaluations_are_those_of_keras() -> None:
    ours = model(plain)
    values = first_values(ours)
    due = ours.own(values).evaluate(X, Y, verbose=0, return_dict=True, batch_size=8)
    found = figures(ours.evaluate(values, batch(), np))
    assert found == pytest.approx(due)
    assert figures(ours.evaluate(values, batch(), np)) == found  # nothing is left of an evaluation


def test_what_is_saved_opens_in_keras(tmp_path: Path) -> None:
    ours = model()
    values = {name: value + 1 for name, value in ours.initial_variables().items()}
    for given in (ours, model(net())):
        theirs = dict(zip(first_values(given), values.values(), strict=True))
        given.own(theirs).save(tmp_path / "model.keras")
        opened = keras.models.load_model(tmp_path / "model.keras")
        assert np.allclose(opened.predict(X, verbose=0), ours.predict(values, X))
        assert opened.evaluate(X, Y, verbose=0, return_dict=True)["accuracy"] >= 0


def unbuilt() -> Any:
    made = keras.Sequential([layers.Dense(3)])
    made.compile(loss="mse")
    return made


class OwnStep(keras.Sequential):
    def train_step(self, *arguments: Any) -> Any:
        raise NotImplementedError


def own_step() -> Any:
    made = OwnStep([keras.Input((4,)), layers.Dense(3)])
    made.compile(loss="mse")
    return made


def same_names() -> Any:
    return compiled(layers.Dense(3, name="a"), Two(name="b"))


class Two(layers.Layer):
    def build(self, shape: Any) -> None:
        self.first = self.add_weight(name="w", shape=(3,))
        self.second = self.add_weight(name="w", shape=(3,))

    def call(self, inputs: Any) -> Any:
        return inputs * self.first + self.second


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


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: model(lambda: 3), "model() returned int; due is a compiled keras.Model"),
    "not callable": (lambda: model(3), "model is a keras.Model, its class or a factory, found int"),
    "not built": (lambda: model(unbuilt), "has no weights yet: begin it with keras.Input(shape)"),
    "not compiled": (
        lambda: model(lambda: keras.Sequential([keras.Input((4,)), layers.Dense(3)])),
        "sequential is not compiled: model.compile(loss=",
    ),
    "a train_step": (lambda: model(own_step), "OwnStep has a train_step of its own"),
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
        lambda: model(itertools.repeat(net()).__next__).own({}),
        "the factory returns the same model each time: give the model itself",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(mistake: str) -> None:
    make, says = MISTAKES[mistake]
    with pytest.raises((ConfigurationError, WrongModel)) as refused:
        make().check(batch())
    assert says in str(refused.value)


def test_inputs_and_targets_may_be_named() -> None:
    def two_headed() -> Any:
        left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
        hidden = layers.Dense(3)(layers.Concatenate()([left, right]))
        made = keras.Model({"left": left, "right": right}, {"a": hidden, "b": layers.Dense(1, name="b")(hidden)})
        sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(loss={"a": sparse, "b": "mse"}, loss_weights={"a": 1.0, "b": 0.5}, metrics={"a": ["accuracy"]})
        return made

    ours = model(two_headed)
    values = first_values(ours)
    data: Any = {"left": X, "right": X[::-1].copy()}, {"a": Y, "b": np.ones((8, 1), np.float32)}
    named = Batch(0, 0, np.arange(8), *data)
    loss, gradients = ours.loss_and_gradients(values, named, np)
    found = figures(ours.evaluate(values, named, np))
    due = ours.own(values).evaluate(*data, verbose=0, return_dict=True, batch_size=8)
    assert loss == pytest.approx(found["loss"])
    assert found == pytest.approx(due)
    assert all(gradient.any() for gradient in gradients.values())


def test_the_seed_of_a_step_is_known() -> None:
    """What a reader needs to compute a step in plain Keras."""
    ours = model()
    values = first_values(ours)
    _, gradients = ours.loss_and_gradients(values, batch(5), np)
    made = ours.own(values)
    words = step_seed("keras 0", 3, 5)
    state = made.non_trainable_variables[0]
    state.assign(np.array([words & 0xFFFFFFFF, words >> 32], np.uint32).view(state.dtype))
    if BACKEND == "torch":
        keras.utils.set_random_seed(step_seed("keras", 3, 5) & 0xFFFFFFFF)
    _, due = alone(made, values)
    assert all(gradients[name].tobytes() == due[name].tobytes() for name in due)


def test_a_loss_of_float16_is_scaled() -> None:
    def small() -> Any:
        return compiled(layers.Dense(3, dtype="mixed_float16"), loss=lambda y, outputs: outputs[:, 0] * 1e-6)

    ours, exact = model(small), model(lambda: compiled(layers.Dense(3), loss=lambda y, outputs: outputs[:, 0] * 1e-6))
    values = first_values(ours)
    found, due = (one.loss_and_gradients(values, batch(), np)[1][WEIGHTS[1]] for one in (ours, exact))
    assert due == pytest.approx([1e-6, 0, 0])
    assert found == pytest.approx(due, rel=1e-2)


def test_a_rounds_mean_is_the_gradient_of_all_its_examples() -> None:
    ours = model(lambda: compiled(layers.Dense(5, activation="relu"), layers.Dense(3)))
    values = first_values(ours)
    halves = [Batch(step, 0, np.arange(4), X[4 * step :][:4], Y[4 * step :][:4]) for step in (0, 1)]
    first, second = (ours.loss_and_gradients(values, half, np)[1] for half in halves)
    _, due = alone(ours.own(values), values)
    apart = sum(np.sum(((first[name] + second[name]) / 2 - due[name]) ** 2) for name in due)
    assert np.sqrt(apart / sum(np.sum(gradient**2) for gradient in due.values())) < 1e-6


def test_metrics_of_batches_are_those_of_all_examples_though_they_are_no_means() -> None:
    """Of three batches of unequal size, with weights, as Keras has them of all at once."""

    def judged() -> Any:
        own = [keras.metrics.AUC(num_thresholds=50, name="auc"), keras.metrics.RootMeanSquaredError(), "mae"]
        weighted = [keras.metrics.Precision(name="precision"), keras.metrics.MeanAbsoluteError(name="weighted")]
        sigmoid = layers.Dense(1, activation="sigmoid")
        return compiled(sigmoid, loss="binary_crossentropy", metrics=own, weighted_metrics=weighted)

    ours = model(judged)
    values = first_values(ours)
    targets = np.array([0, 1, 1, 0, 1, 0, 0, 1], np.float32)[:, None]
    weights = np.arange(1, 9, dtype=np.float32) / 4
    totals = Totals()
    for rows in (slice(0, 3), slice(3, 4), slice(4, 8)):
        at = np.arange(8)[rows]
        totals.add(ours.evaluate(values, Batch(-1, -1, at, X[rows], targets[rows], weights[rows]), np), len(at))
    own = ours.own(values)
    due = own.evaluate(X, targets, sample_weight=weights, verbose=0, return_dict=True, batch_size=8)
    found = totals.figures()
    assert {name: found[name] for name in due if name != "loss"} == pytest.approx(
        {name: value for name, value in due.items() if name != "loss"}, rel=1e-5
    )
    assert 0 < found["auc"] <= 1


def test_a_metric_of_several_figures_is_refused() -> None:
    ours = model(lambda: compiled(layers.Dense(3), loss="mse", metrics=[keras.metrics.R2Score(None)]))
    with pytest.raises(
        ConfigurationError, match=r"'r2_score' has figures of shape \(3,\); allowed: one, such as F1Score"
    ):
        ours.check(batch(0, np.eye(3, dtype=np.float32)[Y]))
