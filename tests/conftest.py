"""What all tests share: the two tiers, and fixtures of several folders.

`make test` leaves out what is marked `full` and draws the examples of Hypothesis' profile `quick`; `make test-all` runs
everything, with the profile `full`. `make test-ci` runs most of what is marked. Of the tests that need frameworks,
`make test-frameworks` leaves out what is marked, and `make test-frameworks-all` runs everything.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tenacity
import tenacity.nap
from hypothesis import settings

from parashard.client import fan_out
from parashard.protocol import coordinator_client
from support import tiers
from support.certificates import Certificates
from support.compiled_cupy import CompiledCupy
from support.script_run import ScriptRun
from support.store_fakes import MemoryStore

BUCKET = "checkpoints"

settings.load_profile(tiers.QUICK)  # --hypothesis-profile chooses another


def pytest_sessionstart() -> None:
    """Have this process's files reach no disk: only a power cut would tell, and each call is still made."""
    os.fsync = os.fstat  # type: ignore[assignment]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's job in the background has it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Look for garbage neither while tests are collected nor, later, in what there is then: it stays.

    And seldom in what tests make: that takes a fifteenth of their time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file in one process, for what its tests share; refuse a test that is left out without a reason."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        for mark in item.iter_markers("full"):
            if len(mark.args) != 1 or mark.kwargs:
                raise pytest.UsageError(f"{item.nodeid}: `full` takes one argument, why `make test` can do without it")


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
def compiled_cupy(tmp_path_factory: pytest.TempPathFactory) -> CompiledCupy:
    """Return what compiles the sources of CUDA kernels for this CPU."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    return CompiledCupy(compiler, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(
    params=[pytest.param("compiled_cupy", id="cpu"), pytest.param("xp_gpu", id="gpu", marks=pytest.mark.gpu)]
)
def cupy_somewhere(request: pytest.FixtureRequest) -> Any:
    """Return what has CuPy's names and runs kernels: their sources compiled for this CPU, and a GPU."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Return what makes certificates, each once a session."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def store() -> MemoryStore:
    """Return an empty store in memory, which fails as a test asks it to; tests of other stores have their own."""
    return MemoryStore()


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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ScriptRun]]:
    """Return a function that runs the text of a script, with words for its command line, in the test's folder.

    What it starts ends with the test. A file whose tests run one script has a fixture of the same name over it.
    """
    runs: list[ScriptRun] = []

    def begin(text: str, *words: str) -> ScriptRun:
        runs.append(ScriptRun(tmp_path, text, *words))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Serve S3, with an empty bucket, on a free port of this host until the tests end."""
    pytest.importorskip("obstore", reason="NO TEST OF S3: obstore is not installed (pip install '.[s3]')")
    server_module = pytest.importorskip("moto.server", reason="NO TEST OF S3: moto is not installed (the dev extra)")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        direct.open(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=10).close()
        yield endpoint
    finally:
        server.stop()


@pytest.fixture
def s3_url(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty folder on the server, and let every S3 client of this test find the server."""
    settings = {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "unused",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "NO_PROXY": "127.0.0.1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.parent.name}-{tmp_path.name}"


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
    monkeypatch.setattr(tenacity.nap, "time", SimpleNamespace(sleep=clock.sleep))
    monkeypatch.setattr(tenacity, "sleep_using_event", lambda event: clock.sleep)
    for module in (fan_out, coordinator_client):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock
