"""Real clusters whose processes end with the test, even when the test dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.cluster_run import ClusterRun
from support.command_run import ROOT
from support.sshd import Sshd, sshd_on_path

TIMEOUT_S = 900


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., ClusterRun]]:
    """Return a function that starts `parashard run` with arguments; its processes end with the test.

    `run_dir` is the directory of an earlier run that is to go on.
    """
    runs: list[ClusterRun] = []

    def start(*arguments: str, cwd: Path = ROOT, run_dir: Path | None = None) -> ClusterRun:
        runs.append(ClusterRun(run_dir or tmp_path / f"run-{len(runs)}", list(arguments), cwd))
        return runs[-1]

    yield start
    for run in runs:
        run.clean_up()


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    """Return a server to which `ssh` leads; afterwards nothing is left behind it."""
    (tmp_path / "sshd").mkdir()
    with sshd_on_path(tmp_path / "sshd", monkeypatch) as server:
        yield server


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run this folder's clusters one at a time, and only those marked `smoke` in `make test`.

    A wait that fails says more than pytest's timeout.
    """
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("clusters"))
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            starts = {"start_run", "start"} & set(getattr(item, "fixturenames", ()))
            if starts and item.get_closest_marker("smoke") is None:
                item.add_marker(pytest.mark.full("a real cluster beyond those that are marked smoke"))
