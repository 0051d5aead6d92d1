"""A list of layers as a model: its variables' names, exact gradients through all of it, draws, what a trainer needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.models.base import FrameworkModel
from support.model_cases import finite_differences, start

L = ps.layers
X = np.random.default_rng(0).normal(size=(6, 6, 5)).astype(np.float32)
TOKENS, NEXT = np.arange(12).reshape(3, 4) % 5, np.arange(1, 13).reshape(3, 4) % 5


def images() -> Any:
    stack = [L.Conv2D(2), L.GELU(), L.MaxPool2D(), L.Flatten(), L.Dense(5), L.LayerNorm(), L.Dropout(0.3), L.Tanh()]
    return ps.Sequential(
        [*stack, L.Dense(4), L.Dropout(0.3), L.Sigmoid(), L.Dense(3)],
        input_shape=(6, 5),
        loss="softmax_cross_entropy",
        metrics=["accuracy"],
    )


def tokens() -> Any:
    stack = [L.Embedding(5, 4), L.Dense(6), L.ReLU(), L.Dense(5)]
    return ps.Sequential(stack, input_shape=(4,), loss="softmax_cross_entropy", metrics=["accuracy"])


def batch(step: int = 3) -> Batch:
    return Batch(step, 0, np.arange(6), X, np.arange(6) % 3)


CASES = {"images": (images, batch()), "tokens": (tokens, Batch(0, 0, np.arange(3), TOKENS, NEXT))}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_finite_differences(case: str) -> None:
    make, examples = CASES[case]
    model = make()
    variables = start(model, np.float64)
    loss, gradients = model.loss_and_gradients(variables, examples, np)
    assert (np.shape(loss), gradients.keys()) == ((), variables.keys())
    for name, expected in finite_differences(model, variables, examples).items():
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-4, atol=1e-7, err_msg=name)


def test_variables_are_named_by_layer_and_number() -> None:
    names = ["conv_0.weight", "conv_0.bias", "dense_0.weight", "dense_0.bias", "norm_0.weight", "norm_0.bias"]
    names += ["dense_1.weight", "dense_1.bias", "dense_2.weight", "dense_2.bias"]
    declared = images().initial_variables()
    assert list(declared) == [variable.name for variable in declared.values()] == names
    assert [name for name, variable in declared.items() if variable.decay] == [n for n in names if "norm" not in n][::2]


def test_two_layers_of_a_kind_drop_other_numbers_and_a_seed_and_a_step_others_again() -> None:
    model = ps.Sequential(
        [L.Dropout(0.5), L.Dropout(0.5), L.Dense(64, bias=False)], input_shape=(64,), loss="mean_squared_error"
    )
    inputs, variables = np.ones((1, 64), np.float32), {"dense_0.weight": np.eye(64, dtype=np.float32)}

    def kept(seed: int, step: int) -> Any:
        model.seed(seed)
        return model.forward(variables, inputs, step, np)[0]

    assert sorted(set(kept(0, 1).ravel())) == [0, 4]
    assert 0 < (kept(0, 1) > 0).mean() < 0.4, "half of a half"
    assert np.array_equal(kept(0, 1), kept(0, 1))
    assert not np.array_equal(kept(0, 1), kept(0, 2))
    assert not np.array_equal(kept(0, 1), kept(1, 1))
    assert np.array_equal(model.predict(variables, inputs), inputs)


def test_metrics_and_loss_are_means_over_the_batch() -> None:
    def largest(outputs: Any, targets: Any) -> Any:
        return outputs.max()

    model = ps.Sequential(
        [L.Dense(1)],
        input_shape=(2,),
        loss="sigmoid_cross_entropy",
        metrics=["binary_accuracy", "mean_absolute_error", largest],
    )
    variables = {"dense_0.weight": np.ones((2, 1), np.float32), "dense_0.bias": np.zeros(1, np.float32)}
    inputs, targets = np.array([[1, 1], [-1, 0], [0, 2]], np.float32), np.array([1, 0, 0])
    found = model.evaluate(variables, Batch(-1, -1, np.arange(3), inputs, targets), np)
    assert found["loss"] == pytest.approx(np.mean(np.log1p(np.exp([-2, -1, 2]))), rel=1e-6)
    assert (float(found["binary_accuracy"]), float(found["mean_absolute_error"])) == pytest.approx((2 / 3, 4 / 3))
    assert float(found["largest"]) == 2.0


def test_what_a_trainer_gives_back_predicts_and_can_be_trained_further() -> None:
    model = images()
    assert isinstance(model, FrameworkModel)
    values = start(model)
    owned = model.to_user_object(values)
    np.testing.assert_array_equal(owned(X), model.predict(values, X))
    for name, own in owned.initial_variables().items():
        assert isinstance(own, np.ndarray)
        np.testing.assert_array_equal(own, values[name])
        assert not np.shares_memory(own, values[name])
    assert model.initial_variables()["dense_0.bias"].decay is False, "it is declared still"
    trainer = ps.Trainer(owned)
    np.testing.assert_array_equal(trainer.predict(X), owned(X))
    np.testing.assert_array_equal(trainer.model()(X), owned(X))


def test_the_digest_is_of_layers_and_loss() -> None:
    def digest(rate: float, loss: str = "mean_squared_error") -> str:
        return ps.Sequential([L.Dropout(rate), L.Dense(1)], input_shape=(2,), loss=loss).config_sha256()

    assert digest(0.1) == digest(0.1)
    assert len({digest(0.1), digest(0.2), digest(0.1, "sigmoid_cross_entropy")}) == 3


class Doubled(L.Layer):
    """A user's own layer."""

    name = "doubled"

    def apply(self, weights: Any, x: Any, at: Any) -> Any:
        return 2 * x, lambda gradient, to_input: (2 * gradient, {})


def test_a_user_s_own_layer_takes_part() -> None:
    model = ps.Sequential([L.Dense(2), Doubled(), L.Dense(1)], input_shape=(3,), loss="mean_squared_error")
    examples = Batch(0, 0, np.arange(4), np.ones((4, 3)), np.arange(4.0))
    variables = start(model, np.float64)
    _, gradients = model.loss_and_gradients(variables, examples, np)
    for name, expected in finite_differences(model, variables, examples).items():
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-5, atol=1e-8, err_msg=name)


def test_a_layer_is_no_list_of_layers() -> None:
    with pytest.raises(ConfigurationError, match=r"layers is a list, such as \[ps.layers.Dense\(64\)\], found Dense"):
        ps.Sequential(ps.layers.Dense(5), input_shape=(2,), loss="mse")  # type: ignore[arg-type]
