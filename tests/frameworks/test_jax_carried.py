"""What JAX lets a user do: each row of docs/carried.md trains as in JAX alone, or is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch
from parashard.errors import ConfigurationError, WrongModel

jax: Any = pytest.importorskip("jax", reason="NO TEST OF ps.jax: it is not installed; `make test-frameworks` has it")
jnp = jax.numpy
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = X.sum(1) ** 2
BATCH = Batch(0, 0, np.arange(8), X, Y)


class Pair(NamedTuple):
    b: Any
    w: Any


@jax.tree_util.register_dataclass
@dataclass
class Line:
    b: Any
    w: Any


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return x


doubled.defvjp(lambda x: (x, None), lambda rest, gradient: (2 * gradient,))


def w_and_b(parameters: Any) -> tuple[Any, Any]:
    if isinstance(parameters, dict):
        return parameters["w"], parameters.get("b", 0.0)
    return parameters.w, parameters.b


def error(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    w, b = w_and_b(parameters)
    return jnp.mean((inputs @ w + b - targets) ** 2)


def by(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the loss of parameters that are changed first."""
    return lambda parameters, inputs, targets, key: error(change(parameters), inputs, targets, key)


def scanned(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    def one(total: Any, row: Any) -> Any:
        return total + jnp.mean((row[0] @ parameters["w"] - row[1]) ** 2), None

    return jax.lax.scan(one, 0.0, (inputs, targets))[0] / len(targets)


def by_gradient(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    found = jax.grad(lambda w: jnp.mean((inputs @ w - targets) ** 2))(parameters["w"])
    return jnp.mean(found**2)


def told(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    jax.debug.callback(lambda total: None, inputs.sum())
    return error(parameters, inputs, targets, key)


def ones(**more: Any) -> Callable[[Any], Any]:
    return lambda key: {"w": jnp.ones(4), **more}


def tied(key: Any) -> Any:
    w = jnp.ones(4)
    return {"w": w, "b": w.mean(), "same": w}


CARRIED: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "a dict": (ones(b=jnp.zeros(())), error),
    "a named tuple": (lambda key: Pair(jnp.zeros(()), jnp.ones(4)), error),
    "a registered dataclass": (lambda key: Line(jnp.zeros(()), jnp.ones(4)), error),
    "a leaf of NumPy and a number": (lambda key: {"w": np.ones(4, np.float32), "b": 0.5}, error),
    "an empty leaf": (ones(none=jnp.zeros((0, 3))), error),
    "bfloat16": (lambda key: {"w": jnp.ones(4, jnp.bfloat16)}, by(lambda p: {"w": p["w"].astype(jnp.float32)})),
    "float16": (lambda key: {"w": jnp.ones(4, jnp.float16)}, by(lambda p: {"w": p["w"].astype(jnp.float32)})),
    "an array in two leaves": (tied, by(lambda p: {"w": p["w"] + p["same"], "b": p["b"]})),
    "stop_gradient": (ones(b=jnp.ones(())), by(lambda p: {"w": p["w"], "b": jax.lax.stop_gradient(p["b"])})),
    "checkpoint": (ones(), jax.checkpoint(error)),
    "custom_vjp": (ones(), by(lambda p: {"w": doubled(p["w"])})),
    "jit": (ones(), jax.jit(error)),
    "scan": (ones(), scanned),
    "a gradient in the loss": (ones(), by_gradient),
    "a debug callback": (ones(), told),
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_is_carried_has_the_gradients_of_jax(name: str) -> None:
    init, loss = CARRIED[name]
    ours = ps.jax.Model(init, loss)
    ours.seed(0)
    values = values_of(ours)
    ours.check(BATCH)
    found, gradients = ours.loss_and_gradients(values, BATCH, np)
    due, of_leaves = jax.value_and_grad(loss)(ours.to_user_object(values), X, Y, None)
    assert float(found) == pytest.approx(float(due), rel=1e-5)
    leaves = [np.asarray(leaf, np.float32).ravel() for leaf in jax.tree_util.tree_leaves(of_leaves)]
    for leaf, gradient in zip(leaves, gradients.values(), strict=True):
        assert np.ravel(np.asarray(gradient)) == pytest.approx(leaf, rel=1e-3, abs=1e-5)


def values_of(ours: Any) -> dict[str, Any]:
    return {name: value[1] if isinstance(value, tuple) else value for name, value in ours.initial_variables().items()}


def drawn(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    return error({"w": parameters["w"] * np.random.rand()}, inputs, targets, key)


def drawn_array(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    return error({"w": parameters["w"] * jnp.asarray(np.random.rand(4) > 0.5)}, inputs, targets, key)


def not_finished(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    return float(error(parameters, inputs, targets, key))


def branched(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    return error(parameters, inputs, targets, key) if parameters["w"][0] > 0 else 0.0


ONLY = "is {}; allowed: real floating point, or whole numbers that state= names as a counter"
REFUSED: dict[str, tuple[Callable[[Any], Any], Callable[..., Any], str]] = {
    "whole numbers": (ones(n=jnp.arange(3)), error, "parameter 'n' " + ONLY.format("int32")),
    "booleans": (ones(n=jnp.ones(3, bool)), error, "parameter 'n' " + ONLY.format("bool")),
    "complex numbers": (lambda key: {"w": jnp.ones(4, jnp.complex64)}, error, "'w' " + ONLY.format("complex64")),
    "a key": (lambda key: {"w": jnp.ones(4), "k": key}, error, "'k' " + ONLY.format("key<fry>")),
    "a function": (ones(f=jnp.tanh), error, "parameter 'f' is a PjitFunction; allowed: arrays"),
    "a text": (ones(f="relu"), error, "parameter 'f' is a str; allowed: arrays"),
    "more than a loss": (ones(), lambda *given: (error(*given), {}), "the loss must be a scalar"),
    "a loss of Python": (ones(), not_finished, "float"),
    "a branch on a value": (ones(), branched, "boolean conversion of traced array"),
    "a number of NumPy's generator": (ones(), drawn, "draws from NumPy's or Python's generator while JAX traces it"),
    "an array of NumPy's generator": (ones(), drawn_array, "draws from NumPy's or Python's generator"),
    "no parameter": (ones(), lambda p, x, y, key: jnp.mean((x - y[:, None]) ** 2), "depends on no parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_is_refused_by_name(name: str) -> None:
    init, loss, says = REFUSED[name]
    ours = ps.jax.Model(init, loss)
    with pytest.raises((ConfigurationError, WrongModel, jax.errors.JAXTypeError)) as refused:
        seeded_and_checked(ours)
    assert says in str(refused.value)


def seeded_and_checked(ours: Any) -> None:
    ours.seed(0)
    ours.check(BATCH)


def test_a_pytree_that_is_given_back_shares_no_array() -> None:
    ours = ps.jax.Model(ones(), error)
    ours.seed(0)
    values = values_of(ours)
    given_away = jax.jit(lambda tree: jax.tree_util.tree_map(lambda leaf: leaf * 0, tree), donate_argnums=0)
    given_away(ours.to_user_object(values))
    assert np.array_equal(values["w"], np.ones(4))
    assert np.array_equal(ours.to_user_object(values)["w"], np.ones(4))


def unpaired(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    return jnp.mean((inputs @ parameters["w"] - targets) ** 2)


@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_a_loss_that_compares_each_output_with_every_target_is_warned_of(shape: tuple[int, ...]) -> None:
    ours = ps.jax.Model(lambda key: {"w": jnp.zeros(shape)}, unpaired)
    ours.seed(0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ours.check(BATCH)
    assert ["whichever target belongs to which example" in str(one.message) for one in found] == [True] * (
        len(shape) - 1
    )
