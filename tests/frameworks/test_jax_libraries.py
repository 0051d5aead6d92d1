"""Modules of Flax NNX and Equinox as pytrees: what of them is trained goes to `init`, the rest stays in the script."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch
from parashard.models.framework import step_seed

WHY = "NO TEST OF ps.jax WITH {}: it is not installed; `make test-frameworks` has it"
jax = pytest.importorskip("jax", reason=WHY.format("JAX"))

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3
BATCH = Batch(5, 0, np.arange(8), X, Y)


def cross_entropy(outputs: Any, targets: Any) -> Any:
    return -jax.nn.log_softmax(outputs)[jax.numpy.arange(len(targets)), targets].mean()


def trained(ours: Any) -> tuple[dict[str, Any], float, dict[str, Any]]:
    """Return first values, loss and gradients of a step."""
    ours.seed(3)
    ours.check(BATCH)
    values = ours.initial_variables()
    loss, gradients = ours.loss_and_gradients(values, BATCH, np)
    assert set(gradients) == set(values)
    assert ours.evaluate(values, BATCH, np)["loss"] > 0
    return values, loss, gradients


def test_flax_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx", reason=WHY.format("Flax"))

    class Net(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.hidden, self.output = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)

        def __call__(self, inputs: Any) -> Any:
            return self.output(nnx.relu(self.hidden(inputs)))

    structure = nnx.graphdef(Net(nnx.Rngs(0)))

    def init(key: Any) -> Any:
        return nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(key)), nnx.Param))

    def apply(parameters: Any, inputs: Any) -> Any:
        return nnx.merge(structure, parameters)(inputs)

    def loss(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
        return cross_entropy(apply(parameters, inputs), targets)

    ours = ps.jax.Model(init, loss, apply=apply, metrics=["accuracy"])
    values, found, gradients = trained(ours)
    assert list(values) == ["hidden/bias", "hidden/kernel", "output/bias", "output/kernel"]
    parameters = init(jax.random.key(3))
    key = jax.random.key(step_seed("jax", 3, 5))
    due, alone = jax.jit(jax.value_and_grad(loss))(parameters, X, Y, key)
    assert found == float(due)
    assert gradients["hidden/kernel"].tobytes() == np.asarray(alone["hidden"]["kernel"]).tobytes()
    net = nnx.merge(structure, ours.to_user_object(values))
    assert np.allclose(net(X), ours.predict(values, X))


def test_equinox() -> None:
    eqx = pytest.importorskip("equinox", reason=WHY.format("Equinox"))

    def net(key: Any) -> Any:
        return eqx.nn.MLP(4, 3, width_size=5, depth=1, key=key)

    static = eqx.partition(net(jax.random.key(0)), eqx.is_inexact_array)[1]

    def init(key: Any) -> Any:
        return eqx.filter(net(key), eqx.is_inexact_array)

    def apply(parameters: Any, inputs: Any) -> Any:
        return jax.vmap(eqx.combine(parameters, static))(inputs)

    def loss(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
        return cross_entropy(apply(parameters, inputs), targets)

    ours = ps.jax.Model(init, loss, apply=apply, metrics=["accuracy"])
    values, found, gradients = trained(ours)
    assert list(values) == ["layers/0/weight", "layers/0/bias", "layers/1/weight", "layers/1/bias"]
    key = jax.random.key(step_seed("jax", 3, 5))
    due, alone = jax.jit(jax.value_and_grad(loss))(init(jax.random.key(3)), X, Y, key)
    assert found == float(due)
    assert gradients["layers/0/weight"].tobytes() == np.asarray(alone.layers[0].weight).tobytes()
    module = eqx.combine(ours.to_user_object(values), static)
    assert np.allclose(jax.vmap(module)(X), ours.predict(values, X))
