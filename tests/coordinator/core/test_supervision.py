"""Processes of the local cluster: an exit counts once, and a process that is silent for too long is killed."""

from __future__ import annotations

from typing import Any

from parashard_coordinator.core.core import Core
from parashard_coordinator.core.launchers import Exit, LocalLauncher, ProcessName, Restarts
from support.coordinator_cases import Caller, announce, core_of

SHARD_0, SHARD_1, WORKER_0 = ProcessName("shard", 0), ProcessName("shard", 1), ProcessName("worker", 0)


def local_core(**options: Any) -> Core:
    return core_of(launcher=LocalLauncher(2, Restarts(1.0, 9)), silence_s=30.0, **options)


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
    core = core_of(launcher=LocalLauncher(2, Restarts(1.0, 9)), silence_s=3.0, lease_ttl_s=10.0, registered=False)
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
