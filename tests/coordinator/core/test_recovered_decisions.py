"""What a coordinator decided and counted stays so in those that are started after it; results of lost weights go."""

from __future__ import annotations

import math

import pytest

from parashard.checkpoints.encoding import encode
from parashard.errors import WrongRun
from parashard_coordinator.core.calls import JobState
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.evaluations import RESULTS_KEPT
from parashard_coordinator.core.policies import Async, LeasingPolicy, Sync
from parashard_coordinator.core.saved import Saved
from support.coordinator_cases import Caller, announce, announce_all, core_after, core_of, done, judged

# --- what was decided and counted ---


def test_what_was_counted_goes_on() -> None:
    earlier = core_of(Sync(4), skip_bad_steps=True)
    earlier.job.supervision.worker_restarts, earlier.job.shard_restarts = 3, 2
    earlier.job.rounds.rollbacks, earlier.job.leases.speculative_leases = 5, 4
    earlier.scale(7)
    core = core_after(earlier, Sync(4))
    assert (core.job.supervision.worker_restarts, core.job.shard_restarts) == (3, 2)
    assert core.job.leases.speculative_leases == 4
    assert (core.job.rounds.rollbacks, core.job.workers_wanted, core.job.scale_requests) == (5, 7, 1)
    assert core_after(core, Sync(4)).job.saved() == earlier.job.saved(), "however often"


def test_the_end_waits_for_reports_of_a_worker_that_the_record_does_not_know() -> None:
    """It joined after the record was stored, which is stored with decisions and every two seconds."""
    earlier = core_of()
    Caller(earlier, "worker-0")
    core = core_after(earlier)
    announce_all(core, [(0, 40)], [(0, 40)])
    Caller(core, "worker-0").call()
    assert not core.job.complete
    Caller(core, "worker-1").call(completed=done(*range(40)))
    assert core.job.complete
    assert core.job.figures.missing(0, 40) == 0


def test_a_scaling_is_stored_before_it_acts_and_a_run_started_anew_has_the_user_s_number() -> None:  # P7
    earlier = core_of()
    before = earlier.job.decisions
    earlier.scale(earlier.job.options.workers)
    assert earlier.job.decisions == before + 1
    core = core_after(earlier)
    assert core.job.scale_requests == 1, "the Job may have another number than the manifests"
    core.scale(7)
    core.job.reset_for_resume()
    assert (core.job.workers_wanted, core.job.scale_requests) == (core.job.options.workers, 0)


def test_a_resume_is_no_restart_of_the_coordinator() -> None:
    first = core_of()
    resumed = core_after(first)
    resumed.job.reset_for_resume()
    restarted = core_after(resumed)
    resumed_again = core_after(restarted)
    resumed_again.job.reset_for_resume()
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
    assert list(saved.evaluations) == [steps - RESULTS_KEPT + n for n in range(RESULTS_KEPT)]
    assert saved.evaluated == ((0, steps - RESULTS_KEPT),)
    core = core_after(earlier, **every)
    announce_all(core, [(0, steps)], [(0, steps)])
    assert [e.after_step for e in Caller(core).call(want=1).evaluations] == [steps]
    assert core.job.saved().evaluated == saved.evaluated


def test_results_beyond_a_drained_checkpoint_are_given_up_kept_or_not() -> None:  # P8
    saved = Saved(target=40, evaluated=((0, 11), (21, 31)), evaluations={15: {}, 35: {}})
    assert saved.returned_to(24).evaluated == ((0, 11), (21, 25))
    assert saved.returned_to(20).evaluated == ((0, 11),)
    assert saved.returned_to(20).evaluations == {15: {}}


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
    core.job.mark_done()
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
    for core in (known, unknown):
        Caller(core, "worker-0").call()
        core.tick(0.0)
        core.tick(core.job.options.lease_ttl_s + 1.0)  # no report is awaited any more
    assert (known.job.complete, unknown.job.complete) == (True, False)
    assert unknown.job.evaluations.results().keys() == {20}, "what was judged on the way is history"
