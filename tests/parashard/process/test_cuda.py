"""Which GPU a name means to a process, and what is said where there is none."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from parashard.errors import ConfigurationError, Unavailable
from parashard.process import cuda


class Driver:
    """As much of CuPy as counting and opening GPUs takes."""

    def __init__(self, devices: int) -> None:
        self.used: list[int] = []
        runtime = SimpleNamespace(
            getDeviceCount=lambda: devices,
            getDeviceProperties=lambda index: {"name": f"GPU {index}"},
            CUDARuntimeError=OSError,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime, Device=lambda index: SimpleNamespace(use=lambda: self.used.append(index))
        )


@pytest.mark.parametrize(
    ("process", "devices", "index"),
    [
        ("worker-0", 4, 0),
        ("worker-3", 4, 3),
        ("worker-4", 4, 0),
        ("worker-11", 3, 2),
        ("shard-1", 2, 1),
        ("guest-2", 2, 0),
        ("worker-3", 1, 0),
        ("worker-3", 0, 0),
        ("", 4, 0),
        ("rig", 4, 0),
        ("rig7", 4, 0),
        ("worker-3b", 4, 0),
        ("worker-\N{ARABIC-INDIC DIGIT TWO}", 4, 0),
    ],
)
def test_processes_are_spread_by_their_numbers(process: str, devices: int, index: int) -> None:
    assert cuda.spread(process, devices) == index


@pytest.mark.parametrize(("asked", "index"), [("cuda", 1), ("cuda:0", 0), ("cuda:7", 7)])
def test_a_name_means_a_gpu(monkeypatch: pytest.MonkeyPatch, asked: str, index: int) -> None:
    monkeypatch.setitem(sys.modules, "cupy", Driver(2))
    assert cuda.index_of(asked, "worker-3") == index


def test_a_gpu_that_is_at_fault_may_be_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    def uncorrectable() -> None:
        raise OSError("cudaErrorECCUncorrectable")

    driver = Driver(2)
    driver.cuda.Device = lambda index: SimpleNamespace(use=uncorrectable)
    monkeypatch.setitem(sys.modules, "cupy", driver)
    with pytest.raises(Unavailable, match="no CUDA device can be used here: cudaErrorECCUncorrectable"):
        cuda.device(1)


@pytest.mark.parametrize(
    "asked", ["", "cpu", "auto", "cuda:", "cuda:x", "cuda:-1", "cuda:\N{SUPERSCRIPT TWO}", "rocm:0"]
)
def test_other_names_mean_none_and_cupy_is_not_imported(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cuda.index_of(asked, "worker-0") is None


def test_a_gpu_is_opened_for_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(2)
    monkeypatch.setitem(sys.modules, "cupy", driver)
    cuda.device(1)
    assert driver.used == [1]
    assert cuda.device_name(1) == "cuda:1 GPU 1"


def test_a_gpu_that_is_not_there_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", Driver(2))
    with pytest.raises(ConfigurationError, match="cuda:2 is not there: this machine has 2 CUDA devices"):
        cuda.device(2)


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for ask in (cuda.namespace, cuda.device_count, lambda: cuda.device(0), lambda: cuda.index_of("cuda", "worker-0")):
        with pytest.raises(ConfigurationError, match=r"install parashard\[cuda12\]"):
            ask()


@pytest.mark.parametrize(
    ("asked", "devices", "told"),
    [
        ("cuda", 1, ""),
        ("cuda:1", 2, ""),
        ("cuda:2", 2, "device cuda:2 is not there: this machine has 2 CUDA devices"),
        ("cuda", 0, "device cuda is not there: this machine has 0 CUDA devices"),
        ("auto", 0, ""),
        ("cpu", 0, ""),
    ],
)
def test_a_device_is_checked_without_being_opened(
    monkeypatch: pytest.MonkeyPatch, asked: str, devices: int, told: str
) -> None:
    driver = Driver(devices)
    monkeypatch.setitem(sys.modules, "cupy", driver)
    try:
        cuda.check(asked)
        said = ""
    except ConfigurationError as error:
        said = str(error)
    assert (said, driver.used) == (told, [])
