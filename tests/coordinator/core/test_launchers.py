"""The local launcher keeps the cluster whole, and knows when that is hopeless."""

from __future__ import annotations

import pytest

from parashard.process.backoff import BACKOFF_MAX_S
from parashard.process.shell import ExitCode
from parashard_coordinator.core.launchers import (
    CONFIGURATION,
    Exit,
    ExternalLauncher,
    Launcher,
    LocalLauncher,
    Orders,
    ProcessName,
    Restarts,
)


def shard(index: int) -> ProcessName:
    return ProcessName("shard", index)


def worker(index: int) -> ProcessName:
    return ProcessName("worker", index)


def local(shards: int = 2, budget: int = 2) -> LocalLauncher:
    return LocalLauncher(shards, Restarts(1.0, budget))


def test_everything_is_started_at_first() -> None:
    assert local().orders([], 2, 0.0) == Orders((shard(0), shard(1), worker(0), worker(1)))


def test_what_runs_is_left_alone() -> None:
    assert local().orders([shard(0), worker(1), shard(1), worker(0)], 2, 0.0) == Orders()


def test_a_worker_that_ended_twice_is_started_again_after_its_pause() -> None:
    launcher = local()
    assert launcher.exited(Exit(worker(1), -9, "killed by signal 9"), 5.0, was_up=True) is None
    assert launcher.orders([shard(0), shard(1), worker(0)], 2, 5.0) == Orders((worker(1),)), "at once"
    assert launcher.exited(Exit(worker(1), -9, "killed by signal 9"), 10.0, was_up=True) is None
    assert launcher.orders([shard(0), shard(1), worker(0)], 2, 10.9) == Orders()
    assert launcher.orders([shard(0), shard(1), worker(0)], 2, 11.0) == Orders((worker(1),))


def test_a_process_whose_disk_has_no_room_does_not_use_up_the_budget() -> None:  # P21: the job waits for its disk
    launcher = local(budget=2)
    for turn in range(10):
        now_s = turn * 60.0
        no_room = Exit(shard(0), ExitCode.IO_ERROR, "claims cannot be written: no space left on device", turn)
        assert launcher.exited(no_room, now_s, was_up=False) is None
        assert launcher.orders([shard(1)], 0, now_s + BACKOFF_MAX_S - 0.1) == Orders()
        assert launcher.orders([shard(1)], 0, now_s + BACKOFF_MAX_S) == Orders((shard(0),))


def test_scaling_down_stops_the_highest() -> None:
    running = [shard(0), shard(1), *map(worker, range(12))]
    assert local().orders(running, 9, 0.0) == Orders((), (worker(11), worker(10), worker(9)))
    assert local().orders(running, 0, 0.0).stop[0] == worker(11)


def test_a_shard_that_ended_twice_is_started_again_after_its_pause() -> None:
    launcher, rest = local(), [shard(0), worker(0), worker(1)]
    assert launcher.exited(Exit(shard(1), -9, "killed by signal 9"), 5.0, was_up=True) is None
    assert launcher.orders(rest, 2, 5.0) == Orders((shard(1),)), "at once"
    assert launcher.exited(Exit(shard(1), -9, "killed by signal 9"), 10.0, was_up=True) is None
    assert launcher.orders(rest, 2, 10.9) == Orders()
    assert launcher.orders(rest, 2, 11.0) == Orders((shard(1),))


@pytest.mark.parametrize("process", [shard(1), worker(0)], ids=str)
def test_a_wrong_configuration_ends_the_job(process: ProcessName) -> None:
    assert CONFIGURATION == ExitCode.CONFIGURATION
    told = local().exited(Exit(process, 2, "there is no GPU"), 0.0, was_up=False)
    assert told == f"{process} ended: there is no GPU"


@pytest.mark.parametrize("process", [shard(1), worker(0)], ids=str)
def test_what_was_up_is_tried_again_now_and_then_whatever_keeps_it_from_coming_back(process: ProcessName) -> None:
    launcher, ended = local(budget=2), Exit(process, 2, "cert.pem expired")
    rest = [other for other in (shard(0), shard(1), worker(0)) if other != process]
    for now_s in (0.0, 100.0, 200.0):
        assert launcher.exited(ended, now_s, was_up=True) is None
        assert launcher.orders(rest, 1, now_s + BACKOFF_MAX_S - 0.1) == Orders(), "however soon others complete a step"
        assert launcher.orders(rest, 1, now_s + BACKOFF_MAX_S) == Orders((process,))
        launcher.step_completed()


def test_the_job_fails_when_there_is_no_progress_without_the_worker() -> None:
    launcher, ended = local(budget=2), Exit(worker(0), 2, "cert.pem expired")
    told = [launcher.exited(ended, now_s, was_up=True) for now_s in (0.0, 5.0, 10.0)]
    assert told[:2] == [None, None]
    assert told[2] is not None
    assert "the last time: cert.pem expired" in told[2]


@pytest.mark.parametrize("process", [shard(1), worker(0)], ids=str)
def test_the_job_ends_when_a_process_s_budget_is_spent(process: ProcessName) -> None:
    launcher = local(budget=2)
    ended = Exit(process, 1, "broken")
    assert [launcher.exited(ended, 0.0, was_up=True) for _ in range(2)] == [None, None]
    assert launcher.exited(ended, 0.0, was_up=True) == (
        f"{process} ended too often without a step completed in between, the last time: broken"
    )


def test_a_completed_step_restores_the_budget() -> None:
    launcher = local(budget=1)
    ended = Exit(worker(0), -9, "killed by signal 9")
    for _ in range(5):
        assert launcher.exited(ended, 0.0, was_up=True) is None
        launcher.step_completed()


def test_the_external_launcher_does_nothing() -> None:
    launcher: Launcher = ExternalLauncher()
    launcher.step_completed()
    assert launcher.exited(Exit(shard(0), 1, "broken"), 0.0, was_up=True) is None
    assert launcher.orders([], 5, 0.0) == Orders()


@pytest.mark.parametrize(("process", "name"), [(shard(3), "shard-3"), (worker(0), "worker-0")])
def test_names(process: ProcessName, name: str) -> None:
    assert str(process) == name
