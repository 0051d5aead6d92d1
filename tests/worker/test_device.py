"""Devices: which one is opened, and that arrays come through copies as they were, however late a GPU makes them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import threadpoolctl

from parashard.data.base import Batch
from parashard.errors import ConfigurationError, ParashardError, Unavailable
from parashard.plan.flat import FlatLayout
from parashard.plan.variables import Variable
from parashard_worker.device import Cpu, Gpu, open_device
from parashard_worker.gpu_copies import PendingGradients, wait_for_gradients
from parashard_worker.gpu_norms import Scaling
from support.late_cuda import LateCuda

BATCH = Batch(3, 1, np.arange(4), np.arange(8, dtype=np.float32).reshape(4, 2), np.array([0, 1, 2, 0]))
VARIABLES = {f"v{i}": np.full((3, 2), float(i + 1), np.float32) for i in range(4)}


def use_cupy(monkeypatch: pytest.MonkeyPatch, cupy: object) -> None:
    """Make `import cupy` give this; None: as if it were not installed."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)


# --- the CPU ---


def test_the_cpu_computes_with_numpy_on_what_it_is_given() -> None:
    device = open_device("cpu")
    assert (device.name, device.xp) == ("cpu", np)
    assert device.variables_from_host(VARIABLES) is VARIABLES
    assert device.batch_from_host(BATCH) is BATCH


def test_gradients_come_from_the_cpu_as_float32() -> None:
    loss, host, finite = Cpu().to_host(np.float32(0.5), {"a": np.ones(2), "b": np.ones((2, 2), np.float32).T})
    assert (type(loss), loss, finite) == (float, 0.5, None)
    assert isinstance(host, dict)
    assert {name: (g.dtype, g.tolist()) for name, g in host.items()} == {
        "a": (np.float32, [1.0, 1.0]),
        "b": (np.float32, [[1.0, 1.0], [1.0, 1.0]]),
    }


def test_the_fingerprint_names_processor_numpy_and_blas() -> None:  # P13
    fingerprint = Cpu().fingerprint()
    assert fingerprint == Cpu().fingerprint()
    assert f"numpy {np.__version__}" in fingerprint
    assert " x" in fingerprint  # the BLAS pool and its threads


# --- choosing ---


@pytest.mark.parametrize(
    "asked", ["gpu", "cuda:", "cuda:\N{SUPERSCRIPT TWO}", "cuda:x", "cuda:-1", "cuda:1.5", "CPU", "", "rocm:0", "cpu:0"]
)
def test_a_name_that_is_no_device_is_refused(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    use_cupy(monkeypatch, LateCuda())
    with pytest.raises(ConfigurationError, match=r"is unknown; allowed: auto, cpu, cuda, cuda:N"):
        open_device(asked)


@pytest.mark.parametrize("asked", ["cuda", "cuda:0", "cuda:3"])
def test_a_gpu_without_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    use_cupy(monkeypatch, None)
    with pytest.raises(ConfigurationError, match=r"install parashard\[cuda12\] or parashard\[cuda13\]"):
        open_device(asked)


@pytest.mark.parametrize(("asked", "devices"), [("cuda:2", 2), ("cuda", 0), ("cuda:0", 0)])
def test_a_gpu_that_is_not_there_is_counted(monkeypatch: pytest.MonkeyPatch, asked: str, devices: int) -> None:
    use_cupy(monkeypatch, LateCuda(devices))
    with pytest.raises(ConfigurationError, match=rf"is not there: this machine has {devices} CUDA devices"):
        open_device(asked)


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (35, "cudaErrorInsufficientDriver", ConfigurationError),
        (100, "cudaErrorNoDevice", ConfigurationError),
        (3, "cudaErrorInitializationError", Unavailable),
        (999, "cudaErrorUnknown", Unavailable),
    ],
)
def test_a_driver_that_does_not_answer_is_reported(
    monkeypatch: pytest.MonkeyPatch, status: int, said: str, kind: type[ParashardError]
) -> None:
    cupy = LateCuda()

    def broken() -> int:
        error = cupy.cuda.runtime.CUDARuntimeError(said)
        error.status = status
        raise error

    cupy.cuda.runtime.getDeviceCount = broken
    use_cupy(monkeypatch, cupy)
    with pytest.raises(kind, match=f"no CUDA device can be used here: {said}"):
        open_device("cuda")
    assert open_device("auto").name == "cpu"


def test_auto_takes_the_first_gpu_or_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for cupy, name in ((LateCuda(2), "cuda:0 Late GPU"), (LateCuda(0), "cpu"), (None, "cpu")):
        use_cupy(monkeypatch, cupy)
        assert open_device("auto").name == name


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_workers_are_spread_over_the_gpus(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    use_cupy(monkeypatch, LateCuda(3))
    names = [open_device(asked, f"worker-{i}").name for i in range(5)]
    assert names == [f"cuda:{i} Late GPU" for i in (0, 1, 2, 0, 1)]
    assert open_device("cuda:2", "worker-1").name == "cuda:2 Late GPU"


def test_the_fingerprint_names_the_frameworks_that_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:  # P13
    def pool(version: str, folder: str) -> dict[str, object]:
        return {
            "user_api": "blas",
            "internal_api": "openblas",
            "version": version,
            "architecture": "Zen",
            "num_threads": 2,
            "filepath": f"/{folder}.libs/blas.so",
        }

    pools = [pool("0.3", "numpy"), pool("0.4", "scipy")]
    monkeypatch.setattr(threadpoolctl, "threadpool_info", lambda: pools)
    alone = Cpu().fingerprint()
    assert alone.endswith("; openblas 0.3 Zen x2")
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(__version__="0.5.0"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.4.0", get_num_threads=lambda: 3))
    assert Cpu().fingerprint() == f"{alone}; openblas 0.4 Zen x2; jax 0.5.0; torch 2.4.0 x3", "JAX calls SciPy's"


def test_a_gpus_fingerprint_names_the_gpu_but_not_its_number(monkeypatch: pytest.MonkeyPatch) -> None:  # P13
    use_cupy(monkeypatch, LateCuda(2))
    for framework in ("jax", "jaxlib", "keras", "torch"):
        monkeypatch.delitem(sys.modules, framework, raising=False)
    assert {open_device(asked).fingerprint() for asked in ("cuda:0", "cuda:1")} == {"Late GPU; cupy 0.late; cuda 12080"}


# --- copies that a GPU makes late ---


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> tuple[Gpu, LateCuda]:
    cupy = LateCuda()
    use_cupy(monkeypatch, cupy)
    return Gpu(0), cupy


def received(gpu: Gpu, loss: Any, gradients: Mapping[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
    """Return what came to the host, with gradients of variables as they are shaped."""
    declared = {name: Variable(name, gradient.shape) for name, gradient in gradients.items()}
    found = gpu.to_host(loss, gradients, declared)
    return found.loss, dict(wait_for_gradients(found.gradients))


def test_variables_in_no_run_arrive_though_their_copies_run_late(late: tuple[Gpu, LateCuda]) -> None:
    gpu, cupy = late
    kept = gpu.variables_from_host(VARIABLES)
    gpu.variables_from_host({name: values + 9 for name, values in VARIABLES.items()})
    for name, array in kept.items():
        np.testing.assert_array_equal(cupy.value_of(array), VARIABLES[name])


def test_a_batch_arrives_though_its_copies_run_late(late: tuple[Gpu, LateCuda]) -> None:
    gpu, cupy = late
    batch = gpu.batch_from_host(BATCH)
    assert (batch.step, batch.epoch, batch.indices is BATCH.indices) == (3, 1, True)
    np.testing.assert_array_equal(cupy.value_of(batch.inputs), BATCH.inputs)
    np.testing.assert_array_equal(cupy.value_of(batch.targets), BATCH.targets)
    assert batch.targets.dtype == np.int64


def test_several_arrays_and_weights_of_a_batch_arrive_in_one_copy(late: tuple[Gpu, LateCuda]) -> None:
    gpu, cupy = late
    given = {"ids": np.arange(4), "mask": np.ones((4, 2), bool), "none": np.empty((4, 0)), "one": np.float64(7)}
    weights, places = np.arange(4, dtype=np.float32), {"users": np.asfortranarray(np.arange(8).reshape(4, 2))}
    batch = gpu.batch_from_host(Batch(3, 1, np.arange(4), given, (BATCH.targets,), weights, places=places))
    assert cupy.counts["copies in"] == 1
    for name, array in given.items():
        np.testing.assert_array_equal(cupy.value_of(batch.inputs[name]), array)
        assert batch.inputs[name].dtype == array.dtype
    np.testing.assert_array_equal(cupy.value_of(batch.targets[0]), BATCH.targets)
    np.testing.assert_array_equal(cupy.value_of(batch.weights), weights)
    np.testing.assert_array_equal(cupy.value_of(batch.places["users"]), places["users"])


def test_a_larger_batch_gets_more_room(late: tuple[Gpu, LateCuda]) -> None:
    gpu, cupy = late
    for rows in (1, 1, 100, 5000, 2, 5000):
        inputs = np.random.default_rng(rows).standard_normal((rows, 3))
        batch = gpu.batch_from_host(Batch(3, 1, np.arange(rows), inputs, np.arange(rows)))
        np.testing.assert_array_equal(cupy.value_of(batch.inputs), inputs)


def test_gradients_are_read_after_the_kernels_that_write_them(late: tuple[Gpu, LateCuda]) -> None:
    gpu, cupy = late
    loss, host = received(
        gpu,
        cupy.computed(np.array(0.25, np.float32)),
        {
            "float32": cupy.computed(np.full((2, 2), 1.5, np.float32)),
            "float64": cupy.computed(np.full((2, 2), 2.5)),
            "transposed": cupy.computed(np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))),
            "of the host": np.full(3, 3.5),
        },
    )
    assert (type(loss), loss) == (float, 0.25)
    assert host["float32"].tolist() == [[1.5, 1.5], [1.5, 1.5]]
    assert host["float64"].tolist() == [[2.5, 2.5], [2.5, 2.5]]
    assert host["transposed"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert host["of the host"].tolist() == [3.5] * 3
    assert {g.dtype for g in host.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("loss", [0.5, np.float32(0.5), np.array(0.5), 1])
def test_a_loss_that_is_on_the_host_already_stays_there(late: tuple[Gpu, LateCuda], loss: object) -> None:
    gpu, cupy = late
    assert gpu.to_host(loss, {}) == (float(loss), {}, None)  # type: ignore[arg-type]
    assert received(gpu, loss, {"w": cupy.computed(np.ones(2))})[0] == float(loss)  # type: ignore[arg-type]


def test_memory_that_cuda_does_not_page_lock_is_ordinary(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cupy = LateCuda()
    cupy.refuses = True
    use_cupy(monkeypatch, cupy)
    gpu = Gpu(0)
    memory = gpu.host_memory(100)
    assert (memory.shape, memory.dtype, memory.ctypes.data % 256) == ((100,), np.float32, 0)
    assert "not-page-locked" in caplog.text
    np.testing.assert_array_equal(cupy.value_of(gpu.batch_from_host(BATCH).inputs), BATCH.inputs)
    assert received(gpu, 0.5, {"w": cupy.computed(np.ones(2))})[1]["w"].tolist() == [1.0, 1.0]


# --- a real one ---


@pytest.mark.gpu
def test_variables_survive_the_round_trip(xp_gpu: object) -> None:
    gpu = Gpu(0)
    rng = np.random.default_rng(0)
    declared = {f"v{i}": Variable(f"v{i}", (257, 129)) for i in range(8)}
    layout = FlatLayout.of(declared)
    sent: list[tuple[PendingGradients, np.ndarray]] = []
    for _ in range(20):  # often enough to use all memory again
        run = gpu.host_memory(layout.elements)
        run[:] = rng.standard_normal(layout.elements)
        variables = gpu.arrived(layout.over(run))
        found = gpu.to_host(0.0, gpu.variables_from_host(variables), declared, Scaling(0.5))
        assert found.finite
        assert isinstance(found.gradients, PendingGradients)
        sent.append((found.gradients, run))
        if len(sent) == 3:
            gradients, given = sent.pop(0)
            for name, values in layout.over(given).items():
                np.testing.assert_array_equal(gradients.wait()[name], values * np.float32(0.5))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_seen_on_the_gpu(xp_gpu: object, bad: float) -> None:
    gpu, declared = Gpu(0), {"v": Variable("v", (100_000,)), "count": Variable("count", (1, 8), state="counter")}
    on_gpu = gpu.xp.full(100_000, 3e38, np.float32)
    count = gpu.xp.ones((1, 8), np.float32)
    found = gpu.to_host(gpu.xp.full((), 0.1), {"v": on_gpu, "count": count}, declared, Scaling(0.5))
    assert (found.loss, found.finite) == (0.1, True)
    assert wait_for_gradients(found.gradients)["count"].tolist() == [[1.0] * 8], "state is not weighed"
    on_gpu[99_999] = bad
    assert not gpu.to_host(0.0, {"v": on_gpu}, declared).finite
    assert gpu.to_host(0.0, {"count": count}, declared).finite, "what was there before is zero again"


@pytest.mark.gpu
def test_a_batch_survives_the_round_trip(xp_gpu: object) -> None:
    batch = Gpu(0).batch_from_host(BATCH)
    np.testing.assert_array_equal(batch.inputs.get(), BATCH.inputs)
    np.testing.assert_array_equal(batch.targets.get(), BATCH.targets)
    assert (batch.inputs.dtype, batch.targets.dtype) == (np.float32, np.int64)


@pytest.mark.gpu
def test_gradients_of_any_layout_come_to_the_host(xp_gpu: object) -> None:
    gpu = Gpu(0)
    values = np.random.default_rng(1).standard_normal((300, 200))
    on_gpu = gpu.xp.asarray(values)
    gradients = {"float64": on_gpu * 2, "transposed": on_gpu.T.astype(np.float32), "every other": on_gpu[::2]}
    loss, host = received(gpu, on_gpu.sum(), gradients)
    assert loss == pytest.approx(values.sum())
    np.testing.assert_array_equal(host["float64"], (values * 2).astype(np.float32))
    np.testing.assert_array_equal(host["transposed"], values.T.astype(np.float32))
    np.testing.assert_array_equal(host["every other"], values[::2].astype(np.float32))


@pytest.mark.gpu
def test_a_real_fingerprint_names_gpu_cupy_and_cuda(xp_gpu: object) -> None:  # P13
    gpu = open_device("auto")
    assert gpu.name.startswith("cuda:0 ")
    assert gpu.fingerprint() == Gpu(0).fingerprint()
    assert "; cupy " in gpu.fingerprint()
    with pytest.raises(ConfigurationError, match="is not there"):
        open_device("cuda:99")
