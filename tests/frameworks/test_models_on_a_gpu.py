"""Models of frameworks on a real GPU, by a worker's task: gradients and state of the same steps on the CPU.

Those are the framework's own, as `test_torch_models.py` and `test_jax_models.py` show.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard_worker.device import Cpu, Gpu
from support.gpu_steps import assert_alike, steps_of

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the other tests of this process use the GPU, too

X = np.random.default_rng(0).normal(size=(320, 12)).astype(np.float32)
Y = np.arange(320) % 3


def torch_model() -> Any:
    torch = pytest.importorskip("torch", reason="NO TEST OF ps.torch ON A GPU: PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")
    nn = torch.nn

    def net() -> Any:
        return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 3))

    return ps.torch.Model(net, nn.functional.cross_entropy)


def jax_model() -> Any:
    jax = pytest.importorskip("jax", reason="NO TEST OF ps.jax ON A GPU: JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip(f"JAX computes on {jax.default_backend()}")
    jnp = jax.numpy

    def init(key: Any) -> Any:
        first, second = jax.random.split(key)
        return {"v": jax.random.normal(first, (32, 3)), "w": jax.random.normal(second, (12, 32)), "b": jnp.zeros(32)}

    def loss(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
        hidden = jax.nn.relu(jnp.dot(inputs, parameters["w"], precision="highest") + parameters["b"])
        outputs = jnp.dot(hidden, parameters["v"], precision="highest")  # on a GPU the default has fewer bits
        return -jax.nn.log_softmax(outputs)[jnp.arange(len(targets)), targets].mean()

    return ps.jax.Model(init, loss)


@pytest.mark.gpu
@pytest.mark.parametrize("made", [torch_model, jax_model])
def test_steps_on_a_gpu_have_the_gradients_and_state_of_steps_on_the_cpu(xp_gpu: Any, made: Any) -> None:
    steps = []
    for device in (Gpu(0), Cpu()):
        model = made()
        model.seed(3)
        steps.append(steps_of(model, device, (X, Y)))
    assert_alike(*steps)
