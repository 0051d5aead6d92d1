"""Processes of the local cluster: what is started, stopped and killed; an exit counts once, and pauses grow."""

from __future__ import annotations

from typing import Any

import pytest

from parashard.process.backoff import BACKOFF_MAX_S
from parashard.process.shell import ExitCode
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.supervision import (
    CONFIGURATION,
    Exit,
    LocalLauncher,
    Orders,
    ProcessName,
    Supervision,
)
from support.coordinator_cases import Caller, announce, core_of

SHARD_0, SHARD_1, WORKER_0 = ProcessName("shard", 0), ProcessName("shard", 1), ProcessName("worker", 0)


def local_core(**options: Any) -> Core:
    return core_of(launcher=LocalLauncher(2, 1.0, 9), silence_s=30.0, **options)


def ticking(core: Core, until_s: float, since_s: float = 0.0) -> None:
    """Let time pass."""
    core.tick(since_s)
    core.tick(until_s)


def test_an_exit_that_is_reported_again_counts_once() -> None:
    core = local_core()
    Caller(core, "worker-0")
    exits = [Exit(WORKER_0, -9, "killed by SIGKILL", 4)]
    core.supervise(exits, [], 0.0)
    core.supervise(exits, [], 0.5)
    assert (core.job.supervision.worker_exits, core.job.supervision.worker_restarts) == (1, 1)
    core.supervise([*exits, Exit(WORKER_0, -9, "killed by SIGKILL", 5)], [], 1.0)
    assert core.job.supervision.worker_exits == 2


def test_a_process_that_gave_signs_of_life_and_then_none_is_killed() -> None:
    core = local_core()
    Caller(core, "worker-0", now_s=1.0)
    announce(core, 1, now_s=5.0)
    ticking(core, 31.0)
    assert core.supervise([], [SHARD_1, WORKER_0], 31.0).kill == ()
    assert core.supervise([], [SHARD_1, WORKER_0], 31.1).kill == (WORKER_0,)
    assert core.supervise([], [SHARD_1], 31.2).kill == (), "it is gone"
    ticking(core, 35.1, 31.2)
    assert core.supervise([], [SHARD_1], 35.1).kill == (SHARD_1,)
    assert "shard-1 is silent for 30 s: it is killed" in core.job.events


def test_one_that_it_had_started_and_that_has_not_spoken_yet_is_starting_but_not_for_ever() -> None:  # P22
    core = local_core(registered=False)
    assert {SHARD_1, WORKER_0} <= set(core.supervise([], [], 0.0).start)
    ticking(core, 599.0)
    assert core.supervise([], [SHARD_1, WORKER_0], 599.0).kill == ()
    ticking(core, 600.1, 599.0)
    assert core.supervise([], [SHARD_1, WORKER_0], 600.1).kill == (SHARD_1, WORKER_0), "it hangs"
    assert "shard-1 is silent for 600 s: it is killed" in core.job.events


def test_one_that_an_earlier_coordinator_started_is_silent_since_the_start_of_this_one() -> None:  # P22
    core = local_core(registered=False, incarnation=2)
    announce(core, 0, now_s=100.0)
    ticking(core, 130.0, 100.0)
    announce(core, 0, now_s=130.0)
    assert core.supervise([], [SHARD_0, SHARD_1, WORKER_0], 130.0).kill == ()
    orders = core.supervise([], [SHARD_0, SHARD_1, WORKER_0], 130.1)
    assert orders.kill == (SHARD_1, WORKER_0), "they hang since before it started"
    core.supervise([], [SHARD_0], 130.2)
    announce(core, 0, now_s=160.3)
    assert core.supervise([], [SHARD_0, SHARD_1, WORKER_0], 160.3).kill == (), "started again, by this one"


def test_a_worker_that_only_renews_its_leases_is_not_silent() -> None:  # P5: it calls no oftener than they need
    core = core_of(launcher=LocalLauncher(2, 1.0, 9), silence_s=3.0, lease_ttl_s=10.0, registered=False)
    caller = Caller(core, "worker-0", now_s=0.0)
    ticking(core, 4.0)
    assert core.supervise([], [SHARD_0, WORKER_0], 4.0).kill == (SHARD_0,)
    caller.call(4.0)
    ticking(core, 14.0, 4.0)
    assert core.supervise([], [WORKER_0], 14.0).kill == ()
    ticking(core, 14.2, 14.0)
    assert core.supervise([], [WORKER_0], 14.2).kill == (WORKER_0,)
    assert "worker-0 is silent for 10 s: it is killed" in core.job.events


def test_an_earlier_incarnation_s_signs_are_not_a_later_one_s() -> None:
    core = local_core()
    Caller(core, "worker-0", now_s=0.0)
    core.supervise([Exit(WORKER_0, -9, "killed by SIGKILL", 1)], [SHARD_1], 10.0)
    orders = core.supervise([], [SHARD_1], 20.0)
    assert WORKER_0 in orders.start
    ticking(core, 60.0, 20.0)
    announce(core, 1, now_s=60.0)
    assert core.supervise([], [SHARD_1, WORKER_0], 60.0).kill == (), "its imports may take long"
    Caller(core, "worker-0", now_s=61.0)
    ticking(core, 92.0, 60.0)
    announce(core, 1, now_s=92.0)
    assert core.supervise([], [SHARD_1, WORKER_0], 92.0).kill == (WORKER_0,)


def test_a_shard_is_not_live_from_its_end_until_it_registers_again() -> None:
    core = local_core()
    assert core.job.shards_live == 2
    core.supervise([Exit(SHARD_1, -9, "killed by SIGKILL", 1)], [], 1.0)
    assert (core.job.shards_live, core.job.shard_live(1)) == (1, False)
    announce(core, 1, incarnation=2, now_s=2.0)
    assert core.job.shards_live == 2


def test_an_old_end_that_is_told_late_is_forgotten_when_the_shard_answers() -> None:
    core = local_core()
    core.supervise([Exit(SHARD_1, -9, "killed by SIGKILL", 1)], [], 1.0)
    core.shard_answered(1)
    assert core.job.shards_live == 2


def pause_s(launcher: LocalLauncher, index: int = 0, now_s: float = 100.0) -> float:
    """Return for how long after an exit now the worker may not start, to a hundredth of a second."""
    launcher.exited(killed(index), now_s, was_up=True)
    return next(i / 100 for i in range(1000) if worker(index) in launcher.orders([], 2, now_s + i / 100).start)


def killed(index: int = 0) -> Exit:
    return Exit(worker(index), -9, "killed by SIGKILL")


def test_the_pause_doubles_up_to_a_bound() -> None:
    launcher = LocalLauncher(0, 0.5, 1000)
    assert [pause_s(launcher) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, 4.0]
    for _ in range(200):
        launcher.exited(killed(), 0.0, was_up=True)
    assert pause_s(launcher) == BACKOFF_MAX_S


def test_each_worker_has_a_pause_of_its_own() -> None:
    launcher = LocalLauncher(0, 0.5, 10)
    launcher.exited(killed(), 100.0, was_up=True)
    launcher.exited(killed(), 100.0, was_up=True)
    assert pause_s(launcher, 1) == 0.0


def test_a_completed_step_resets_the_pause() -> None:
    launcher = LocalLauncher(0, 0.5, 10)
    for _ in range(4):
        launcher.exited(killed(), 0.0, was_up=True)
    launcher.step_completed()
    assert pause_s(launcher) == 0.0


@pytest.mark.parametrize("budget", [0, 3])
def test_the_budget_is_exits_in_a_row(budget: int) -> None:
    launcher = LocalLauncher(0, 0.5, budget)
    for _ in range(3):
        fatal = [launcher.exited(killed(), 0.0, was_up=True) is not None for _ in range(budget + 1)]
        assert fatal == [False] * budget + [True]
        launcher.step_completed()


def shard(index: int) -> ProcessName:
    return ProcessName("shard", index)


def worker(index: int) -> ProcessName:
    return ProcessName("worker", index)


def local(shards: int = 2, budget: int = 2) -> LocalLauncher:
    return LocalLauncher(shards, 1.0, budget)


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


def test_a_worker_that_waits_in_vain_for_shards_does_not_use_up_the_budget_until_they_are_up() -> None:
    core = core_of(launcher=LocalLauncher(2, 1.0, 2), silence_s=30.0, registered=False)
    number = iter(range(1, 100))

    def in_vain(process: ProcessName) -> None:
        number_ = next(number)
        exits = [Exit(process, ExitCode.RETRY, "waiting for shard 0, 1 to register", number_)]
        core.supervise(exits, [], number_ * 60.0)

    for _ in range(10):
        in_vain(WORKER_0)
    assert core.job.state_name == "starting", "an autoscaler has not brought the shards' nodes yet"
    for shard_index in (0, 1):
        announce(core, shard_index)
    for _ in range(3):
        in_vain(WORKER_0)
    assert core.job.state_name == "failed", "it cannot reach shards that are there"


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


def test_without_a_launcher_nothing_is_started() -> None:
    external = Supervision(None, silence_s=30.0, lease_ttl_s=10.0, start_s=600.0)
    external.step_completed()
    assert external.ended(Exit(shard(0), 1, "broken"), 5, 0.0, was_up=True) is None
    assert external.orders([], 5, 0.0, lambda process: None, 0.0) == Orders()


@pytest.mark.parametrize(("process", "name"), [(shard(3), "shard-3"), (worker(0), "worker-0")])
def test_names(process: ProcessName, name: str) -> None:
    assert str(process) == name
