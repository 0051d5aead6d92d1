"""Keras models: the gradients of Keras alone, wherever a step is computed. `test_keras_backends` has PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.data.base import Batch
from parashard.models.framework import step_seed
from support.keras_cases import (
    BACKEND,
    WEIGHTS,
    X,
    Y,
    alone,
    batch,
    compiled,
    figures,
    first_values,
    keras,
    kinds,
    layers,
    model,
    net,
    plain,
)


def test_gradients_are_those_of_keras_alone_with_all_that_compile_and_the_layers_say() -> None:
    ours = model(plain)
    values = first_values(ours)
    loss, gradients = ours.loss_and_gradients(values, batch(5), np)
    due, found = alone(ours.to_user_object(values), values)
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


def test_a_loss_that_is_no_mean_over_all_examples_is_known() -> None:
    cross_entropy = keras.losses.SparseCategoricalCrossentropy
    for loss, means in [
        ("mse", True),
        (keras.losses.MeanSquaredError(), True),
        (lambda due, found: due - found, True),
        (keras.losses.MeanSquaredError(reduction="sum"), False),
        (cross_entropy(from_logits=True), True),
        (cross_entropy(from_logits=True, ignore_class=0), False),
    ]:
        assert model(lambda loss=loss: compiled(layers.Dense(3), loss=loss)).means_losses is means, loss


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
    owned = ours.to_user_object({name: value + 1 for name, value in values.items()})
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
    assert ours.predict(values, X).dtype == (np.float16 if policy == "mixed_float16" else np.float32)
    assert ours.to_user_object(values).layers[0].dtype_policy.name == policy


def test_what_is_saved_opens_in_keras(tmp_path: Path) -> None:
    ours = model()
    values = {name: value + 1 for name, value in ours.initial_variables().items()}
    for given in (ours, model(net())):
        theirs = dict(zip(first_values(given), values.values(), strict=True))
        given.to_user_object(theirs).save(tmp_path / "model.keras")
        opened = keras.models.load_model(tmp_path / "model.keras")
        assert np.allclose(opened.predict(X, verbose=0), ours.predict(values, X))
        assert opened.evaluate(X, Y, verbose=0, return_dict=True)["accuracy"] >= 0


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
    due = ours.to_user_object(values).evaluate(*data, verbose=0, return_dict=True, batch_size=8)
    assert loss == pytest.approx(found["loss"])
    assert found == pytest.approx(due)
    assert all(gradient.any() for gradient in gradients.values())


def test_the_seed_of_a_step_is_known() -> None:
    """What a reader needs to compute a step in plain Keras."""
    ours = model()
    values = first_values(ours)
    _, gradients = ours.loss_and_gradients(values, batch(5), np)
    made = ours.to_user_object(values)
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
    _, due = alone(ours.to_user_object(values), values)
    apart = sum(np.sum(((first[name] + second[name]) / 2 - due[name]) ** 2) for name in due)
    assert np.sqrt(apart / sum(np.sum(gradient**2) for gradient in due.values())) < 1e-6


def test_using_the_model_that_is_given_back_changes_nothing_here() -> None:
    ours = model(lambda: compiled(layers.Normalization(), layers.Dropout(0.5), layers.Dense(3)))
    values = first_values(ours)
    own = ours.to_user_object(values)
    own.fit(X, Y, verbose=0)
    own.predict(X, verbose=0)
    again = model(lambda: compiled(layers.Normalization(), layers.Dropout(0.5), layers.Dense(3)))
    assert ours.loss_and_gradients(values, batch(), np)[0] == again.loss_and_gradients(values, batch(), np)[0]
    assert np.array_equal(ours.predict(values, X), again.predict(values, X))


class Always(layers.Dropout):
    """Drops in predictions too, as Monte Carlo dropout does."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return super().call(inputs, training=True)


def test_each_prediction_and_evaluation_draws_anew_and_a_step_does_not() -> None:
    ours = model(lambda: compiled(layers.Dense(64), Always(0.5), layers.Dense(3)))
    values, held_out = first_values(ours), Batch(-1, -1, np.arange(8), X, Y)
    drawn = np.stack([ours.predict(values, X) for _ in range(20)])
    assert drawn.std(axis=0).min() > 0
    assert len({ours.evaluate(values, held_out, np)["loss"] for _ in range(5)}) == 5
    assert len({float(ours.loss_and_gradients(values, batch(), np)[0]) for _ in range(5)}) == 1


def test_an_instance_that_is_frozen_or_compiled_again_is_taken_as_it_is_now() -> None:
    given = plain()
    ours = model(given)
    values = first_values(ours)
    before, gradients = ours.loss_and_gradients(values, batch(), np)
    assert len(gradients) == 4
    given.layers[0].trainable = False
    ours.seed(3)
    assert set(kinds(ours).values()) == {"frozen"}
    assert len(ours.loss_and_gradients(values, batch(), np)[1]) == 2
    given.layers[0].trainable = True
    given.compile(loss=given.loss, loss_weights=2.0)
    ours.seed(3)
    loss, gradients = ours.loss_and_gradients(values, batch(), np)
    assert len(gradients) == 4
    assert float(loss) > float(before) + 0.5
