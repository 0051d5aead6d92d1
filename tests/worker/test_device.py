"""Devices: which one is opened, and that arrays come through copies as they were, however late a GPU makes them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import threadpoolctl

from parashard.data.base import Batch
from parashard.errors import ConfigurationError, ParashardError, Unavailable
from parashard_worker.device import Cpu, Gpu, open_device
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
    loss, host = Cpu().to_host(np.float32(0.5), {"a": np.ones(2), "b": np.ones((2, 2), np.float32).T})
    assert (type(loss), loss) == (float, 0.5)
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
    assert {open_device(asked).fingerprint() for asked in ("cuda:0", "cuda:1")} == {"Late GPU; cupy 0.late; cuda 12080"}


# --- copies that a GPU makes late ---


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> tuple[Gpu, LateCuda]:
    cupy = LateCuda()
    use_cupy(monkeypatch, cupy)
    return Gpu(0), cupy


def test_variables_arrive_though_their_copies_run_late(late: tuple[Gpu, LateCuda]) -> None:
    gpu, cupy = late
    arrays = gpu.variables_from_host(VARIABLES)  # all of one size: the pool has the same buffer for each, if it is free
    for name, array in arrays.items():
        np.testing.assert_array_equal(cupy.value_of(array), VARIABLES[name])


def test_a_batch_arrives_though_its_copies_run_late(late: tuple[Gpu, LateCuda]) -> None:
    gpu, cupy = late
    batch = gpu.batch_from_host(BATCH)
    assert (batch.step, batch.epoch, batch.indices is BATCH.indices) == (3, 1, True)
    np.testing.assert_array_equal(cupy.value_of(batch.inputs), BATCH.inputs)
    np.testing.assert_array_equal(cupy.value_of(batch.targets), BATCH.targets)
    assert batch.targets.dtype == np.int64


def test_several_arrays_and_weights_of_a_batch_arrive_too(late: tuple[Gpu, LateCuda]) -> None:
    gpu, cupy = late
    given = {"ids": np.arange(4), "mask": np.ones((4, 2), np.float32)}
    batch = gpu.batch_from_host(Batch(3, 1, np.arange(4), given, (BATCH.targets,), np.arange(4, dtype=np.float32)))
    for name, array in given.items():
        np.testing.assert_array_equal(cupy.value_of(batch.inputs[name]), array)
    np.testing.assert_array_equal(cupy.value_of(batch.targets[0]), BATCH.targets)
    np.testing.assert_array_equal(cupy.value_of(batch.weights), np.arange(4))


def test_gradients_are_read_after_the_kernels_that_write_them(late: tuple[Gpu, LateCuda]) -> None:
    gpu, cupy = late
    loss, host = gpu.to_host(
        cupy.computed(np.array(0.25, np.float32)),
        {
            "float32": cupy.computed(np.full((2, 2), 1.5, np.float32)),
            "float64": cupy.computed(np.full((2, 2), 2.5)),
            "transposed": cupy.computed(np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))),
        },
    )
    assert (type(loss), loss) == (float, 0.25)
    assert host["float32"].tolist() == [[1.5, 1.5], [1.5, 1.5]]
    assert host["float64"].tolist() == [[2.5, 2.5], [2.5, 2.5]]
    assert host["transposed"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert {g.dtype for g in host.values()} == {np.dtype(np.float32)}


def test_the_host_waits_once_in_a_step(late: tuple[Gpu, LateCuda]) -> None:
    gpu, cupy = late
    gpu.batch_from_host(BATCH)
    variables = gpu.variables_from_host(VARIABLES)
    gpu.to_host(cupy.computed(np.array(0.25)), {name: cupy.computed(v.values) for name, v in variables.items()})
    assert gpu._copies.synchronisations + cupy.compute.synchronisations == 1


@pytest.mark.parametrize("loss", [0.5, np.float32(0.5), np.array(0.5), 1])
def test_a_loss_that_is_on_the_host_already_stays_there(late: tuple[Gpu, LateCuda], loss: object) -> None:
    assert late[0].to_host(loss, {}) == (float(loss), {})  # type: ignore[arg-type]


def test_pinned_buffers_are_given_back_once_their_copies_are_done(late: tuple[Gpu, LateCuda]) -> None:
    gpu, cupy = late
    for _ in range(5):
        for array in gpu.variables_from_host(VARIABLES).values():
            cupy.value_of(array)
    assert len(gpu._staged) <= len(VARIABLES) + 1


# --- a real one ---


@pytest.mark.gpu
def test_variables_survive_the_round_trip(xp_gpu: object) -> None:
    gpu = Gpu(0)
    rng = np.random.default_rng(0)
    variables = {f"v{i}": rng.standard_normal((257, 129)).astype(np.float32) for i in range(8)}
    for _ in range(20):  # often enough to reuse pinned memory
        _, host = gpu.to_host(0.0, gpu.variables_from_host(variables))
        for name, values in variables.items():
            np.testing.assert_array_equal(host[name], values)


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
    loss, host = gpu.to_host(on_gpu.sum(), gradients)
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
