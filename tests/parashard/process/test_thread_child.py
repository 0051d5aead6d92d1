"""A child that is a thread: how it ends, and what it is when it does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parashard.launch.local_cluster import MODULES, LocalCluster
from parashard.process.shell import ExitCode, Stop
from parashard.process.threads import ThreadChild, Work
from support.waiting import DEADLINE_S, eventually


@pytest.fixture
def returned() -> Iterator[threading.Event]:
    """Return what a model waits for; it is set after the test."""
    event = threading.Event()
    yield event
    event.set()


def cluster_of(folder: Path, work: Work) -> tuple[LocalCluster, list[str]]:
    told: list[str] = []
    cluster = LocalCluster(folder)
    cluster.start_thread = lambda name, words: ThreadChild(name, work)
    cluster.tell = told.append
    return cluster, told


def until_stopped(stop: Stop, on_hung: Callable[[str], None]) -> tuple[int, str]:
    assert stop.wait(DEADLINE_S)
    return 0, ""


def test_only_workers_are_threads_and_what_one_returns_is_why_it_ended(tmp_path: Path) -> None:
    cluster, _ = cluster_of(tmp_path, lambda stop, on_hung: (ExitCode.CONFIGURATION, "no such rate"))
    cluster.start("worker-0", MODULES["worker"], [])
    cluster.start("shard-0", "json.tool", ["--help"])
    (ended,) = eventually(cluster.reap, "it has ended")[:1]
    assert (ended.name, ended.exit_code, ended.reason) == ("worker-0", 2, "no such rate (exit code 2)")
    assert cluster.log_path("shard-0").exists()
    assert not cluster.log_path("worker-0").exists()
    cluster.end(grace_s=0.0)


def test_one_that_is_asked_to_ends(tmp_path: Path) -> None:
    cluster, told = cluster_of(tmp_path, until_stopped)
    cluster.start("worker-0", MODULES["worker"], [])
    cluster.start("worker-1", MODULES["worker"], [])
    assert cluster.pid("worker-0") != cluster.pid("worker-1")
    cluster.ask_to_end("worker-0")
    assert [ended.reason for ended in eventually(cluster.reap, "it has ended")] == ["exit code 0"]
    cluster.end(DEADLINE_S)
    assert (cluster.running, told) == ([], [])


def test_one_that_hangs_counts_as_ended_and_is_told_of(tmp_path: Path, returned: threading.Event) -> None:
    stops: list[Stop] = []

    def hang(stop: Stop, on_hung: Callable[[str], None]) -> tuple[int, str]:
        stops.append(stop)
        on_hung("step 3 has taken over 300 s")
        returned.wait(DEADLINE_S)
        return 0, ""

    cluster, told = cluster_of(tmp_path, hang)
    cluster.start("worker-0", MODULES["worker"], [])
    (ended,) = eventually(cluster.reap, "it is given up")
    assert (ended.exit_code, ended.reason) == (ExitCode.RETRY, "step 3 has taken over 300 s (exit code 75)")
    assert stops[0].asked
    assert told == ["warning: worker-0 is given up, and its thread ends when its model returns"]
    cluster.end(grace_s=0.0)


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_one_that_does_not_stop_is_given_up(tmp_path: Path, returned: threading.Event, how: str) -> None:
    def busy(stop: Stop, on_hung: Callable[[str], None]) -> tuple[int, str]:
        returned.wait(DEADLINE_S)
        return 0, ""

    cluster, told = cluster_of(tmp_path, busy)
    cluster.start("worker-0", MODULES["worker"], [])
    if how == "killed":
        cluster.kill("worker-0")
        assert [ended.reason for ended in cluster.reap()] == ["killed by SIGKILL"]
    cluster.end(grace_s=0.0)
    assert cluster.running == []
    assert told == ["warning: worker-0 is given up, and its thread ends when its model returns"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_that_dies_has_failed(tmp_path: Path) -> None:
    def die(stop: Stop, on_hung: Callable[[str], None]) -> tuple[int, str]:
        raise RuntimeError

    cluster, _ = cluster_of(tmp_path, die)
    cluster.start("worker-0", MODULES["worker"], [])
    assert [ended.reason for ended in eventually(cluster.reap, "it has died")] == ["its thread has died (exit code 1)"]
    cluster.end(grace_s=0.0)
