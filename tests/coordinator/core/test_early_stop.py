"""Evaluations in a job: leased like steps, they may end it early, and then it drains (P7, P8)."""

from __future__ import annotations

import math

import pytest

from parashard.process.shell import ExitCode
from parashard_coordinator.core.calls import FailureKind, JobState
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.evaluations import ATTEMPTS_MAX
from parashard_coordinator.core.policies import Sync
from support.coordinator_cases import Caller, core_of, done, judged


def at_its_evaluation(core: Core) -> Caller:
    """Return a worker that completed steps 0..3, after which the first evaluation is due, and holds it."""
    caller = Caller(core)
    while core.job.leases.lowest_incomplete < 4:
        caller.lease(1)
        caller.call(completed=done(*caller.held))
    assert caller.lease(1) == []
    assert caller.evaluating == [4]
    return caller


def test_a_result_is_reported_and_training_goes_on() -> None:
    core = core_of(evaluate_after=[4, 40])
    caller = at_its_evaluation(core)
    assert caller.lease(1, evaluated=judged(4, accuracy=0.5, loss=1.25)) == [4]
    assert core.job.events[-1] == "step 4: held-out accuracy 0.5000, loss 1.2500"
    assert core.job.state is JobState.RUNNING


def test_a_result_says_how_many_steps_were_in_the_weights_that_were_judged() -> None:
    core = core_of(evaluate_after=[4, 40])
    judge, other = at_its_evaluation(core), Caller(core)
    for _ in range(3):  # which the judge, still compiling, does not wait for
        other.lease(1)
        other.call(completed=done(*other.held))
    judge.call(evaluated=judged(4, judged_steps=7, loss=0.5))
    assert core.job.events[-1] == "step 4: held-out loss 0.5000, of the weights after 7 steps"
    later = core_of(evaluate_after=[4, 40])
    later.job.resume(core.job.saved())
    assert later.job.evaluations.judged_steps() == {4: 7}, "a later coordinator knows it"
    assert core.job.saved().returned_to(3).judged_steps == {}


def test_in_rounds_the_judged_weights_are_those_that_were_due() -> None:
    core = core_of(Sync(2), evaluate_after=[2, 40])
    caller = Caller(core)
    for _ in range(2):
        caller.lease(1)
        caller.call(completed=done(*caller.held))
    caller.lease(1)
    caller.call(evaluated=judged(2, judged_steps=1, loss=0.5))
    assert core.job.events[-1] == "step 2: held-out loss 0.5000"
    assert core.job.evaluations.judged_steps() == {}


def test_the_metrics_of_a_regression_are_named_in_words() -> None:
    core = core_of(evaluate_after=[4, 40])
    at_its_evaluation(core).call(evaluated=judged(4, loss=0.25, mean_squared_error=2.5e9, mean_absolute_error=41000.0))
    told = "held-out loss 0.2500, mean absolute error 41,000.0, mean squared error 2.5e+09"
    assert core.job.events[-1] == f"step 4: {told}"


def test_a_target_of_a_metric_that_there_is_not_is_reported_once() -> None:
    core = core_of(evaluate_after=[4, 6, 40], target_mean_squared_error=1.0)
    judge = at_its_evaluation(core)
    judge.call(evaluated=judged(4, loss=0.5))
    told = (
        "warning: evaluation.target_mean_squared_error cannot be reached: the model's evaluations have no "
        "mean_squared_error; their metrics: loss"
    )
    assert core.job.events[-1] == told
    while core.job.leases.lowest_incomplete < 6:
        judge.lease(1)
        judge.call(completed=done(*judge.held))
    judge.lease(1)
    judge.call(evaluated=judged(judge.evaluating[0], loss=0.4))
    assert list(core.job.events).count(told) == 1


def test_every_start_tells_what_the_data_are_and_what_may_be_overlooked() -> None:
    core = core_of()
    core.job.report_data("8 training rows", [f"column {i}" for i in range(10)])
    assert list(core.job.events)[-10:] == [
        "data: 8 training rows",
        *(f"warning: column {i}" for i in range(8)),
        "warning: 2 more columns like these",
    ]


def test_results_are_reported_in_order_of_steps() -> None:
    core = core_of(evaluate_after=[2, 4, 40], steps_total=40)
    first, second = Caller(core), Caller(core)
    while core.job.leases.lowest_incomplete < 4:
        first.lease(4)
        first.call(completed=done(*first.held))
    first.call(want=1)
    second.call(want=1)
    assert (first.evaluating, second.evaluating) == ([2], [4])
    second.call(evaluated=judged(4, accuracy=0.5))
    assert not [event for event in core.job.events if "held-out" in event], "the earlier one is not in"
    first.call(evaluated=judged(2, accuracy=0.25))
    told = ["step 2: held-out accuracy 0.2500", "step 4: held-out accuracy 0.5000"]
    assert [event for event in core.job.events if "held-out" in event] == told
    assert core.job.evaluations.unreported() == [], "once"


def test_metrics_may_be_none_at_all() -> None:
    core = core_of(evaluate_after=[4, 40])
    at_its_evaluation(core).call(evaluated=judged(4))
    assert core.job.events[-1] == "step 4: no metrics"


@pytest.mark.parametrize(
    ("options", "metrics", "reached"),
    [
        ({"target_accuracy": 0.9}, {"accuracy": 0.9}, "held-out accuracy 0.9000 reached the target 0.9"),
        ({"target_accuracy": 0.9}, {"accuracy": 0.89}, ""),
        ({"target_accuracy": 0.9}, {"loss": 0.0}, ""),
        ({"target_accuracy": 0.9}, {"accuracy": math.nan}, ""),
        ({"target_loss": 0.1}, {"loss": 0.1}, "held-out loss 0.1000 reached the target 0.1"),
        ({"target_loss": 0.1}, {"loss": 0.11}, ""),
        ({"target_loss": 0.1}, {"loss": math.nan}, ""),
        (
            {"target_mean_squared_error": 25},
            {"mean_squared_error": 9.5},
            "held-out mean squared error 9.5000 reached the target 25",
        ),
        ({"target_mean_squared_error": 25}, {"mean_squared_error": 25.5, "loss": 0.1}, ""),
        ({}, {"loss": 0.0, "accuracy": 1.0}, ""),
    ],
)
def test_a_target_is_reached_or_not(options: dict[str, float], metrics: dict[str, float], reached: str) -> None:
    core = core_of(evaluate_after=[4, 40], **options)
    at_its_evaluation(core).call(evaluated=judged(4, **metrics))
    assert core.job.early_stop == reached
    assert (core.job.state is JobState.DRAINING) == bool(reached)


def test_an_early_stop_drains_and_judges_the_final_weights() -> None:  # P8
    core = core_of(evaluate_after=[4, 20, 40], target_accuracy=0.9)
    judge, other = at_its_evaluation(core), Caller(core)
    assert [other.lease(1) for _ in range(2)] == [[4], [5]]
    assert judge.lease(1, evaluated=judged(4, accuracy=0.95)) == []
    assert (core.job.state, core.job.leases.target) == (JobState.DRAINING, 6)
    assert core.job.reason == "held-out accuracy 0.9500 reached the target 0.9; finishing 6 of 40 steps"
    core.job.leases.end(other.name)
    assert judge.lease(4) == [4], "what was leased is leased again"
    judge.lease(1)
    assert judge.held == [4, 5]
    judge.call(completed=done(4, 5))
    assert core.job.leases.finished
    assert not core.job.complete, "its final weights are not judged yet"
    assert [e.after_step for e in judge.call(want=1).evaluations] == [6]
    judge.call(evaluated=judged(judge.evaluating[0], accuracy=0.5))
    assert core.job.complete
    core.job.mark_done()
    assert core.job.reason == "held-out accuracy 0.9500 reached the target 0.9"


def test_a_target_is_reached_once() -> None:
    core = core_of(evaluate_after=[4, 6, 40], target_accuracy=0.9)
    judge, other = at_its_evaluation(core), Caller(core)
    for _ in range(3):
        other.lease(1)
    judge.call(evaluated=judged(4, accuracy=0.95))
    other.complete_all()
    assert judge.lease(1) == []
    judge.call(evaluated=judged(6, accuracy=0.99))
    assert core.job.early_stop.startswith("held-out accuracy 0.9500")
    assert core.job.leases.target == 7


def test_a_target_reached_at_the_end_is_no_early_stop() -> None:
    core = core_of(evaluate_after=[4], target_accuracy=0.9, steps_total=4)
    at_its_evaluation(core).call(evaluated=judged(4, accuracy=0.95))
    assert (core.job.early_stop, core.job.complete) == ("", True)


def test_in_rounds_no_step_is_leased_before_the_result_is_in() -> None:  # P7
    core = core_of(Sync(4), evaluate_after=[4, 40], target_accuracy=0.9)
    judge, other = at_its_evaluation(core), Caller(core)
    answer = other.call(want=4)
    assert (answer.granted, answer.reason) == ([], "waiting for an evaluation's result")
    assert judge.lease(4, evaluated=judged(4, accuracy=0.5)) == [4, 5]


def test_in_rounds_an_early_stop_ends_where_it_was_judged() -> None:  # P7, P8
    core = core_of(Sync(4), evaluate_after=[4, 40], target_accuracy=0.9)
    judge = at_its_evaluation(core)
    assert judge.lease(4, evaluated=judged(4, accuracy=0.95)) == []
    assert core.job.leases.target == 4
    assert core.job.complete, "the result is the final weights' already"


def test_in_rounds_an_evaluation_names_the_round_that_follows() -> None:  # P11
    core = core_of(Sync(4), evaluate_after=[4, 40])
    caller = Caller(core)
    for _ in range(4):
        caller.lease(1)
    caller.call(completed=done(*caller.held))
    assert [e.round for e in caller.call(want=1).evaluations] == [1]


def test_the_judge_s_end_frees_its_evaluation() -> None:  # P5
    core = core_of(evaluate_after=[4, 40])
    judge, other = at_its_evaluation(core), Caller(core)
    assert other.lease(1) == [4]
    core.tick(10.1)
    assert [e.after_step for e in other.call(10.1, want=1).evaluations] == [4]
    assert judge.worker.live is False


def test_an_evaluation_whose_lease_was_lost_on_the_way_is_leased_again() -> None:  # P5
    core = core_of(evaluate_after=[4, 40])
    judge = at_its_evaluation(core)
    answer = judge.call(want=1, held_evaluations=[])
    assert [e.after_step for e in answer.evaluations] == [4]


def test_an_evaluation_that_fails_again_and_again_ends_the_job() -> None:
    core = core_of(evaluate_after=[4, 40])
    judge = at_its_evaluation(core)
    for _ in range(ATTEMPTS_MAX):
        assert core.job.state is JobState.RUNNING
        judge.call(want=1, evaluated=judged(4, error="no memory"))
    assert core.job.state is JobState.FAILED
    assert core.job.reason == f"no memory; the evaluation after step 4 failed {ATTEMPTS_MAX} times"


def test_an_evaluation_that_no_other_attempt_can_mend_is_made_once() -> None:
    core = core_of(evaluate_after=[4, 40])
    wrong = judged(4, error="metric 'auc' is of one output", kind=FailureKind.WRONG_RESULT)
    at_its_evaluation(core).call(want=1, evaluated=wrong)
    assert (core.job.state, core.job.exit_code) == (JobState.FAILED, ExitCode.CONFIGURATION)
    assert core.job.reason == "metric 'auc' is of one output; the evaluation after step 4 failed"


def test_while_the_last_evaluation_runs_the_others_are_told_so() -> None:
    core = core_of(evaluate_after=[4], steps_total=4)
    at_its_evaluation(core)
    answer = Caller(core).call(want=1)
    assert answer.reason == "every step is in; an evaluation is under way"


def test_each_failed_attempt_names_its_evaluation_and_none_is_reported_after_the_end() -> None:
    core = core_of(evaluate_after=[4, 6])
    caller = at_its_evaluation(core)
    for _ in range(ATTEMPTS_MAX + 3):
        caller.call(evaluated=judged(4, error="no mapping"), want=1)
    told = [event for event in core.job.events if "no mapping" in event]
    assert told[:-1] == ["the evaluation after step 4 failed: no mapping"] * ATTEMPTS_MAX
    assert told[-1] == f"failed: no mapping; the evaluation after step 4 failed {ATTEMPTS_MAX} times"


def test_a_held_out_metric_that_is_not_finite_is_warned_of_until_it_is() -> None:
    core = core_of(evaluate_after=[4, 6, 8])
    caller = at_its_evaluation(core)
    for after_step, loss, problems in (
        (4, math.nan, ["held-out loss is NaN after step 4"]),
        (6, math.inf, ["held-out loss is infinite after step 6"]),
        (8, 0.5, []),
    ):
        caller.lease(2, evaluated=judged(after_step, loss=loss, accuracy=0.5))
        caller.complete_all(want=1)
        assert core.job.problems.texts == problems
    told = [event for event in core.job.events if event.startswith(("warning: ", "resolved: "))]
    assert told == [
        "warning: held-out loss is NaN after step 4",
        "resolved: held-out loss is finite again after step 8",
    ]
