"""What callbacks decide, as the coordinator takes it: stored, once, and safe against its own restart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from parashard.checkpoints.encoding import decode, encode
from parashard.errors import ConfigurationError, NotReady
from parashard_coordinator.core.callback_progress import CallbackOptions
from parashard_coordinator.core.calls import CoreSettings, FollowCall, JobState, LeaseCall
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.evaluations import Evaluations
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.policies import Async, LeasingPolicy, Sync
from parashard_coordinator.core.results import follow
from parashard_coordinator.core.rounds import Rounds
from parashard_coordinator.core.saved import Saved

TOTAL, EPOCH = 12, 4


def core_of(
    policy: LeasingPolicy,
    saved: Saved | None = None,
    *,
    decide: bool = True,
    ahead: int | None = 0,
    judged: Sequence[int] = (),
) -> Core:
    """Return a core without shards, where a worker's report completes a step."""
    options = CoreSettings("run", "digest", TOTAL, 0, 1, steps_per_epoch=EPOCH, target_accuracy=0.9)
    options = options._replace(callbacks=CallbackOptions(followed=True, decide=decide, ahead=ahead))
    job = JobRecord(options, policy, Evaluations(list(judged), policy, TOTAL), None, Rounds())
    if saved is not None:
        job.resume(saved)
    core = Core(job)
    core.register_worker("worker-0", "", "cpu", "", 0.0)
    return core


def lease(core: Core, sequence: int, *completed: int, want: int = 16) -> dict[int, float]:
    """Report steps and return what is granted, with the learning rates."""
    from support.coordinator_cases import done

    worker = core.job.workers.by_name["worker-0"]
    call = LeaseCall("worker-0", worker.incarnation, sequence, completed=done(*completed, incarnations=()), want=want)
    return {grant.step: grant.learning_rate for grant in core.lease(call, float(sequence)).granted}


def test_a_round_after_a_milestone_has_the_rate_that_was_decided_there() -> None:  # P37
    core = core_of(Sync(2))
    assert lease(core, 1) == {}
    follow(core.job, FollowCall(handled=0))
    assert lease(core, 2) == {0: 0.0, 1: 0.0}
    assert lease(core, 3, 0, 1) == {2: 0.0, 3: 0.0}
    assert lease(core, 4, 2, 3) == {}
    assert core.job.why_no_step == "waiting for callbacks"
    reached = follow(core.job, FollowCall(handled=0)).milestone
    assert reached is not None
    assert (reached.after_steps, reached.epoch_losses) == (4, [0.5])
    decisions = core.job.decisions
    follow(core.job, FollowCall(handled=4, learning_rate=0.25, decision=1))
    assert core.job.decisions == decisions + 1  # it is stored before anyone hears of it
    follow(core.job, FollowCall(handled=4, learning_rate=0.25, decision=1))
    assert core.job.decisions == decisions + 1
    assert lease(core, 5) == {4: 0.25, 5: 0.25}


def test_a_successor_goes_on_with_the_rates_and_the_losses() -> None:
    core = core_of(Sync(2))
    follow(core.job, FollowCall(handled=0, learning_rate=0.5, decision=1))
    lease(core, 1)
    lease(core, 2, 0, 1)
    saved = core.job.saved()
    successor = core_of(Sync(2), saved)
    follow(successor.job, FollowCall(handled=0, learning_rate=0.5, decision=1))
    assert successor.job.saved().learning_rates == ((0, 0.5, 0),)
    assert successor.job.saved().epoch_losses == core.job.saved().epoch_losses == {0: (1 << 63, 16)}


def test_a_successor_tells_the_steps_that_callbacks_have_not_heard_of() -> None:
    core = core_of(Sync(2))
    follow(core.job, FollowCall(handled=0, wants_steps=True))
    for sequence, completed in enumerate([(), (0, 1), (2, 3)]):
        lease(core, sequence + 1, *completed)
    first = follow(core.job, FollowCall(handled=0, wants_steps=True))
    assert [end.step for end in first.steps] == [0, 1, 2, 3]
    follow(core.job, FollowCall(handled=0, wants_steps=True, steps_seen=2, coordinator=1))
    saved = decode(Saved, encode(core.job.saved()), "saved")
    assert saved.ends == ((2, 0.5), (3, 0.5))
    answer = follow(core_of(Sync(2), saved).job, FollowCall(handled=0, wants_steps=True))
    assert (answer.steps, answer.steps_seen) == (list(first.steps[2:]), 2)


def test_a_milestone_that_was_told_lies_below_all_that_is_decided_at_it() -> None:  # P12 may lose steps of all
    core = core_of(Sync(2))
    follow(core.job, FollowCall(handled=4, learning_rate=0.25, decision=1))
    assert core.job.callback_progress.rates == [(4, 0.25, 4)]
    follow(core.job, FollowCall(handled=4, stop_reason="enough"))
    assert (core.job.leases.target, core.job.state) == (4, JobState.DRAINING)


def test_a_stop_at_a_milestone_of_rounds_ends_there_and_is_told() -> None:  # P7
    core = core_of(Sync(2))
    follow(core.job, FollowCall(handled=0))
    for sequence, completed in enumerate([(), (0, 1), (2, 3)]):
        lease(core, sequence + 1, *completed)
    answer = follow(core.job, FollowCall(handled=4, stop_reason="enough"))
    assert (answer.stopped_by, answer.steps_total, answer.milestone) == (4, 4, None)
    assert core.job.saved().stopped_by == 4
    assert core.job.early_stop == "enough"


def test_without_rounds_a_stop_finishes_what_is_leased() -> None:
    core = core_of(Async(), ahead=1)
    follow(core.job, FollowCall(handled=0))
    lease(core, 1, want=6)
    lease(core, 2, 0, 1, 2, 3, want=6)
    leased = core.job.leases.leased_so_far()
    assert follow(core.job, FollowCall(handled=4, stop_reason="enough")).steps_total == leased > 4


def test_what_is_decided_after_the_last_step_was_leased_changes_nothing() -> None:
    for policy in (Async(), Sync(2)):
        core = core_of(policy)
        follow(core.job, FollowCall(handled=0))
        core.job.leases.advance_frontier(TOTAL - 1)
        before = core.job.saved()
        answer = follow(core.job, FollowCall(handled=TOTAL, learning_rate=0.5, decision=1, stop_reason="enough"))
        assert (answer.rate, answer.stopped_by, core.job.state) == (None, None, JobState.RUNNING)
        assert core.job.saved() == before


def test_what_cannot_be_decided_is_refused_and_changes_nothing() -> None:
    core = core_of(Async(), decide=False)
    before = core.job.saved()
    for call in (FollowCall(learning_rate=0.5), FollowCall(stop_reason="x"), FollowCall(learning_rate=float("nan"))):
        with pytest.raises(ConfigurationError):
            follow(core.job, call)
    core.job.state = JobState.STARTING
    with pytest.raises(NotReady):
        follow(core.job, FollowCall())
    assert core.job.saved() == before
