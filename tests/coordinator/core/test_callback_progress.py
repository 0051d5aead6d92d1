"""Milestones that callbacks are told of, once, and the learning rates that they decide (P37, P38)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.checkpoints.encoding import decode, encode
from parashard.errors import ConfigurationError
from parashard_coordinator.core.callback_progress import (
    ENDS_AT_ONCE,
    ENDS_MAX,
    LEASED_AHEAD,
    MILESTONES_AHEAD,
    NO_CALLBACKS,
    SMALLEST_RATE,
    BatchEnd,
    BatchEnds,
    CallbackOptions,
    CallbackProgress,
    StepResult,
)
from parashard_coordinator.core.calls import CoreSettings, FollowCall
from parashard_coordinator.core.evaluations import Evaluations
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.policies import Async, Auto, LeasingPolicy, Ssp, Sync
from parashard_coordinator.core.results import follow
from parashard_coordinator.core.rounds import Rounds
from parashard_coordinator.core.saved import Saved
from parashard_coordinator.core.training_figures import MetricSums, TrainingFigures

TOTAL, EPOCH = 12, 4
FOLLOWED = CallbackOptions(followed=True)


def progress_of(
    policy: LeasingPolicy, judged: list[int], *, decides: bool = True, ahead: int | None = 0
) -> tuple[CallbackProgress, Evaluations]:
    evaluations = Evaluations(judged, policy, TOTAL)
    callbacks = CallbackOptions(followed=True, decide=decides, ahead=ahead if decides else None)
    return CallbackProgress(TOTAL, EPOCH, TrainingFigures(TOTAL, EPOCH), policy, evaluations, callbacks), evaluations


def long_epoch(total: int = 1 << 20) -> CallbackProgress:
    figures, evaluations = TrainingFigures(total, total), Evaluations([], Async(), total)
    return CallbackProgress(total, total, figures, Async(), evaluations, FOLLOWED)


def milestones(
    progress: CallbackProgress, evaluations: Evaluations, target: int = TOTAL
) -> list[tuple[int, list[int], bool]]:
    """Handle all of them, each as it is reached."""
    found = []
    while (due := progress.next_milestone(target)) is not None:
        assert progress.reached(due.after_steps - 1, target) is None
        evaluations.finish(due.after_steps, {"loss": 1.0})
        reached = progress.reached(due.after_steps, target)
        assert reached is not None
        epochs = range(reached.first_epoch, reached.first_epoch + len(reached.epoch_losses))
        found.append((reached.after_steps, list(epochs), reached.evaluated))
        progress.handle(reached.after_steps)
    return found


def test_an_epoch_and_its_evaluation_are_one_milestone() -> None:
    assert milestones(*progress_of(Async(), [4, 6, 12])) == [
        (4, [0], True),
        (6, [], True),
        (8, [1], False),
        (12, [2], True),
    ]


def test_in_rounds_an_epoch_ends_with_the_round_of_its_last_step_and_several_may_end_at_once() -> None:
    assert milestones(*progress_of(Sync(5), [4, 12])) == [(5, [0], True), (10, [1], False), (12, [2], True)]
    assert milestones(*progress_of(Sync(9), [])) == [(9, [0, 1], False), (12, [2], False)]


def test_an_early_stop_leaves_out_what_lies_beyond_and_judges_where_it_is() -> None:
    progress, evaluations = progress_of(Async(), [4, 8, 12])
    progress.handle(4)
    evaluations.finish(4, {})
    evaluations.stop_at(6)
    assert milestones(progress, evaluations, target=6) == [(6, [], True)]


def test_a_milestone_waits_for_its_evaluation() -> None:
    progress, evaluations = progress_of(Async(), [4])
    assert progress.reached(TOTAL, TOTAL) is None
    evaluations.finish(4, {"loss": 0.5}, "evaluated/4.safetensors", judged_steps=9)
    reached = progress.reached(TOTAL, TOTAL)
    assert reached is not None
    assert (reached.metrics, reached.weights) == ({"loss": 0.5}, "evaluated/4.safetensors")
    assert reached.judged_steps == 9


@pytest.mark.parametrize("policy", [Async(), Ssp(2), Sync(2), Auto(2)])
def test_training_waits_for_callbacks_where_it_is_to_and_else_not(policy: LeasingPolicy) -> None:
    progress, _ = progress_of(policy, [])
    assert progress.lease_limit(TOTAL, 0) == 0
    progress.handle(0)
    assert progress.lease_limit(TOTAL, 0) == 4
    progress.handle(4)
    assert progress.lease_limit(TOTAL, 0) == 8
    assert progress_of(policy, [], decides=False)[0].lease_limit(TOTAL, 0) > TOTAL
    known, _ = progress_of(policy, [], ahead=None)  # a schedule that is known in advance
    assert known.lease_limit(TOTAL, 0) == 0
    known.handle(0)
    assert known.lease_limit(TOTAL, 0) > TOTAL


def test_where_training_goes_on_meanwhile_the_first_step_waits_and_what_is_an_epoch_ahead_of_callbacks() -> None:
    progress, _ = progress_of(Async(), [], ahead=1)
    assert progress.lease_limit(TOTAL, 0) == 0
    progress.handle(0)
    assert progress.lease_limit(TOTAL, 0) == 8
    progress.handle(4)
    assert progress.lease_limit(TOTAL, 0) > TOTAL


@pytest.mark.parametrize("policy", [Async(), Sync(1)])
def test_leasing_waits_for_callbacks_that_are_far_behind_and_nothing_is_forgotten_that_they_have_not_heard(
    policy: LeasingPolicy,
) -> None:
    epochs = 3 * MILESTONES_AHEAD
    evaluations = Evaluations(list(range(1, epochs + 1)), policy, epochs)
    progress = CallbackProgress(epochs, 1, figures := TrainingFigures(epochs, 1), policy, evaluations, FOLLOWED)
    ahead = progress.lease_limit(epochs, 0)
    assert ahead == MILESTONES_AHEAD + 1
    for step in range(ahead):
        figures.count(step, 1, 1.0)
        evaluations.finish(step + 1, {"loss": float(step)})
        evaluations.unreported()
    for handled in range(ahead):
        assert progress.lease_limit(epochs, 0) == min(ahead + handled, progress.lease_limit(epochs, 0))
        reached = progress.reached(ahead, epochs)
        assert reached is not None
        assert (reached.after_steps, reached.epoch_losses, reached.metrics) == (handled + 1, [1.0], {"loss": handled})
        progress.handle(handled + 1)


def test_leasing_waits_for_callbacks_that_have_many_steps_to_hear_of() -> None:
    progress = long_epoch()
    for step in range(ENDS_MAX):
        progress.step_completed(StepResult(step, 0.5))
    assert progress.lease_limit(1 << 20, ENDS_MAX + 3) == ENDS_MAX + 3
    progress.ends.since(1)
    assert progress.lease_limit(1 << 20, ENDS_MAX + 3) > 1 << 20


def test_a_job_is_told_when_callbacks_have_handled_all_milestones_and_steps() -> None:
    progress, _ = progress_of(Async(), [])
    assert not progress.told(TOTAL)
    progress.step_completed(StepResult(0, 0.5))
    progress.handle(TOTAL)
    assert not progress.told(TOTAL)
    progress.ends.since(1)
    assert progress.told(TOTAL)
    of_nobody = CallbackProgress(
        TOTAL, EPOCH, TrainingFigures(TOTAL, EPOCH), Async(), Evaluations([], Async(), TOTAL), NO_CALLBACKS
    )
    assert of_nobody.told(TOTAL)


def test_completed_steps_are_told_from_where_one_asks() -> None:
    progress = long_epoch()
    for step in (2, 0, 2, 1):
        progress.step_completed(StepResult(step, 0.5))
    ends, heard = progress.ends.since(1)
    assert ([end.step for end in ends], heard) == ([0, 1], 3)
    for step in range(3, 3 * ENDS_AT_ONCE):
        progress.step_completed(StepResult(step, None))
    told = 0
    while ends:
        told += len(ends)
        ends, heard = progress.ends.since(heard)
    assert (told, heard) == (3 * ENDS_AT_ONCE - 1, 3 * ENDS_AT_ONCE)
    progress.ends.want(False)
    progress.step_completed(StepResult(1 << 19, 0.5))
    assert progress.ends.since(heard)[0] == []


def test_a_learning_rate_is_a_function_of_the_step() -> None:  # P37
    progress, _ = progress_of(Async(), [])
    assert progress.rate_of(3) == 0.0
    assert progress.decide(0.5, 1, after_steps=4, frontier=6) == [(6, 0.5, 4)]
    assert progress.decide(0.9, 1, after_steps=4, frontier=7) == []  # the same decision, told again
    progress.decide(0.0, 2, after_steps=4, frontier=9)
    rates = [progress.rate_of(step) for step in (0, 5, 6, 8, 9, 11)]
    assert rates == [0.0, 0.0, 0.5, 0.5, SMALLEST_RATE, SMALLEST_RATE]
    assert np.float32(SMALLEST_RATE) == 0.0


def test_a_milestone_tells_which_rate_the_last_step_of_each_epoch_had() -> None:
    progress, _ = progress_of(Sync(9), [])
    progress.decide(0.5, 1, after_steps=0, frontier=4)  # from step 9 on, where a round begins
    reached = progress.next_milestone(TOTAL)
    assert reached is not None
    assert [math.isnan(rate) for rate in reached.learning_rates] == [True, True]
    progress, _ = progress_of(Async(), [])
    progress.decide(0.0, 1, after_steps=0, frontier=3)
    reached = progress.next_milestone(TOTAL)
    assert reached is not None
    assert reached.learning_rates == [0.0]


def test_no_rate_governs_what_an_earlier_coordinator_may_have_leased() -> None:  # P37
    progress, _ = progress_of(Async(), [], ahead=1)
    assert progress.leases(3)
    assert not progress.leases(2 + LEASED_AHEAD)
    assert progress.leases(3 + LEASED_AHEAD)
    assert progress.decide(0.5, 1, after_steps=4, frontier=6) == [(6, 0.5, 4)]
    successor, _ = progress_of(Async(), [], ahead=1)
    successor.resume(Saved(target=TOTAL, **progress.saved()))
    assert successor.decide(0.9, 1, after_steps=4, frontier=9) == []
    assert successor.decide(0.25, 2, after_steps=8, frontier=9) == [(progress.leased_to, 0.25, 8)]


@pytest.mark.parametrize(("policy", "late"), [(Async(), 5), (Ssp(1), 5), (Sync(2), 6), (Auto(2), 6)])
def test_where_training_waits_a_rate_decided_at_a_milestone_holds_from_there_and_one_decided_later_from_then_on(
    policy: LeasingPolicy, late: int
) -> None:
    predecessor, _ = progress_of(Sync(2), [])
    assert predecessor.leases(3)
    for between, first in ((False, 4), (True, 8)):  # nothing past the next milestone was leased by anybody
        progress, _ = progress_of(policy, [])
        progress.resume(Saved(target=TOTAL, leased_to=predecessor.leased_to))
        assert progress.decide(0.5, 1, after_steps=4, frontier=4, between=between) == [(first, 0.5, 4)]
    progress, _ = progress_of(policy, [])
    assert progress.decide(0.5, 1, after_steps=4, frontier=5, between=True) == [(late, 0.5, 4)]


@pytest.mark.parametrize(
    ("policy", "begin"), [(Async(), [0, 4, 8]), (Ssp(2), [0, 4, 8]), (Auto(2), [0, 4, 8]), (Sync(3), [0, 6, 9])]
)
def test_rates_that_are_known_in_advance_hold_from_the_first_step_of_their_epochs(  # P37
    policy: LeasingPolicy, begin: list[int]
) -> None:
    progress, _ = progress_of(policy, [], ahead=None)
    planned = [(1, 0.5), (2, 0.25)]
    new = progress.decide(1.0, 1, after_steps=0, frontier=0, planned=planned)
    assert new == progress.rates == list(zip(begin, [1.0, 0.5, 0.25], [0, 0, 0], strict=True))
    assert [progress.rate_of(step) for step in begin] == [1.0, 0.5, 0.25]
    assert progress.next_milestone(TOTAL).learning_rates == [1.0]  # type: ignore[union-attr]
    assert progress.decide(9.0, 1, after_steps=0, frontier=0, planned=planned) == []


def test_a_plan_is_replaced_from_where_nobody_has_leased_and_what_of_it_comes_too_late_is_left_out() -> None:  # P37
    progress, _ = progress_of(Async(), [], ahead=1)
    progress.decide(1.0, 1, after_steps=0, frontier=0, planned=[(1, 0.5), (2, 0.25)])
    progress.decide(0.1, 2, after_steps=4, frontier=6, planned=[(2, 0.05)])
    assert progress.rates == [(0, 1.0, 0), (4, 0.5, 0), (6, 0.1, 4), (8, 0.05, 4)]
    progress.decide(0.2, 3, after_steps=4, frontier=9, planned=[(2, 0.02)])
    assert [rate for rate in progress.rates if progress.governs(rate)][-2:] == [(8, 0.05, 4), (9, 0.02, 4)]
    progress.decide(0.3, 4, after_steps=8, frontier=9)
    assert [progress.governs(rate) for rate in progress.rates] == [True, True, True, True, False, True]


def test_there_is_a_most_of_decisions() -> None:
    progress, _ = progress_of(Async(), [])
    rates = tuple(progress.decide(0.5, 1, 0, 0)) * 10_000
    progress.resume(Saved(target=TOTAL, learning_rates=rates, rates_decided=1))
    with pytest.raises(ConfigurationError, match="10,000 times"):
        progress.decide(0.5, 2, 8, 9)


def part(step: int, loss: float | None, examples: int, right: float = 0.0) -> StepResult:
    return StepResult(
        step, loss, examples, [MetricSums("accuracy", "mean", [right, float(examples)])] if examples else []
    )


def told(parts: Sequence[StepResult], of_batch: int = 3) -> list[BatchEnd]:
    ends = BatchEnds(of_batch)
    for one in [*parts, *parts]:  # computed again
        ends.step_completed(one)
    return ends.since(0)[0]


BATCH = [part(3, 1.0, 8, 8.0), part(4, 0.5, 4, 1.0), part(5, 0.25, 4, 0.0)]


@given(st.permutations(BATCH))
def test_a_batch_is_told_once_with_the_mean_over_its_examples_in_whatever_order_its_parts_come(
    parts: list[StepResult],
) -> None:
    assert told(parts) == [BatchEnd(3, (8 * 1.0 + 4 * 0.5 + 4 * 0.25) / 16, {"accuracy": 9 / 16})]


def test_a_batch_that_lacks_a_part_is_not_told() -> None:
    assert told(BATCH[:2]) == []


def test_parts_without_examples_and_skipped_ones_do_not_count() -> None:
    short = [part(0, 0.3, 5, 2.0), part(1, 0.0, 0), part(2, 0.0, 0)]
    assert told(short) == [BatchEnd(0, 0.3, {"accuracy": 0.4})]
    skipped = [part(0, 0.3, 4, 2.0), part(1, None, 0), part(2, 0.5, 4, 1.0)]
    assert told(skipped) == [BatchEnd(0, 0.4, {"accuracy": 3 / 8})]
    (nothing,) = told([part(0, None, 0), part(1, None, 0), part(2, 0.0, 0)])
    assert (math.isnan(nothing.loss), nothing.metrics) == (True, {})


def test_a_step_that_is_a_batch_is_told_as_it_is() -> None:
    assert told([part(7, 0.1, 0)], of_batch=1) == [BatchEnd(7, 0.1)]


def record(saved: Saved | None = None) -> JobRecord:
    options = CoreSettings("run", "digest", 12, 0, 1, steps_per_epoch=6)
    job = JobRecord(options, Auto(3), Evaluations([], Auto(3), 12), None, Rounds())
    if saved is not None:
        job.resume(saved)
    return job


def test_a_new_coordinator_tells_a_batch_of_which_the_one_before_knew_a_part() -> None:
    job = record()
    for one in (part(0, 1.0, 4), part(1, 1.0, 4), part(2, 1.0, 4), *BATCH[1:]):
        job.callback_progress.step_completed(one)
    successor = record(decode(Saved, encode(job.saved()), "saved"))
    for one in BATCH:  # two are reported again
        successor.callback_progress.step_completed(one)
    ends = follow(successor, FollowCall(wants_steps=True)).steps
    assert ends == [BatchEnd(0, 1.0, {"accuracy": 0.0}), BatchEnd(3, 0.6875, {"accuracy": 9 / 16})]
    assert job.saved().returned_to(3).parts == ()
