"""JAX models: the gradients of JAX alone for any pytree, or a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.models.framework import WrongModel, step_seed

jax = pytest.importorskip("jax", reason="NO TEST OF ps.jax: it is not installed; `make test-frameworks` has it")
jnp = jax.numpy

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3


def batch(step: int = 0) -> Batch:
    return Batch(step, 0, np.arange(8), X, Y)


def init(key: Any) -> Any:
    return {
        "layers": [jax.random.normal(key, (4, 3)), jnp.zeros(3, jnp.bfloat16)],
        "scale": jnp.float32(2.0),
        "unused": jnp.ones(2),
    }


def apply(parameters: Any, inputs: Any) -> Any:
    weight, bias = parameters["layers"]
    return (inputs @ weight + bias) * parameters["scale"]


def loss(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    outputs = apply(parameters, inputs)
    if key is not None:
        outputs = outputs * jax.random.bernoulli(key, 0.5, outputs.shape)
    return -jax.nn.log_softmax(outputs)[jnp.arange(len(targets)), targets].mean()


def model(**arguments: Any) -> Any:
    found = ps.jax.Model(**{"init": init, "loss": loss, "apply": apply, "metrics": ["accuracy"], **arguments})
    found.seed(3)
    return found


def test_leaves_are_variables_by_their_paths() -> None:
    values = model().initial_variables()
    assert {name: (value.shape, value.dtype.name) for name, value in values.items()} == {
        "layers/0": ((4, 3), "float32"),
        "layers/1": ((3,), "float32"),
        "scale": ((1,), "float32"),
        "unused": ((2,), "float32"),
    }
    tree = model().own({**values, "scale": np.full(1, 7, np.float32)})
    assert (tree["scale"].shape, float(tree["scale"]), tree["layers"][1].dtype) == ((), 7.0, jnp.bfloat16)


def test_gradients_are_those_of_jax_alone() -> None:
    ours = model()
    values = ours.initial_variables()
    found, gradients = ours.loss_and_gradients(values, batch(5), np)
    key = jax.random.key(step_seed("jax", 3, 5))
    due, alone = jax.jit(jax.value_and_grad(loss))(init(jax.random.key(3)), X, Y, key)
    assert found == float(due)
    assert gradients["layers/0"].tobytes() == np.asarray(alone["layers"][0]).tobytes()
    assert gradients["scale"].shape == (1,)
    assert gradients["unused"].tolist() == [0, 0]


def test_a_step_computed_again_has_the_same_gradient_and_another_step_has_another() -> None:
    ours = model()
    values = ours.initial_variables()
    first, other, again = (ours.loss_and_gradients(values, batch(step), np)[1]["layers/0"] for step in (1, 2, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_pulled_arrays_may_be_used_again_at_once() -> None:
    ours = model()
    values = {name: value.copy() for name, value in ours.initial_variables().items()}
    tree = ours.own(values)
    before = np.array(tree["layers"][0])
    for value in values.values():
        value.fill(np.nan)
    assert np.array_equal(np.array(tree["layers"][0]), before)


def test_metrics_are_means_over_the_batch() -> None:
    ours = model()
    values = ours.initial_variables()
    outputs = ours.predict(values, X)
    assert ours.evaluate(values, batch(), np)["accuracy"] == pytest.approx(np.mean(outputs.argmax(1) == Y))


def whole(key: Any) -> Any:
    return {"steps": jnp.zeros(2, jnp.int32)}


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a loss of several numbers": (
        lambda: model(loss=lambda p, x, y, k: x @ p["layers"][0]),
        "the loss must be a scalar",
    ),
    "a whole number": (lambda: model(init=whole), "parameter 'steps' is int32; allowed: real floating point"),
    "one path twice": (
        lambda: model(init=lambda key: {"a": {"w": jnp.ones(1)}, "a/w": jnp.ones(1)}),
        "two parameters have the same path",
    ),
    "nothing": (lambda: model(init=lambda key: {}), "init returned no arrays"),
    "no function": (lambda: model(init=3), "init is a function, found int"),
    "metrics of no outputs": (lambda: model(apply=None), "metrics are of outputs: they need apply="),
    "an unknown metric": (lambda: model(metrics=["acc"]), "metric 'acc' is unknown; allowed: accuracy, or a function"),
    "a metric twice": (lambda: model(metrics=["accuracy", "accuracy"]), "two metrics are named 'accuracy'"),
}


def computed_by(make: Callable[[], Any]) -> None:
    made = make()
    made.loss_and_gradients(made.initial_variables(), batch(), np)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(mistake: str) -> None:
    make, says = MISTAKES[mistake]
    with pytest.raises((ConfigurationError, WrongModel)) as refused:
        computed_by(make)
    assert says in str(refused.value)
