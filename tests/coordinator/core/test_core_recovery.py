"""Shards that come back; a coordinator that was started again, and learns from shards, workers and what was saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from parashard.checkpoints.encoding import decode, encode
from parashard.errors import Superseded, Unacquainted, WrongRun
from parashard_coordinator.core.calls import JobState
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.evaluations import RESULTS_KEPT
from parashard_coordinator.core.policies import Async, LeasingPolicy, Sync
from parashard_coordinator.core.saved import Saved
from support.coordinator_cases import Caller, announce, core_of, done, judged


def core_after(earlier: Core, policy: LeasingPolicy | None = None, **options: Any) -> Core:
    """Return the next coordinator's core: with the saved state, before its first call."""
    saved = decode(Saved, encode(earlier.job.saved()), "saved")
    core = core_of(policy, registered=False, incarnation=earlier.job.options.incarnation + 1, **options)
    core.job.resume(saved)
    return core


def announce_all(core: Core, *applied: Sequence[tuple[int, int]], incarnation: int = 1) -> None:
    for shard, steps in enumerate(applied):
        announce(core, shard, incarnation, steps)


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
    core.job.started_anew()
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
    with pytest.raises(Unacquainted):
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


# --- what was decided and counted ---


def test_what_was_counted_goes_on() -> None:
    earlier = core_of(Sync(4), skip_bad_steps=True)
    earlier.job.supervision.worker_restarts, earlier.job.shard_restarts = 3, 2
    earlier.job.rounds.rollbacks = 5
    earlier.scale(7)
    core = core_after(earlier, Sync(4))
    assert (core.job.supervision.worker_restarts, core.job.shard_restarts) == (3, 2)
    assert (core.job.rounds.rollbacks, core.job.workers_wanted, core.job.scale_requests) == (5, 7, 1)
    assert core_after(core, Sync(4)).job.saved() == earlier.job.saved(), "however often"


def test_a_scaling_is_stored_before_it_acts_and_a_run_started_anew_has_the_user_s_number() -> None:  # P7
    earlier = core_of()
    before = earlier.job.decisions
    earlier.scale(earlier.job.options.workers)
    assert earlier.job.decisions == before + 1
    core = core_after(earlier)
    assert core.job.scale_requests == 1, "the Job may have another number than the manifests"
    core.scale(7)
    core.job.started_anew()
    assert (core.job.workers_wanted, core.job.scale_requests) == (core.job.options.workers, 0)


def test_a_resume_is_no_restart_of_the_coordinator() -> None:
    first = core_of()
    resumed = core_after(first)
    resumed.job.started_anew()
    restarted = core_after(resumed)
    resumed_again = core_after(restarted)
    resumed_again.job.started_anew()
    restarts = [core.job.coordinator_restarts for core in (first, resumed, restarted, resumed_again)]
    assert restarts == [0, 0, 1, 1]


def test_the_first_worker_s_arithmetic_binds_over_coordinators() -> None:  # P13
    earlier = core_of(Sync(4), same_arithmetic=True)
    before = earlier.job.decisions
    Caller(earlier, "worker-0")
    assert earlier.job.decisions == before + 1, "stored before it acts (P7)"
    core = core_after(earlier, Sync(4), same_arithmetic=True)
    with pytest.raises(WrongRun, match="arm is not arithmetic"):
        core.register_worker("worker-0", "arm", "cpu", "host:9", 0.0, 7)
    Caller(core, "worker-0")


def tell(core: Core, after_step: int, **metrics: float) -> None:
    Caller(core, "worker-0").call(evaluated=judged(after_step, **metrics))


def test_results_are_not_judged_anew_not_even_those_that_are_no_numbers() -> None:  # P7
    earlier = core_of(evaluate_after=[10, 20, 40])
    tell(earlier, 10, loss=0.5)
    before = earlier.job.decisions
    tell(earlier, 20, loss=math.nan, accuracy=math.inf)
    assert earlier.job.decisions == before + 1, "stored before it acts (P7)"
    core = core_after(earlier, evaluate_after=[10, 20, 40])
    announce_all(core, [(0, 40)], [(0, 40)])
    assert core.job.evaluations.latest is not None
    assert core.job.evaluations.latest.metrics is not None
    assert math.isnan(core.job.evaluations.latest.metrics["loss"])
    assert [e.after_step for e in Caller(core).call(want=1).evaluations] == [40]


def test_the_record_does_not_grow_with_the_results_and_none_is_judged_anew() -> None:  # P7
    steps = 3 * RESULTS_KEPT
    every = {"evaluate_after": list(range(1, steps + 1)), "steps_total": steps}
    earlier = core_of(**every)
    for after_step in range(1, steps):
        tell(earlier, after_step, loss=0.5)
    saved = earlier.job.saved()
    assert list(saved.evaluations) == [str(steps - RESULTS_KEPT + n) for n in range(RESULTS_KEPT)]
    assert saved.evaluated == ((0, steps - RESULTS_KEPT),)
    core = core_after(earlier, **every)
    announce_all(core, [(0, steps)], [(0, steps)])
    assert [e.after_step for e in Caller(core).call(want=1).evaluations] == [steps]
    assert core.job.saved().evaluated == saved.evaluated


def test_results_beyond_a_drained_checkpoint_are_given_up_kept_or_not() -> None:  # P8
    saved = Saved(target=40, evaluated=((0, 11), (21, 31)), evaluations={"15": {}, "35": {}})
    assert saved.returned_to(24).evaluated == ((0, 11), (21, 25))
    assert saved.returned_to(20).evaluated == ((0, 11),)
    assert saved.returned_to(20).evaluations == {"15": {}}


def test_a_record_in_which_every_result_has_its_metrics_is_as_earlier_versions_wrote_it() -> None:
    assert b"evaluated" not in encode(Saved(target=40))
    assert Saved(target=40).resumes == 0


def stopped_early(policy: LeasingPolicy) -> Core:
    core = core_of(policy, evaluate_after=[4, 40], target_accuracy=0.9)
    caller = Caller(core, "worker-0")
    while core.job.leases.lowest_incomplete < 4:
        caller.lease(1)
        caller.complete_all()
    before = core.job.decisions
    tell(core, 4, accuracy=0.95)
    assert (core.job.state, core.job.decisions) == (JobState.DRAINING, before + 2)
    return core


@pytest.mark.parametrize("policy", [Async(), Sync(4)], ids=["async", "sync:4"])
def test_an_early_stop_stays_decided(policy: LeasingPolicy) -> None:  # P7
    earlier = stopped_early(policy)
    core = core_after(earlier, policy, evaluate_after=[4, 40], target_accuracy=0.9)
    assert core.job.leases.target == earlier.job.leases.target == 4
    announce_all(core, [(0, 4)], [(0, 3)])
    assert (core.job.state, core.job.reason) == (JobState.DRAINING, "held-out accuracy 0.9500 reached the target 0.9")
    caller = Caller(core, "worker-0")
    if core.job.rounds.returning_to is None:
        assert caller.lease(4) == [3]
        caller.complete_all()
        [again] = caller.call(want=1).evaluations  # of weights that are there: those judged before were lost
        caller.call(evaluated=judged(again.after_step, again.incarnations, accuracy=0.5))
        assert (core.job.complete, caller.lease(4)) == (True, [])
    core.job.done()
    assert core.job.reason == core.job.early_stop


def test_steps_given_up_stay_given_up() -> None:  # P6
    earlier = core_of(max_attempts=1, skip_bad_steps=True)
    caller = Caller(earlier)
    assert caller.lease(1) == [0]
    before = earlier.job.decisions
    caller.call(failed=[(0, "NaN")])
    assert earlier.job.decisions == before + 1, "stored before it acts (P7)"
    core = core_after(earlier)
    announce_all(core, [], [])
    grants = Caller(core).call(want=1).granted
    assert [(grant.step, grant.skip) for grant in grants] == [(0, True)]
    assert core.job.saved().skips == (0,)


def test_a_step_given_up_that_every_shard_has_is_not_leased_again() -> None:
    core = core_of(registered=False)
    core.job.resume(Saved(target=40, skips=(1,), workers_wanted=2))
    announce_all(core, [(0, 2)], [(0, 2)])
    assert Caller(core).lease(1) == [2]


def test_an_evaluation_whose_round_has_passed_is_given_up_and_reported() -> (
    None
):  # P7, P11: its result was never stored
    core = core_of(Sync(4), evaluate_after=[4, 40], registered=False)
    announce_all(core, [(0, 8)], [(0, 8)])
    assert "warning: the evaluation after step 4 was missed: its weights are gone" in core.job.events
    assert Caller(core).lease(1) == [8]


def test_no_evaluation_is_given_up_before_every_shard_has_reported_its_round() -> None:  # P12
    core = core_of(Sync(4), evaluate_after=[4, 40], registered=False)
    announce(core, 0, 1, [(0, 8)], returnable=[1])
    announce(core, 1, 1, [(0, 4)], returnable=[1])
    assert core.job.rounds.returning_to == 1
    announce(core, 0, 2, [(0, 4)], returnable=[1], process=1)
    assert core.job.rounds.returning_to is None
    assert [e.after_step for e in Caller(core).call(want=1).evaluations] == [4]
    assert not [event for event in core.job.events if "was missed" in event]


# --- evaluations of weights that are gone ---


def at_its_evaluation(core: Core, steps: int) -> Caller:
    """Return a worker that completed so many steps, after which an evaluation is due, and is at it."""
    caller = Caller(core, "worker-0")
    while core.job.leases.lowest_incomplete < steps:
        caller.lease(1)
        caller.complete_all()
    assert caller.lease(1) == []
    assert caller.evaluating == [steps]
    return caller


def test_a_result_of_weights_that_are_gone_neither_stops_the_job_nor_is_reported() -> None:  # P25
    core = core_of(evaluate_after=[4, 40], target_accuracy=0.9)
    caller = at_its_evaluation(core, 4)
    announce(core, 0, 2, [(0, 1)])
    caller.call(evaluated=judged(4, accuracy=0.95))
    assert (core.job.state, core.job.early_stop, core.job.evaluations.results()) == (JobState.RUNNING, "", {})
    assert (
        core.job.events[-1] == "a result of the evaluation after step 4 is void: a shard has another incarnation by now"
    )


def test_many_evaluations_that_are_done_again_are_one_event() -> None:  # events are bounded: each would push one out
    core = core_of(evaluate_after=list(range(1, 41)))
    caller = Caller(core, "worker-0")
    for step in range(20):
        caller.lease(1)
        caller.complete_all()
        caller.call(want=1)
        caller.call(evaluated=judged(step + 1, loss=0.5))
    assert len(core.job.evaluations.results()) == 20
    announce(core, 0, 2, [(0, 5)])
    again = [event for event in core.job.events if "done again" in event]
    assert again == ["15 evaluations, after steps 6 to 20, are done again: their weights were lost"]


def test_a_late_result_is_void_where_the_steps_have_come_again_too() -> None:  # P25
    core = core_of(evaluate_after=[4, 40], target_accuracy=0.9)
    late = at_its_evaluation(core, 4)
    announce(core, 0, 2, [(0, 1)])
    late.lease(3)
    for step in (1, 2, 3):
        core.job.leases.acknowledge("worker-0", step, [0, 1], 0.0)
    late.call(evaluated=judged(4, (1, 1), accuracy=0.95))
    assert core.job.evaluations.results() == {}
    [again] = late.call(want=1).evaluations
    assert (again.after_step, again.incarnations) == (4, (2, 1))
    late.call(evaluated=judged(4, (2, 1), accuracy=0.5))
    assert core.job.evaluations.results() == {4: {"accuracy": 0.5}}


def test_the_metrics_reported_at_the_end_are_those_of_the_final_weights() -> None:  # P25
    core = core_of(evaluate_after=[40])
    caller = at_its_evaluation(core, 40)
    announce(core, 0, 2, [(0, 39)])
    caller.call(evaluated=judged(40, accuracy=0.95))
    caller.lease(1, completed=done(39, incarnations=(2, 1)))
    assert (core.job.leases.finished, core.job.complete) == (True, False)
    caller.evaluating = []
    assert [e.incarnations for e in caller.call(want=1).evaluations] == [(2, 1)]
    caller.call(evaluated=judged(40, (2, 1), accuracy=0.5))
    assert core.job.complete
    assert core.job.evaluations.results() == {40: {"accuracy": 0.5}}


def test_a_result_that_reaches_the_next_coordinator_is_of_the_incarnations_that_it_names() -> None:  # P25
    late = at_its_evaluation(core_of(evaluate_after=[4, 40], target_accuracy=0.9), 4)
    core = core_after(late.core, evaluate_after=[4, 40], target_accuracy=0.9)
    announce(core, 0, 2, [(0, 1)])
    announce(core, 1, 1, [(0, 4)])
    late.join(core, "worker-0")
    late.call(evaluated=judged(4, accuracy=0.95))
    assert (core.job.evaluations.results(), core.job.early_stop) == ({}, "")


def test_that_a_result_is_void_is_stored_before_it_acts() -> None:  # P7, P25: or a successor would take it over
    core = core_of(evaluate_after=[4, 40])
    caller = at_its_evaluation(core, 4)
    caller.call(evaluated=judged(4, accuracy=0.5))
    before = core.job.decisions
    announce(core, 0, 2, [(0, 1)])
    assert (core.job.decisions, core.job.saved().evaluations) == (before + 1, {})


def test_the_final_weights_are_judged_again_where_a_shard_has_an_incarnation_that_the_record_does_not_know() -> (
    None
):  # P25
    """The record may be from before a shard's return, where the store failed then (P21)."""
    earlier = core_of(evaluate_after=[20, 40])
    for after_step in (20, 40):
        tell(earlier, after_step, accuracy=0.5)
    known, unknown = (core_after(earlier, evaluate_after=[20, 40]) for _ in range(2))
    announce_all(known, [(0, 40)], [(0, 40)])
    announce(unknown, 0, 2, [(0, 40)])
    announce(unknown, 1, 1, [(0, 40)])
    assert (known.job.complete, unknown.job.complete) == (True, False)
    assert unknown.job.evaluations.results().keys() == {20}, "what was judged on the way is history"
