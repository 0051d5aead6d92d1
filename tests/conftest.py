"""Fixtures that several folders of tests share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tenacity
import tenacity.nap
from certificates import Certificates


@pytest.fixture(scope="session")
def xp_gpu() -> Any:
    """Return `cupy` where it is installed and sees a device; skip the test, with the reason, where not."""
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"cupy finds no CUDA device: {error}")
    if devices == 0:
        pytest.skip("cupy finds no CUDA device")
    return cupy


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Return what makes certificates, each once a session."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def popen() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return `subprocess.Popen` in text mode, of processes that do not outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(command, text=True, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


class VirtualTime:
    """A clock that moves only when someone sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """Let every retry of this test pause in virtual time."""
    clock = VirtualTime()
    monkeypatch.setattr(tenacity, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    both = SimpleNamespace(monotonic=lambda: clock.now_s, sleep=clock.sleep)
    monkeypatch.setattr("parashard.transports.grpc.time", both)
    monkeypatch.setattr(tenacity.nap, "time", SimpleNamespace(sleep=clock.sleep))
    monkeypatch.setattr(tenacity, "sleep_using_event", lambda event: clock.sleep)
    return clock
