"""Leasing that waits for callbacks at the end of each epoch: exact, and whatever happens meanwhile it goes on (P37)."""

from __future__ import annotations

import pytest

from parashard_coordinator.core.callback_progress import CallbackOptions
from parashard_coordinator.core.calls import FollowAnswer, FollowCall, JobState
from parashard_coordinator.core.core import CALLBACKS_WAIT_SHOWN_S, Core
from parashard_coordinator.core.policies import Async, Auto, LeasingPolicy, Ssp
from parashard_coordinator.core.results import follow
from support.coordinator_cases import Caller, announce_all, core_after, core_of, done, judged

TOTAL, EPOCH = 12, 4
WAITS = CallbackOptions(followed=True, decide=True, ahead=0)
WAITING = {
    "steps_total": TOTAL,
    "steps_per_epoch": EPOCH,
    "callbacks": WAITS,
}
EVALUATED = [4, 8, 12]
POLICIES = pytest.mark.parametrize("policy", [Async(), Ssp(1), Auto(2)])


def waiting(policy: LeasingPolicy, **options: object) -> tuple[Core, Caller]:
    """Return a core whose first epoch is complete, and the worker that evaluates it."""
    core = core_of(policy, EVALUATED, **{**WAITING, **options})
    worker = Caller(core)
    assert worker.lease(16) == []
    follow(core.job, FollowCall(handled=0))
    train(worker, EPOCH)
    assert (worker.held, worker.evaluating) == ([], [EPOCH])
    return core, worker


def train(worker: Caller, steps: int) -> None:
    """Complete all steps up to this many, and have an evaluation granted, if one is due."""
    job = worker.core.job
    while job.leases.lowest_incomplete < steps:
        worker.call(want=1, completed=done(*worker.held, incarnations=job.shards.incarnations()))
    worker.call(want=1)


def judge(worker: Caller, accuracy: float = 0.5, incarnations: tuple[int, int] = (1, 1)) -> None:
    """Report the evaluation that the worker has."""
    steps = worker.core.job.leases.lowest_incomplete
    result = judged(worker.evaluating[0], incarnations, judged_steps=steps, accuracy=accuracy)
    assert worker.lease(16, evaluated=result) == []


def decide(core: Core, handled: int, **decision: object) -> FollowAnswer:
    return follow(core.job, FollowCall(handled=handled, **decision))  # type: ignore[arg-type]


@POLICIES
def test_each_evaluation_judges_its_own_weights_and_a_rate_governs_the_next_epoch_from_its_first_step(
    policy: LeasingPolicy,
) -> None:
    core, worker = waiting(policy)
    seen = []
    for number, steps in enumerate(EVALUATED):
        train(worker, steps)
        judge(worker)
        reached = decide(core, steps - EPOCH).milestone
        assert reached is not None
        seen.append((reached.after_steps, reached.judged_steps))
        decide(core, steps, learning_rate=0.5**number, decision=number + 1)
    assert seen == [(4, 4), (8, 8), (12, 12)]
    assert core.job.callback_progress.rates == [(4, 1.0, 4), (8, 0.5, 8)]  # none after the last step
    assert core.job.complete


@POLICIES
def test_the_worker_is_told_what_it_waits_for(policy: LeasingPolicy) -> None:
    core, worker = waiting(policy)
    other = Caller(core)
    assert other.call(want=1).reason == "waiting for an evaluation and callbacks"
    judge(worker)
    assert other.call(want=1).reason == "waiting for callbacks"


@POLICIES
def test_an_evaluation_whose_worker_dies_is_done_by_another(policy: LeasingPolicy) -> None:
    core, _ = waiting(policy)
    other, later = Caller(core), core.job.options.lease_ttl_s + 1.0
    assert not other.call(want=1, now_s=later).evaluations
    core.tick(later)
    assert [evaluation.after_step for evaluation in other.call(want=1, now_s=later).evaluations] == [EPOCH]
    judge(other)
    decide(core, EPOCH)
    assert other.lease(1) == [EPOCH]


@POLICIES
def test_when_the_last_worker_dies_the_next_one_goes_on(policy: LeasingPolicy) -> None:
    core, _ = waiting(policy)
    core.tick(core.job.options.lease_ttl_s + 1.0)
    assert core.job.workers.live == {}
    other = Caller(core, now_s=99.0)
    other.call(want=1, now_s=99.0)
    judge(other)
    decide(core, EPOCH)
    assert other.lease(1, 99.0) == [EPOCH]


@POLICIES
def test_callbacks_that_stand_still_are_named_and_an_evaluation_that_takes_long_is_not_theirs(
    policy: LeasingPolicy,
) -> None:
    core, worker = waiting(policy)
    for second in range(2):
        core.tick(second * CALLBACKS_WAIT_SHOWN_S / 2)
        worker.call(second * CALLBACKS_WAIT_SHOWN_S / 2)
    judge(worker)
    assert not any("for callbacks" in event for event in core.job.events)
    for second in range(5):
        core.tick(second * CALLBACKS_WAIT_SHOWN_S / 2)
    assert any("training has waited 10 s for callbacks so far" in event for event in core.job.events)
    decide(core, EPOCH)
    assert worker.lease(1) == [EPOCH]


@POLICIES
def test_a_stop_ends_the_job_at_the_epoch_that_decided_it(policy: LeasingPolicy) -> None:
    core, worker = waiting(policy)
    judge(worker)
    decide(core, EPOCH, stop_reason="enough")
    assert (core.job.leases.target, core.job.state, core.job.complete) == (EPOCH, JobState.DRAINING, True)


@POLICIES
def test_a_target_that_is_reached_there_ends_the_job_once_callbacks_have_heard(policy: LeasingPolicy) -> None:
    core, worker = waiting(policy, target_accuracy=0.5)
    judge(worker, accuracy=0.75)
    assert (core.job.leases.target, core.job.complete) == (EPOCH, False)
    assert decide(core, 0).milestone is not None
    decide(core, EPOCH)
    assert core.job.complete


@POLICIES
@pytest.mark.parametrize("is_judged", [False, True])
def test_a_new_coordinator_waits_until_callbacks_say_how_far_they_are(policy: LeasingPolicy, is_judged: bool) -> None:
    core, worker = waiting(policy)
    if is_judged:
        judge(worker)
    successor = core_after(core, policy, evaluate_after=EVALUATED, **WAITING)
    announce_all(successor, [(0, EPOCH)], [(0, EPOCH)])
    worker.join(successor, worker.name)
    assert worker.lease(16) == []
    assert (decide(successor, 0).milestone is not None) == is_judged
    if not is_judged:
        judge(worker)
    assert worker.lease(16) == []
    decide(successor, EPOCH, learning_rate=0.5, decision=1)
    assert [(grant.step, grant.learning_rate) for grant in worker.call(want=1).granted] == [(EPOCH, 0.5)]


@POLICIES
def test_steps_that_a_shard_loses_meanwhile_are_computed_and_judged_again(policy: LeasingPolicy) -> None:
    core, worker = waiting(policy)
    judge(worker)
    announce_all(core, [(0, EPOCH)], [(0, 2)], incarnation=2)
    assert decide(core, 0).milestone is None
    train(worker, EPOCH)
    judge(worker, incarnations=(2, 2))
    assert decide(core, 0).milestone is not None
    decide(core, EPOCH)
    assert worker.lease(1) == [EPOCH]


@POLICIES
def test_a_checkpoint_can_be_taken_meanwhile(policy: LeasingPolicy) -> None:
    core, worker = waiting(policy)
    core.create_checkpoint(1)
    assert core.job.drained
    judge(worker)
    decide(core, EPOCH)
    assert worker.lease(1) == []


@POLICIES
def test_a_schedule_that_is_known_in_advance_waits_for_nothing(policy: LeasingPolicy) -> None:
    core = core_of(policy, EVALUATED, **{**WAITING, "callbacks": CallbackOptions(followed=True, decide=True)})
    worker = Caller(core)
    decide(core, 0, learning_rate=1.0, decision=1, planned=[(1, 0.5), (2, 0.25)])
    granted = {}
    while not core.job.leases.finished:
        answer = worker.call(want=1, completed=done(*worker.held), steps_only=True)
        granted |= {grant.step: grant.learning_rate for grant in answer.granted}
    assert [granted[step] for step in range(TOTAL)] == [1.0] * 4 + [0.5] * 4 + [0.25] * 4
    planned = "the learning rate is 1.0000 from step 0 on, 0.5000 from step 4 on, 0.2500 from step 8 on"
    assert any(event.endswith(f"{planned}: callbacks decided it after step 0") for event in core.job.events)
