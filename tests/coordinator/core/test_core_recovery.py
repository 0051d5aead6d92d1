"""Shards that come back; a coordinator that was started again, and learns from shards and workers."""

from __future__ import annotations

import pytest

from parashard.errors import Superseded, UnknownWorker, WrongRun
from parashard_coordinator.core.calls import JobState
from parashard_coordinator.core.policies import Sync
from support.coordinator_cases import Caller, announce, announce_all, core_after, core_of, done


def test_a_worker_that_a_new_coordinator_may_not_be_the_first_to_know_joins_it() -> None:
    first, second = core_of(), core_after(core_of())
    for core in (first, second):
        Caller(core)
    assert (first.job.events[-1], second.job.events[-1]) == ("guest-0 started (cpu)", "guest-0 joined (cpu)")


# --- shards ---


def test_what_is_complete_is_what_every_shard_has() -> None:  # P5
    core = core_after(core_of())
    announce(core, 0, 3, [(0, 5), (7, 8)])
    assert core.job.state is JobState.STARTING
    assert Caller(core).call(want=4).granted == [], "nothing is leased before every shard has spoken (P3)"
    announce(core, 1, 1, [(0, 3), (4, 9)])
    assert (core.job.state, core.job.leases.lowest_incomplete) == (JobState.RUNNING, 3)
    assert list(core.job.leases.complete.intervals()) == [(0, 3), (4, 5), (7, 8)]
    caller = Caller(core)
    assert [caller.lease(1) for _ in range(4)] == [[3], [5], [6], [8]]


def test_what_shards_applied_without_a_coordinator_counts() -> None:
    core = core_after(core_of())
    announce_all(core, [(0, 40)], [(0, 40)])
    assert core.job.complete
    assert core.job.shard_restarts == 0, "they were not started again: the coordinator was"


def test_a_shard_that_died_just_before_the_coordinator_counts_as_started_again() -> None:
    core = core_after(core_after(core_of()))  # whose first successor died before any shard spoke to it
    announce(core, 0, 2)
    announce(core, 0, 2)
    announce(core, 1, 1)
    assert core.job.shard_restarts == 1
    assert core_after(core).job.shard_restarts == 1


def test_a_run_that_was_started_again_as_a_whole_had_no_restarts() -> None:
    core = core_after(core_of())
    core.job.reset_for_resume()
    announce_all(core, [(0, 4)], [(0, 4)], incarnation=2)
    assert core.job.shard_restarts == 0
    assert [event.partition(" (")[0] for event in core.job.events][:2] == ["shard-0 started", "shard-1 started"]


def test_a_shard_is_reported_with_the_state_of_its_process() -> None:
    core = core_after(core_of())
    announce(core, 0, 1, process=1)
    announce(core, 0, 2, process=2)
    announce(core, 0, 3, process=2)  # it was told to return to a round, and has another incarnation
    told = [event.partition(" (")[0] for event in core.job.events if event.startswith("shard-0")]
    assert told == ["shard-0 reconnected", "shard-0 restarted", "shard-0 reconnected"]


def test_incarnations_of_another_placement_are_other_shards() -> None:
    core = core_after(core_of(), shards=3)
    announce_all(core, [], [], [], incarnation=2)
    assert core.job.shard_restarts == 0


def test_a_shard_that_the_plan_does_not_have_is_refused() -> None:
    with pytest.raises(WrongRun, match=r"shards 0\.\.1, found shard 2"):
        announce(core_of(), 2)


def test_its_views_are_greater_than_those_of_its_predecessor() -> None:  # P3
    earlier = core_of()
    for incarnation in range(2, 50):
        announce(earlier, 1, incarnation)
    core = core_after(earlier)
    assert core.job.shards.view > earlier.job.shards.view


def test_what_a_shard_comes_back_without_is_due_again() -> None:  # P5
    core = core_of()
    core.job.leases.acknowledge("worker-0", 0, [0, 1], 0.0)
    announce(core, 1, 2, [(0, 1)])
    assert core.job.leases.lowest_incomplete == 1
    announce(core, 1, 3)
    assert (core.job.leases.lowest_incomplete, core.job.rounds.returning_to) == (0, None)
    assert Caller(core).lease(1) == [0]
    assert core.job.shard_restarts == 2


def test_in_rounds_a_shard_that_comes_back_without_applied_steps_takes_all_back() -> None:  # P12
    core = core_of(Sync(2))
    caller = Caller(core)
    caller.lease(2)
    caller.complete_all()
    announce(core, 0, 1, [(0, 2)])
    assert core.job.rounds.returning_to is None, "shard 1 has acknowledged the round, though it has not said so itself"
    announce(core, 1, 2)
    assert (core.job.rounds.returning_to, core.job.rounds.out_of_round()) == (0, [(0, 0)])
    answer = caller.call(want=1)
    assert (answer.granted, answer.reason) == ([], "the shards return to round 0")
    announce(core, 0, 2, process=1)
    assert core.job.rounds.returning_to is None
    assert caller.lease(2) == [0, 1]
    assert (core.job.rounds.rollbacks, core.job.state) == (1, JobState.RUNNING)
    assert core.job.shard_restarts == 1, "shard 1; shard 0 was told to return"


def test_a_return_that_an_earlier_coordinator_began_is_no_restart() -> None:  # P12
    core = core_after(core_of(Sync(2)), Sync(2))
    announce(core, 0, 2, process=1)  # was told to return, and the coordinator died before it heard of that
    announce(core, 1, 4, process=4)  # died, and came back
    assert core.job.shard_restarts == 1
    announce(core, 1, 6, process=4)  # has returned since, twice
    assert core.job.shard_restarts == 1
    announce(core, 1, 7, process=7)
    assert core.job.shard_restarts == 2


def test_a_shard_that_dies_while_it_returns_is_started_again() -> None:
    core = core_of(Sync(2))
    announce(core, 0, 1, [(0, 2)])
    announce(core, 1, 2, process=2)
    assert core.job.rounds.returning_to == 0
    announce(core, 0, 3, process=3)
    assert (core.job.rounds.returning_to, core.job.shard_restarts) == (None, 2)


def test_in_rounds_losing_steps_that_no_shard_has_applied_needs_no_rollback() -> None:  # P5, P10
    core = core_of(Sync(2))
    announce(core, 0, 2, held=[(0, 2)])
    announce(core, 1, 2)
    assert core.job.rounds.returning_to is None
    assert Caller(core).lease(2) == [0, 1], "the steps that shard 1 lacks"


# --- workers ---


def test_a_worker_that_it_does_not_know_joins_again_and_keeps_what_it_holds() -> None:  # P5
    earlier = core_of()
    caller = Caller(earlier, "worker-0", token=7)
    assert [caller.lease(1), caller.lease(1)] == [[0], [1]]
    core = core_after(earlier)
    announce_all(core, [], [])
    caller.core = core
    with pytest.raises(UnknownWorker):
        caller.call(want=1)
    before = caller.worker.incarnation
    caller.join(core, "worker-0")
    assert caller.worker.incarnation > before, "incarnations rise over coordinators (P3)"
    assert caller.lease(1, completed=done(0)) == [2], "steps 0 and 1 are its own"
    assert core.job.leases.held_by("worker-0") == {1, 2}
    assert core.job.leases.lowest_incomplete == 1
    assert Caller(core).lease(1) == [3]


def test_a_live_lease_is_taken_over_before_its_step_is_leased_to_another() -> None:  # P5
    core = core_after(core_of())
    announce_all(core, [], [])
    survivor, newcomer = Caller(core, "worker-0", token=7), Caller(core, "worker-1", token=8)
    survivor.held = [0, 1]
    survivor.call()
    assert newcomer.lease(1) == [2]


def test_who_comes_too_late_computes_a_step_twice_and_it_counts_once() -> None:  # P1, P5
    core = core_after(core_of())
    announce_all(core, [], [])
    newcomer, survivor = Caller(core, "worker-1"), Caller(core, "worker-0")
    assert newcomer.lease(1) == [0]
    survivor.held = [0]
    survivor.call()
    assert core.job.leases.held_by("worker-0") == core.job.leases.held_by("worker-1") == {0}
    survivor.complete_all()
    assert newcomer.call(completed=done(0)).revoked == []
    assert (core.job.progress.steps, core.job.leases.leased) == (1, 0)


def test_the_same_process_keeps_its_incarnation_however_often_it_joins() -> None:  # P3: its answer was lost
    core = core_of()
    first = Caller(core, "worker-0", token=7)
    assert first.lease(1) == [0]
    events = list(core.job.events)
    again = core.register_worker("worker-0", "arithmetic", "cpu", "host:9", 0.0, 7)
    assert again is first.worker
    assert core.job.leases.held_by("worker-0") == {0}
    assert (list(core.job.events), core.job.supervision.worker_restarts) == (events, 0)


def test_a_guest_keeps_its_incarnation_too() -> None:  # it has no name to join under before it is answered
    core = core_of()
    guest = Caller(core, token=7)
    guest.lease(1)
    assert core.register_worker("", "arithmetic", "cpu", "host:9", 0.0, 7) is guest.worker
    assert core.job.leases.held_by("guest-0") == {0}
    assert sum("guest-0 started" in event for event in core.job.events) == 1


def test_guests_that_join_again_do_not_take_each_other_s_name() -> None:
    earlier = core_of()
    guests = [Caller(earlier, token=token) for token in (7, 8)]
    core = core_after(earlier)
    announce_all(core, [], [])
    newcomer = Caller(core, token=9)  # came first, and is guest-0 now
    for guest in guests:
        guest.join(core, guest.name)
    assert [newcomer.name, *(guest.name for guest in guests)] == ["guest-0", "guest-1", "guest-2"]
    newcomer.call()


def test_a_zombie_that_joins_a_new_coordinator_before_its_successor_is_fenced_by_it() -> None:  # P3
    core = core_after(core_of())
    announce_all(core, [], [])
    zombie = Caller(core, "worker-0", token=7)
    zombie.lease(1)
    successor = Caller(core, "worker-0", token=8)
    with pytest.raises(Superseded, match="must stop"):
        zombie.call()
    assert successor.lease(1) == [0]
