"""Models of frameworks on a real GPU, whose weights lie in one array of CuPy: gradients of the framework alone."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch
from parashard.models.declaration import parts_of
from parashard.plan.flat import FlatLayout

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the other tests of this process use the GPU, too

X = np.random.default_rng(0).normal(size=(64, 12)).astype(np.float32)
Y = np.arange(64) % 3
STEPS = 3


def steps_of(model: Any, xp: Any) -> list[tuple[float, dict[str, np.ndarray]]]:
    """Return losses and gradients of some steps; weights are changed in place, as a worker's buffer is."""
    parts = {name: parts_of(name, initial) for name, initial in model.initial_variables().items()}
    layout = FlatLayout.of({name: variable for name, (variable, _) in parts.items()})
    values = layout.over(xp.zeros(layout.elements, xp.float32))
    batch = Batch(0, 0, np.arange(64), xp.asarray(X), xp.asarray(Y))
    found = []
    for step in range(STEPS):
        for name, (variable, first) in parts.items():
            present = np.asarray(first) if variable.state else moved(np.asarray(first), step)
            values[name][...] = xp.asarray(present).reshape(values[name].shape)
        loss, gradients = model.loss_and_gradients(values, batch, xp)
        assert set(gradients) == set(parts)
        assert {str(gradient.dtype) for gradient in gradients.values()} == {"float32"}
        found.append((float(loss), {name: xp.asnumpy(gradient) for name, gradient in gradients.items()}))
    return found


def moved(values: np.ndarray, step: int) -> np.ndarray:
    return values * np.float32(1 + step) + np.float32(0.1 * step)


def same(found: Any, loss: float, gradients: dict[str, np.ndarray]) -> None:
    assert found[0] == pytest.approx(loss, rel=1e-3)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[1][name].reshape(gradient.shape), gradient, rtol=2e-3, atol=1e-4, err_msg=name)


@pytest.mark.gpu
def test_pytorch_on_a_gpu_has_the_gradients_of_its_own_autograd(xp_gpu: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")
    nn, cross_entropy = torch.nn, torch.nn.functional.cross_entropy

    def net() -> Any:
        return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 3))

    model = ps.torch.Model(net, cross_entropy)
    model.seed(3)
    found = steps_of(model, xp_gpu)
    torch.manual_seed(3)
    first = net()
    for step in range(STEPS):
        alone = net().cuda()
        with torch.no_grad():
            for own, given in zip(alone.parameters(), first.parameters(), strict=True):
                own.copy_(torch.from_numpy(moved(given.detach().numpy(), step)))
        loss = cross_entropy(alone(torch.from_numpy(X).cuda()), torch.from_numpy(Y).cuda())
        loss.backward()
        same(found[step], loss.item(), {name: p.grad.cpu().numpy() for name, p in alone.named_parameters()})


@pytest.mark.gpu
def test_jax_on_a_gpu_has_the_gradients_of_its_own(xp_gpu: Any) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip(f"JAX computes on {jax.default_backend()}")
    jnp = jax.numpy

    def init(key: Any) -> Any:
        first, second = jax.random.split(key)
        return {"v": jax.random.normal(first, (32, 3)), "w": jax.random.normal(second, (12, 32)), "b": jnp.zeros(32)}

    def loss(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
        outputs = jax.nn.relu(inputs @ parameters["w"] + parameters["b"]) @ parameters["v"]
        return -jax.nn.log_softmax(outputs)[jnp.arange(len(targets)), targets].mean()

    model = ps.jax.Model(init, loss)
    model.seed(3)
    found = steps_of(model, xp_gpu)
    first = {name: np.asarray(value) for name, value in init(jax.random.key(3)).items()}
    for step in range(STEPS):
        values = {name: moved(value, step) for name, value in first.items()}
        due, gradients = jax.jit(jax.value_and_grad(loss))(values, X, Y, None)
        same(found[step], float(due), {name: np.asarray(gradient) for name, gradient in gradients.items()})
