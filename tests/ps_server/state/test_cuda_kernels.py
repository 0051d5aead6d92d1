"""The CUDA kernels have the bits of the reference: their sources compiled for this CPU, and, with a GPU, on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parashard.plan.flat import FlatLayout
from parashard.plan.optimizers import LAMB, SGD, Adam, OptimizerSpec
from parashard.plan.variables import Initializer, Variable
from parashard.transports.shared_weights import weight_memory
from parashard_server.state.cuda_device import CudaDevice
from parashard_server.state.cuda_storage import CudaStorage, warm_up
from parashard_server.state.kernels import cuda
from parashard_server.state.kernels.rules import RULES
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import Storage, drawn_from, move
from support import reference_rules as reference
from support.hosted_cuda import Hosted, received
from support.in_process import SEED, plan_of, variables_of
from support.kernel_cases import COMMON, KERNELS, assert_same_bits, drawn, run

SIZES = (0, 1, 1000, 40_000)
"""The last has more than two of the blocks by which norms are added."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KERNELS)
def test_the_sources_say_what_the_reference_says(on_this_cpu: Hosted, kind: str, size: int) -> None:
    assert_same_bits(run(on_this_cpu, kind, size), run(reference, kind, size))


def test_ftrl_at_a_vanishing_rate_launches_nothing(on_this_cpu: Hosted) -> None:
    before = run(reference, "ftrl", 20, learning_rate=0.0)
    assert_same_bits(run(on_this_cpu, "ftrl", 20, learning_rate=0.0), before)


ELEMENTS = 240


def vectors_of(slots: int) -> list[np.ndarray]:
    return [drawn(0, ELEMENTS), drawn(1, ELEMENTS), *(np.abs(drawn(2 + slot, ELEMENTS)) for slot in range(slots))]


def moved_somewhere(kind: str, to_device: Any, to_host: Any) -> list[np.ndarray]:
    """Return weights and slots of which elements of one kind have moved, by an update and a decay."""
    slots, own = KERNELS[kind]
    values = RULES[kind].values(COMMON | own | {"t": 3})
    arrays = [to_device(vector) for vector in vectors_of(slots)]
    where = to_device(np.arange(ELEMENTS, dtype=np.uint8) % 3), 2
    cuda.update(kind, values, *arrays, where=where)
    cuda.decay(arrays[0], 0.25, where=where)
    return [to_host(array) for array in arrays]


def expected_somewhere(kind: str) -> list[np.ndarray]:
    slots, own = KERNELS[kind]
    arrays = vectors_of(slots)
    there = np.arange(ELEMENTS) % 3 == 2
    found = [array[there] for array in arrays]
    reference.update(kind, RULES[kind].values(COMMON | own | {"t": 3}), *found)
    reference.decay(found[0], 0.25)
    for array, moved in zip(arrays, found, strict=True):
        array[there] = moved
    return arrays


def state_moved(state: str, pushes: int, to_device: Any, to_host: Any) -> np.ndarray:
    """Return values of which the second of three runs has moved, as state of a kind."""
    marks = np.zeros(ELEMENTS, np.uint8)
    marks[80 : 160 : 8 if state == "counter" else 1] = 7
    values, pushed = (to_device(of_state(state, seed)) for seed in (0, 1))
    cuda.move(values, pushed, state, pushes, where=(to_device(marks), 7))
    return to_host(values)


def of_state(state: str, seed: int) -> np.ndarray:
    if state != "counter":
        return drawn(seed, ELEMENTS)
    most = 255 if seed == 0 else 65_535
    return np.random.default_rng(seed).integers(0, most, ELEMENTS, endpoint=True).astype(np.float32)


def expected_state(state: str, pushes: int) -> np.ndarray:
    values, pushed = (of_state(state, seed) for seed in (0, 1))
    move(values[80:160], pushed[80:160], state, pushes)
    return values


STATES = [("average:0.1", 1), ("average:0.1", 3), ("counter", 3), ("sum", 2)]
SOMEWHERE = [kind for kind in KERNELS if kind != "lamb"]


def sums(to_device: Any, to_host: Any) -> np.ndarray:
    total, gradients = to_device(drawn(0, ELEMENTS)), [to_device(drawn(seed, ELEMENTS)) for seed in (1, 2, 3)]
    for gradient in gradients:
        cuda.accumulate(total, gradient, first=gradient is gradients[0])
    return to_host(total)


def expected_sum() -> np.ndarray:
    total = drawn(1, ELEMENTS) + np.float32(0.0)
    for seed in (2, 3):
        reference.accumulate(total, drawn(seed, ELEMENTS))
    return total


def check_finite(to_device: Any) -> None:
    for value in (np.inf, -np.inf, np.nan):
        vector = drawn(0, ELEMENTS)
        assert cuda.is_finite(to_device(vector))
        vector[ELEMENTS - 1] = value
        assert not cuda.is_finite(to_device(vector))
    assert cuda.is_finite(to_device(np.full(3, np.finfo(np.float32).max, np.float32)))


@pytest.mark.parametrize("kind", SOMEWHERE)
def test_what_is_not_meant_stays_and_the_rest_moves(on_this_cpu: Hosted, kind: str) -> None:
    assert_same_bits(moved_somewhere(kind, on_this_cpu.to_device, on_this_cpu.to_host), expected_somewhere(kind))


@pytest.mark.parametrize(("state", "pushes"), STATES)
def test_state_moves_as_on_the_host(on_this_cpu: Hosted, state: str, pushes: int) -> None:
    found = state_moved(state, pushes, on_this_cpu.to_device, on_this_cpu.to_host)
    assert_same_bits([found], [expected_state(state, pushes)])


def test_gradients_are_added_as_on_the_host(on_this_cpu: Hosted) -> None:
    assert_same_bits([sums(on_this_cpu.to_device, on_this_cpu.to_host)], [expected_sum()])


def test_a_value_that_is_not_finite_is_seen(on_this_cpu: Hosted) -> None:
    check_finite(on_this_cpu.to_device)


# --- a real GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KERNELS)
def test_a_gpu_gives_the_bits_of_the_reference(on_a_device: Hosted, kind: str, size: int) -> None:  # P13
    assert_same_bits(run(on_a_device, kind, size), run(reference, kind, size))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits_to_some_elements_state_and_sums(on_a_device: Hosted) -> None:  # P13
    way = on_a_device.to_device, on_a_device.to_host
    for kind in SOMEWHERE:
        assert_same_bits(moved_somewhere(kind, *way), expected_somewhere(kind))
    for state, pushes in STATES:
        assert_same_bits([state_moved(state, pushes, *way)], [expected_state(state, pushes)])
    assert_same_bits([sums(*way)], [expected_sum()])
    check_finite(way[0])
    tiny = np.full(ELEMENTS, 1e-39, np.float32)
    total = way[0](tiny)
    cuda.accumulate(total, way[0](tiny), first=False)
    assert_same_bits([way[1](total)], [tiny + tiny])


@pytest.mark.gpu
def test_vectors_that_lie_as_a_models_arrays_have_the_bits_of_the_host(xp_gpu: Any) -> None:
    variables = variables_of(
        Variable("bias", (3,), decay=False),
        Variable("count", (2, 8), state="counter"),
        Variable("mean", (5,), state="average:0.25"),
        Variable("still", (7,), Initializer("normal", 1.0), frozen=True),
        Variable("weight", (257, 129), Initializer("normal", 1.0)),
    )
    plan, flat, device = plan_of(variables), FlatLayout.of(variables), CudaDevice(0, own_stream=False)
    spec = Adam(learning_rate=0.1, weight_decay=0.01)
    gpu = CudaStorage(plan, 0, Optimizer(spec, device.kernels), drawn_from(SEED), device=device, flat=flat)
    host = Storage(plan, 0, Optimizer(spec), drawn_from(SEED))
    total = gpu.new_sum()
    for t in range(1, 6):
        gradient = np.random.default_rng(t).integers(0, 255, host.elements).astype(np.float32)
        run = np.zeros(flat.elements, np.float32)
        for placed in host.layout:
            run[flat.places[placed.partition.variable][0]] = gradient[placed.offset : placed.stop]
        gpu.add(total, xp_gpu.asarray(run), first=True)
        gpu.apply(total, t=t)
        host.apply(gradient, t=t)
    assert gpu.resident is not None
    for placed in host.layout:
        found = xp_gpu.asnumpy(gpu.resident[placed.partition.variable]).reshape(-1)
        assert_same_bits([found], [host.weights[placed.offset : placed.stop]])
    gpu.changed_runs(0, host.weights.nbytes, None)
    assert_same_bits([gpu.weights], [host.weights])
    snapshot = gpu.snapshot()
    while snapshot.save_next():
        pass
    assert_same_bits([snapshot.weights, *snapshot.slots.values()], [host.weights, *host.slots.values()])


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
            there = received(storage, gradient)
            assert storage.is_finite(there)
            storage.apply(there, t=t)
        gpu.changed_runs(0, host.weights.nbytes, None)
        assert_same_bits([gpu.weights], [host.weights])
    snapshot = gpu.snapshot()
    while snapshot.save_next():
        pass
    assert_same_bits([snapshot.weights, *snapshot.slots.values()], [host.weights, *host.slots.values()])
