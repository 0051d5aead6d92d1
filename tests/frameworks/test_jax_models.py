"""JAX models: the gradients of JAX alone for any pytree, or a sentence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch
from parashard.errors import ConfigurationError, WrongModel
from parashard.models.declaration import parts_of
from parashard.models.framework import (
    step_seed,
)
from parashard.plan.state import counter_rows, counter_values
from support.model_cases import check_metrics_of_batches, first_output

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
    tree = model().to_user_object({**values, "scale": np.full(1, 7, np.float32)})
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


def in_float16(factor: float) -> Any:
    """Return a model whose gradient is the factor times the mean of the inputs, past what float16 has of small ones."""
    return ps.jax.Model(
        lambda key: {"w": jnp.zeros(4, jnp.float16), "still": jnp.ones(1)},
        lambda parameters, inputs, targets, key: (inputs.astype(jnp.float16) @ parameters["w"] * factor).mean(),
        state={"still": "frozen"},
    )


@pytest.mark.parametrize("factor", [2.0**-23, 30.0])
def test_the_loss_of_float16_parameters_is_scaled_and_halved_where_that_overflows(factor: float) -> None:
    ours = in_float16(factor)
    values = {name: value[1] if isinstance(value, tuple) else value for name, value in ours.initial_variables().items()}
    given = Batch(0, 0, np.arange(8), np.ones((8, 4), np.float32), Y)
    loss, gradients = ours.loss_and_gradients(values, given, np)
    assert (loss, gradients["w"].dtype) == (0.0, np.float32)
    assert gradients["w"].tolist() == [factor] * 4


def test_float16_parameters_are_refused_where_devices_compute_their_steps_at_once() -> None:
    with pytest.raises(ConfigurationError, match="parameters of float16 need a loss that is scaled"):
        in_float16(1.0).summed_over(jax.sharding.Mesh(np.array(jax.devices()[:1]), "replica"))


def test_a_step_computed_again_has_the_same_gradient_and_another_step_has_another() -> None:
    ours = model()
    values = ours.initial_variables()
    first, other, again = (ours.loss_and_gradients(values, batch(step), np)[1]["layers/0"] for step in (1, 2, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_pulled_arrays_may_be_used_again_at_once() -> None:
    ours = model()
    values = {name: value.copy() for name, value in ours.initial_variables().items()}
    tree = ours.to_user_object(values)
    before = np.array(tree["layers"][0])
    for value in values.values():
        value.fill(np.nan)
    assert np.array_equal(np.array(tree["layers"][0]), before)


def test_metrics_are_means_over_the_batch() -> None:
    ours = model()
    values = ours.initial_variables()
    outputs = ours.predict(values, X)
    assert float(ours.evaluate(values, batch(), np)["accuracy"]) == pytest.approx(np.mean(outputs.argmax(1) == Y))


def whole(key: Any) -> Any:
    return {"steps": jnp.zeros(2, jnp.int32)}


def with_state(key: Any) -> Any:
    return {"net": init(key), "stats": {"mean": jnp.zeros(4), "seen": jnp.zeros((), jnp.int32)}, "fixed": jnp.ones(2)}


def loss_with_state(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    stats = parameters["stats"]
    after = {"mean": 0.75 * stats["mean"] + 0.25 * inputs.mean(0), "seen": stats["seen"] + len(targets)}
    return loss(parameters["net"], inputs, targets, key), {"stats": after}


STATE = {"stats/mean": "average:0.25", "*/seen": "counter", "fixed": "frozen"}


def stateful(**arguments: Any) -> Any:
    return model(
        **{"init": with_state, "loss": loss_with_state, "apply": None, "metrics": [], "state": STATE, **arguments}
    )


def test_state_is_pushed_as_its_kind_says_and_the_rest_has_gradients() -> None:
    ours = stateful()
    declared = {name: parts_of(name, initial) for name, initial in ours.initial_variables().items()}
    kinds = {name: variable.state or ("frozen" if variable.frozen else "") for name, (variable, _) in declared.items()}
    assert {name: kind for name, kind in kinds.items() if kind} == {
        "stats/mean": "average:0.25",
        "stats/seen": "counter",
        "fixed": "frozen",
    }
    values = {name: values for name, (_, values) in declared.items()}
    found, pushed = ours.loss_and_gradients(values, batch(5), np)
    alone, gradients = model().loss_and_gradients(model().initial_variables(), batch(5), np)
    assert found == alone
    assert pushed["net/layers/0"].tobytes() == gradients["layers/0"].tobytes()
    np.testing.assert_allclose(pushed["stats/mean"], X.mean(0), rtol=1e-6)
    assert counter_values(pushed["stats/seen"]).tolist() == [8]
    assert "fixed" not in pushed
    assert ours.evaluate(values, batch(), np)["loss"] > 0
    owned = ours.to_user_object(values | {"stats/seen": counter_rows(7)})
    assert (int(owned["stats"]["seen"]), owned["stats"]["seen"].dtype) == (7, jnp.int32)


@dataclass
class Unknown:
    weight: Any


def needs_key(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    return loss(parameters, inputs, targets, None) * jax.random.uniform(key)


def drawn_size(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    return loss(parameters, inputs[:, :3], targets, key)


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
    "state and one result": (
        lambda: stateful(loss=lambda p, x, y, k: p["net"]["scale"]),
        "the loss returns two things",
    ),
    "a new value of a parameter": (
        lambda: stateful(loss=lambda p, x, y, k: (p["net"]["scale"], {"net": {"scale": 1.0 * p["net"]["scale"]}})),
        "the loss returned a new value of 'net/scale', which state= does not say how to change",
    ),
    "state of another shape": (
        lambda: stateful(loss=lambda p, x, y, k: (p["net"]["scale"], {"stats": {"mean": jnp.ones(3)}})),
        "the new value of 'stats/mean' has shape (3,); it is (4,)",
    ),
    "no such leaf": (lambda: model(state={"stat": "counter"}), "state: 'stat' matches none of the leaves: layers/0"),
    "complex": (
        lambda: model(init=lambda key: {"w": jnp.ones(1, jnp.complex64)}),
        "parameter 'w' is complex64; allowed: real floating point",
    ),
    "a dataclass that JAX does not know": (
        lambda: model(init=lambda key: {"first": Unknown(jnp.ones(1))}),
        "init returned a Unknown, which JAX takes for one value: decorate the class with @jax.tree_util.register_data",
    ),
    "a function among the parameters": (
        lambda: model(init=lambda key: {"w": jnp.ones(1), "activation": jax.nn.relu}),
        "parameter 'activation' is a ",
    ),
    "nothing": (lambda: model(init=lambda key: {}), "init returned no arrays"),
    "no function": (lambda: model(init=3), "init is a function, found int"),
    "metrics of no outputs": (lambda: model(apply=None), "metrics are of outputs: they need apply="),
    "an unknown metric": (lambda: model(metrics=["acc"]), "metric 'acc' is unknown; allowed: accuracy, "),
    "a metric twice": (lambda: model(metrics=["accuracy", "accuracy"]), "two metrics are named 'accuracy'"),
}


def computed_by(make: Callable[[], Any]) -> None:
    made = make()
    values = {name: parts_of(name, initial)[1] for name, initial in made.initial_variables().items()}
    made.loss_and_gradients(values, batch(), np)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(mistake: str) -> None:
    make, says = MISTAKES[mistake]
    with pytest.raises((ConfigurationError, WrongModel)) as refused:
        computed_by(make)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda p, x, y, k: x @ p["layers"][0], "the loss must be a scalar, the mean over a batch; found shape (8, 3)"),
        (lambda p, x, y, k: (loss(p, x, y, k), 1), "the loss must be a scalar, the mean over a batch; found tuple"),
        (needs_key, "the loss cannot be computed without a key, which is None in an evaluation"),
        (drawn_size, "dot_general"),
        (lambda p, x, y, k: jax.lax.stop_gradient(loss(p, x, y, k)), "the loss depends on no parameter"),
        (lambda p, x, y, k: jnp.mean(x), "the loss depends on no parameter"),
    ],
)
def test_a_loss_is_tried_before_a_job_begins_without_computing(wrong: Any, says: str) -> None:
    model().check(batch())
    with pytest.raises((WrongModel, TypeError)) as refused:
        model(loss=wrong).check(batch())
    assert says in str(refused.value)


def test_a_loss_may_need_the_batch_in_its_own_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    in_fours = ps.jax.Model(
        lambda key: {"w": jnp.zeros(4)}, lambda p, x, y, k: ((x @ p["w"] - y) ** 2).reshape(4, -1).mean()
    )
    trainer = ps.Trainer(in_fours, ps.SGD(0.01), ps.OneDeviceStrategy(), name="fours")
    history = trainer.fit((X, Y), batch_size=8, verbose=0)
    assert history.report["steps_applied"] == [1]


def test_a_loss_may_be_linear_in_the_parameters_alone() -> None:
    model(loss=lambda p, x, y, k: sum(leaf.sum() for leaf in jax.tree_util.tree_leaves(p))).check(batch())


def test_metrics_of_batches_are_those_of_all_examples() -> None:
    ours = model(metrics=["accuracy", ps.metrics.TopK(2), first_output])
    check_metrics_of_batches(ours, ours.initial_variables(), X, Y)


@pytest.mark.parametrize(("first", "told"), [(0, 0), (1, 1), (-1, 1)])
def test_targets_that_are_no_class_of_the_outputs_are_warned_of_once(first: int, told: int) -> None:
    """JAX computes with them: NaN, or the last class for -1."""

    def picked(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(inputs @ parameters["w"]), targets[:, None], axis=1).mean()

    model = ps.jax.Model(lambda key: {"w": jnp.zeros((4, 3))}, picked, apply=lambda p, inputs: inputs @ p["w"])
    of_step = Batch(0, 0, np.arange(8), X, Y + first)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            model.loss_and_gradients({"w": np.zeros((4, 3), np.float32)}, of_step, np)
    assert len(warned) == told
    assert all("outputs have classes 0 to 2" in str(one.message) for one in warned)
