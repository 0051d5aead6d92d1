"""Draining: leasing pauses until all shards have the same steps, once for all requests that arrive meanwhile (P8)."""

from __future__ import annotations

import pytest

from parashard.errors import JobFailed
from parashard_coordinator.core.calls import JobState
from parashard_coordinator.core.draining import ANSWERS_KEPT, TAKING_S_MAX, Answer, Draining
from parashard_coordinator.core.policies import Sync
from support.coordinator_cases import Caller, announce, core_of, done, judged

STORED = Answer(checkpoint="j1", steps=8)


def test_a_request_is_told_what_it_waits_for_and_then_what_became_of_it() -> None:
    draining = Draining()
    assert draining.asked(1, 8) == Answer(steps=8)
    assert draining.asked(1, 12) == Answer(steps=8), "the repeat of a request moves nothing"
    assert draining.target == 8
    draining.ended(STORED)
    assert (draining.target, draining.asked(1, 20)) == (None, STORED)
    assert draining.target is None, "an answered request begins no drain"


def test_requests_that_come_meanwhile_are_served_by_the_same_drain() -> None:
    draining = Draining()
    draining.asked(1, 8)
    assert draining.asked(2, 30) == Answer(steps=8)
    draining.ended(STORED)
    assert [draining.asked(request, 30) for request in (1, 2)] == [STORED, STORED]


def test_a_later_request_drains_anew() -> None:
    draining = Draining()
    draining.asked(1, 8)
    draining.ended(STORED)
    assert (draining.asked(2, 30), draining.target) == (Answer(steps=30), 30)


def test_answers_are_bounded_and_the_oldest_goes() -> None:
    draining = Draining()
    for request in range(ANSWERS_KEPT + 1):
        draining.asked(request, request)
        draining.ended(Answer(checkpoint=f"j{request}"))
    assert not draining.knows(0)
    assert draining.asked(ANSWERS_KEPT, 0).checkpoint == f"j{ANSWERS_KEPT}"


def test_failing_tries_are_bounded_and_the_bound_restarts_with_a_shard_s_next_incarnation() -> None:
    draining = Draining()
    draining.asked(1, 8)
    assert draining.failed("away", view=2, now_s=10.0) is None
    assert draining.failed("away", view=2, now_s=10.0 + TAKING_S_MAX) is None
    assert draining.failed("away", view=3, now_s=20.0 + TAKING_S_MAX) is None, "it came back, and has to be asked"
    given_up = draining.failed("away again", view=3, now_s=21.0 + 2 * TAKING_S_MAX)
    assert given_up == Answer(error=f"not every shard has saved within {TAKING_S_MAX:.0f} s: away again", steps=8)
    draining.ended(given_up)
    draining.asked(2, 9)
    assert draining.failed("away", view=3, now_s=1000.0) is None, "of a later drain nothing has failed yet"


# --- in the core ---


def test_leasing_pauses_at_what_was_leased_and_what_was_leased_is_finished() -> None:
    core = core_of(lease_batch=4)
    first, second = Caller(core), Caller(core)
    assert (first.lease(4), second.lease(2)) == ([0, 1, 2, 3], [4, 5])
    assert core.create_checkpoint(request=7) == Answer(steps=6)
    assert first.complete_all(want=4) == []
    assert first.call(want=4).reason == "leasing pauses for a checkpoint"
    assert not core.job.drained
    core.job.workers.mark_left(second.worker)
    core.job.leases.end(second.name)  # it died: its steps are leased again, drain or not (P8)
    assert [first.lease(1), first.lease(1)] == [[4], [5]]
    first.complete_all()
    assert core.job.drained
    core.checkpoint_ended(Answer(checkpoint="j1", steps=6))
    assert core.create_checkpoint(request=7) == Answer(checkpoint="j1", steps=6)
    assert core.job.events.count("leasing pauses for a drained checkpoint") == 1, "the request is answered already"
    assert first.lease(1) == [6]
    assert "checkpoint j1 is stored: 6 steps on every shard" in core.job.events


def test_a_run_that_is_to_stop_at_the_checkpoint_leases_nothing_after_it() -> None:
    core = core_of(lease_batch=4)
    caller = Caller(core)
    caller.lease(2)
    core.create_checkpoint(request=7, stop=True)
    core.create_checkpoint(request=8)  # somebody else waits for the same
    caller.complete_all()
    core.checkpoint_ended(Answer(checkpoint="j1", steps=2))
    assert (core.job.state, core.job.stopped) == (JobState.FAILED, True)
    assert core.job.reason == "stopped at the drained checkpoint j1: 2 steps on every shard"
    assert core.create_checkpoint(request=7, stop=True) == Answer(checkpoint="j1", steps=2), "the answer is still there"
    with pytest.raises(JobFailed, match="stopped at the drained checkpoint j1"):
        core.create_checkpoint(request=9)


def test_a_run_whose_checkpoint_failed_goes_on_though_it_was_to_stop() -> None:
    core = core_of()
    core.create_checkpoint(request=7, stop=True)
    core.checkpoint_ended(Answer(error="no space left", steps=0))
    assert core.job.state is JobState.RUNNING
    core.create_checkpoint(request=8)
    core.checkpoint_ended(Answer(checkpoint="j1", steps=0))
    assert core.job.state is JobState.RUNNING, "the next one is not to stop it"


def test_in_rounds_the_round_is_finished() -> None:
    core = core_of(Sync(4))
    caller = Caller(core)
    caller.lease(2)
    assert core.create_checkpoint(request=7) == Answer(steps=4)
    assert caller.complete_all(want=4) == [2, 3]
    assert caller.complete_all(want=4) == []
    assert core.job.drained


def test_a_drain_before_the_first_lease_is_drained_at_once() -> None:
    core = core_of()
    assert core.create_checkpoint(request=7) == Answer(steps=0)
    assert core.job.drained


def test_a_shard_that_falls_during_the_drain_has_to_have_its_steps_again() -> None:
    core = core_of()
    caller = Caller(core)
    caller.lease(2)
    core.create_checkpoint(request=7)
    caller.complete_all()
    assert core.job.drained
    announce(core, 1, 2, [(0, 1)])
    assert not core.job.drained
    assert caller.lease(4) == [1]
    caller.call(completed=done(1, incarnations=(1, 2)))
    assert core.job.drained


def test_nothing_is_taken_while_the_shards_return_to_an_earlier_round() -> None:  # P8, P12
    core = core_of(Sync(4))
    core.create_checkpoint(request=7)
    announce(core, 0, 2, [(0, 4)], skipped=[2])
    announce(core, 1, 2, [(0, 4)])
    assert (core.job.drain_target, core.job.leases.lowest_incomplete) == (4, 4), "every step of the drain is in"
    assert core.job.rounds.returning_to == 0, "one has skipped a step that the other has the gradient of"
    assert not core.job.drained
    assert core.job.due_checkpoint() is None


def test_a_step_of_an_earlier_coordinator_s_lease_moves_the_drain_further() -> None:
    core = core_of()
    core.create_checkpoint(request=7)
    core.drain_further(3)
    assert core.job.drain_target == 3
    assert [Caller(core).lease(1) for _ in range(4)] == [[0], [1], [2], []]


def test_nothing_is_taken_of_a_job_that_has_failed() -> None:
    core = core_of()
    core.create_checkpoint(request=7)
    assert core.job.drained
    core.job.fail("the disk is full")
    assert not core.job.drained
    assert core.job.due_checkpoint() is None


def test_a_checkpoint_that_failed_is_reported_and_leasing_goes_on() -> None:
    core = core_of()
    core.create_checkpoint(request=7)
    core.checkpoint_ended(Answer(error="no space left", steps=0))
    assert core.create_checkpoint(request=7).error == "no space left"
    assert "warning: the checkpoint failed: no space left" in core.job.events
    assert Caller(core).lease(1) == [0]


def test_a_job_that_is_over_makes_no_more_checkpoints() -> None:
    core = core_of()
    core.job.fail("interrupted")
    with pytest.raises(JobFailed, match="the job is failed: interrupted"):
        core.create_checkpoint(request=7)


def test_a_drain_that_is_asked_for_before_the_shards_are_back_takes_in_what_they_have() -> None:  # P8
    """A coordinator that was started again knows of no lease yet; it must not drain at step 0."""
    core = core_of(Sync(4), registered=False, incarnation=2)
    core.create_checkpoint(1)
    announce(core, 0, 1, [(0, 4)])
    announce(core, 1, 1, [(0, 7)])
    assert (core.job.drain_target, core.job.drained) == (8, False)


def test_an_early_stop_moves_up_to_what_a_shard_has_applied_already() -> None:  # P7, P8
    core = core_of()
    Caller(core).lease(2)
    core.job.leases.stop_at_frontier()
    decided = core.job.decisions
    core.drain_further(5)
    assert core.job.leases.target == 5
    assert core.job.decisions > decided, "it is stored before it acts"


def test_the_last_evaluation_moves_up_with_an_early_stop() -> None:  # P8: the final weights are judged
    core = core_of(evaluate_after=[40])
    caller = Caller(core)
    caller.lease(2)
    core.job.evaluations.stop_at(core.job.leases.stop_at_frontier())
    core.drain_further(3)
    for shard in range(2):
        announce(core, shard, 2, [(0, 3)])
    due = []
    while evaluations := caller.call(want=1).evaluations:
        due += [evaluation.after_step for evaluation in evaluations]
        caller.call(evaluated=judged(due[-1], incarnations=(2, 2), accuracy=0.5))
    assert due[-1] == 3
    assert core.job.complete
