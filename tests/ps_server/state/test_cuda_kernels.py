"""The CUDA kernels have the bits of the reference: their sources compiled for this CPU, and, with a GPU, on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parashard.plan.optimizers import LAMB, SGD, Adam, OptimizerSpec
from parashard.plan.variables import Initializer, Variable
from parashard.transports.shared_weights import weight_memory
from parashard_server.state.cuda_device import CudaDevice
from parashard_server.state.cuda_storage import CudaStorage, warm_up
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import Storage, drawn_from
from support import reference_rules as reference
from support.hosted_cuda import Hosted
from support.in_process import SEED, plan_of, variables_of
from support.kernel_cases import KERNELS, assert_same_bits, run

SIZES = (0, 1, 1000, 40_000)
"""The last has more than two of the blocks by which norms are added."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KERNELS)
def test_the_sources_say_what_the_reference_says(on_this_cpu: Hosted, kind: str, size: int) -> None:
    assert_same_bits(run(on_this_cpu, kind, size), run(reference, kind, size))


def test_ftrl_at_a_vanishing_rate_launches_nothing(on_this_cpu: Hosted) -> None:
    before = run(reference, "ftrl", 20, learning_rate=0.0)
    assert_same_bits(run(on_this_cpu, "ftrl", 20, learning_rate=0.0), before)


# --- a real GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KERNELS)
def test_a_gpu_gives_the_bits_of_the_reference(on_a_device: Hosted, kind: str, size: int) -> None:  # P13
    assert_same_bits(run(on_a_device, kind, size), run(reference, kind, size))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [SGD(learning_rate=0.1), Adam(learning_rate=0.1), LAMB(learning_rate=0.1)])
@pytest.mark.parametrize("shared", [False, True])
def test_a_shard_on_a_gpu_gives_the_bits_of_one_on_the_host(xp_gpu: Any, spec: OptimizerSpec, shared: bool) -> None:
    plan = plan_of(variables_of(Variable("bias", (3,)), Variable("weight", (257, 129), Initializer("normal", 1.0))))
    device = CudaDevice(0)
    optimizer = Optimizer(spec, device.kernels)
    warm_up(device, optimizer)
    offsets = [0, *(placed.stop for placed in plan.layouts[0])]
    memory = weight_memory(offsets, shared=shared)
    gpu = CudaStorage(plan, 0, optimizer, drawn_from(SEED), device=device, memory=memory)
    host = Storage(plan, 0, Optimizer(spec), drawn_from(SEED))
    for t in range(1, 6):
        gradient = np.random.default_rng(t).normal(size=host.elements).astype(np.float32)
        for storage in (gpu, host):
            storage.apply(gradient, t=t)
        gpu.moved(0, host.weights.nbytes, None)
        assert_same_bits([gpu.weights], [host.weights])
    snapshot = gpu.snapshot()
    while snapshot.save_next():
        pass
    assert_same_bits([snapshot.weights, *snapshot.slots.values()], [host.weights, *host.slots.values()])
