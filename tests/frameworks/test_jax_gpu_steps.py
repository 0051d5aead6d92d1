"""A JAX step on a GPU, seen without one: the host's gradients, one array in and one out for any number of leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch
from parashard.models.declaration import parts_of
from parashard.models.framework import in_one_run
from parashard.plan.flat import GradientRun
from support.hosted_xp import HostedXp, Watched, flat_of, there

jax = pytest.importorskip("jax", reason="NO TEST OF ps.jax: it is not installed; `make test-frameworks` has it")
from parashard.models.jax import steps as jax_steps  # noqa: E402

jnp = jax.numpy

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3


def batch(step: int = 0) -> Batch:
    return Batch(step, 0, np.arange(8), X, Y)


def init(key: Any, dtype: Any = jnp.float32) -> Any:
    return {
        "layers": [jax.random.normal(key, (4, 3)).astype(dtype), jnp.zeros(3, jnp.bfloat16)],
        "scale": jnp.float32(2.0),
        "unused": jnp.ones(2),
        "fixed": jnp.ones(70),
        "stats": {"mean": jnp.zeros(3), "half": jnp.zeros(3, jnp.float16), "sum": jnp.zeros(())},
        "calls": jnp.array([2**31 - 1, 7, -3], jnp.int32),
        "small": jnp.array(120, jnp.int8),
    }


STATE = {
    "fixed": "frozen",
    "stats/mean": "average:0.3",
    "stats/half": "average:0.1",
    "stats/sum": "sum",
    "calls": "counter",
    "small": "counter",
}


def loss(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
    weight, bias = parameters["layers"]
    outputs = (inputs @ weight + bias) * parameters["scale"] + parameters["fixed"][0]
    if key is not None:
        outputs = outputs * jax.random.bernoulli(key, 0.5, outputs.shape)
    stats, mean = parameters["stats"], jax.lax.stop_gradient(outputs).mean(0)
    after = {
        "stats": {
            "mean": stats["mean"] + 0.3 * (mean - stats["mean"]),
            "half": (stats["half"] + 0.1 * (mean - stats["half"])).astype(jnp.float16),
            "sum": stats["sum"] + mean.sum(),
        },
        "calls": parameters["calls"] + jnp.array([1, 300, -1], jnp.int32),
        "small": parameters["small"] + jnp.int8(2),
    }
    return -jax.nn.log_softmax(outputs)[jnp.arange(len(targets)), targets].mean(), after


def model(init: Any = init, loss: Any = loss, **arguments: Any) -> Any:
    found = ps.jax.Model(init, loss, **{"state": STATE, **arguments})
    found.seed(3)
    return found


def values_of(ours: Any) -> dict[str, np.ndarray]:
    return {name: parts_of(name, initial)[1] for name, initial in ours.initial_variables().items()}


MODELS: dict[str, Callable[[], Any]] = {
    "state of every kind": model,
    "float16, scaled": lambda: model(lambda key: init(key, jnp.float16)),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_step_has_the_host_s_gradients_in_one_run(case: str) -> None:
    host, device, xp = MODELS[case](), MODELS[case](), HostedXp()
    values = values_of(host)
    flat = flat_of(values)
    for step in range(2):
        due_loss, due = host.loss_and_gradients(values, batch(step), np)
        loss_, found = device.loss_and_gradients(flat, there(batch(step)), xp)
        assert loss_.shape == ()
        np.testing.assert_allclose(np.asarray(loss_), np.asarray(due_loss), rtol=1e-6)
        assert isinstance(found, GradientRun)
        assert found.layout == flat.layout
        assert found.keys() == due.keys()
        rest = np.array(found.run)
        for name, gradient in due.items():
            ours = np.asarray(found[name])
            assert ours.shape == gradient.shape, name
            assert np.shares_memory(ours, found.run), name
            if name in ("calls", "small"):
                assert ours.tobytes() == np.asarray(gradient).tobytes(), name
            np.testing.assert_allclose(ours, gradient, rtol=1e-5, atol=1e-6, err_msg=name)
            rest[found.layout.places[name][0]] = 0
        assert not rest.any()
        flat["layers/0"][...] = values["layers/0"][...] = values["layers/0"] * np.float32(0.875)


def deep(leaves: int) -> Any:
    """Return a model of so many leaves."""

    def made(key: Any) -> Any:
        return {"w": [jax.random.normal(key, (4, 4)) / 2] * leaves, "last": jnp.ones((4, 3))}

    def apply(parameters: Any, inputs: Any) -> Any:
        for weight in parameters["w"]:
            inputs = inputs + jnp.tanh(inputs @ weight)
        return inputs @ parameters["last"]

    def of_outputs(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
        outputs = jax.nn.log_softmax(apply(parameters, inputs))
        return -outputs[jnp.arange(len(targets)), targets].mean()

    return model(made, of_outputs, apply=apply, state=None)


@pytest.mark.parametrize("leaves", [1, 30])
def test_one_array_crosses_each_way_and_no_number_is_looked_at(leaves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    came_in: list[int] = []

    def borrowed(array: Any) -> Any:
        came_in.append(array.size)
        return array

    ours = deep(leaves)
    flat, xp = flat_of(values_of(ours)), HostedXp()
    ours.loss_and_gradients(flat, there(batch()), xp)
    monkeypatch.setattr(jax_steps, "borrowed", borrowed)
    xp.calls.clear()
    Watched.waits.clear()
    ours.loss_and_gradients(flat, there(batch(1)), xp)
    assert came_in == [flat.layout.elements]
    assert dict(xp.calls) == {"from_dlpack": 1}
    assert not Watched.waits


def test_a_step_compiles_once_for_a_layout() -> None:
    ours = model()
    values, xp = values_of(ours), HostedXp()
    runs = flat_of(values), flat_of(values)
    for step in range(4):
        ours.loss_and_gradients(runs[step % 2], there(batch(step)), xp)
    assert ours._flat._compiled._cache_size() == 1
    ours.loss_and_gradients(dict(values), there(batch(5)), xp)  # those that lie apart have the layout of a run
    assert ours._flat._compiled._cache_size() == 1


# --- on a GPU ---


@pytest.mark.gpu
def test_on_a_gpu_steps_have_the_host_s_gradients_however_soon_weights_are_written_again(xp_gpu: Any) -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("JAX finds no GPU")
    with jax.default_matmul_precision("highest"), jax.default_device(jax.devices("cpu")[0]):
        host = model()
        values = values_of(host)
        dues = []
        for step in range(6):
            scaled = {name: value * np.float32(factor_of(value) ** step) for name, value in values.items()}
            due_loss, due = host.loss_and_gradients(scaled, batch(step), np)
            dues.append((float(due_loss), {name: np.array(gradient) for name, gradient in due.items()}))
    with jax.default_matmul_precision("highest"):
        device, found = model(), []
        flat = in_one_run({name: xp_gpu.asarray(value) for name, value in values.items()}, values, xp_gpu)
        for step in range(6):
            one = batch(step)
            given = replace(one, inputs=xp_gpu.asarray(X), targets=xp_gpu.asarray(Y), on_host=one)
            found.append(device.loss_and_gradients(flat, given, xp_gpu))
            for name in values:
                flat[name] *= xp_gpu.float32(factor_of(values[name]))  # while the step is computed
    for (due_loss, due), (loss_, gradients) in zip(dues, found, strict=True):
        assert isinstance(gradients.run, xp_gpu.ndarray)
        np.testing.assert_allclose(float(loss_), due_loss, rtol=1e-4)
        for name, gradient in due.items():
            most = 0.05 if name == "stats/half" else 2e-5  # a tenth of what is rounded to float16
            np.testing.assert_allclose(gradients[name].get(), gradient, rtol=2e-3, atol=most, err_msg=name)


def factor_of(values: Any) -> float:
    """Return what a variable is multiplied by after a step: counters are bytes."""
    return 1.0 if values.shape[-1] == 8 else 0.875
