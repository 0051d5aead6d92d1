"""What a few steps show of the training loss, and how what the whole curve shows begins and ends."""

from __future__ import annotations

import math

import pytest

from parashard.job.policy import Policy
from parashard_coordinator.core.learning import (
    JUDGED_EVERY,
    JUDGED_STEPS,
    LOSS_SMOOTHING,
    NOT_FALLING,
    NOT_FINITE,
    RECOVERED_STEPS,
    RISES,
    RUNAWAY_AFTER_STEPS,
    WARNINGS_MAX,
    Advice,
    Change,
    Learning,
    advice_for,
    pipeline_advice,
)


class Steps:
    """Steps of a job of which the end is far away."""

    def __init__(self, learning: Learning | None = None, done: float = 0.1) -> None:
        self.learning, self.done, self.step = learning or Learning(), done, 0

    def __call__(self, count: int, loss: float | None, *, fresh: bool = True) -> list[Change]:
        """Return what `count` steps with this loss tell."""
        told = []
        for _ in range(count):
            told += self.learning.step_completed(self.step, loss, fresh=fresh, done=self.done)
            self.step += 1
        return told


def test_the_loss_is_smoothed() -> None:
    steps = Steps()
    assert math.isnan(steps.learning.loss)
    steps(1, 2.0)
    assert steps.learning.loss == 2.0
    steps(1, 1.0)
    assert steps.learning.loss == pytest.approx(2.0 - LOSS_SMOOTHING)


def test_a_skipped_step_has_no_loss() -> None:
    steps = Steps()
    assert steps(1, None) == []
    assert math.isnan(steps.learning.loss)


@pytest.mark.parametrize(("loss", "named"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")])
def test_a_loss_that_is_not_finite_is_named_as_a_divergence_and_left_out(loss: float, named: str) -> None:
    steps = Steps()
    steps(18, 1.0)
    told = f"training diverged: loss became {named} at step 18"
    assert steps(2, loss) == [Change(NOT_FINITE, told)]
    assert steps.learning.loss == 1.0


def test_a_loss_that_was_not_finite_is_a_problem_no_more_once_others_are() -> None:
    steps = Steps()
    steps(1, 1.0)
    steps(2, math.nan)
    assert steps(RECOVERED_STEPS - 1, 1.0) == []
    assert steps(1, math.nan) == [], "it still holds"
    over = Change(NOT_FINITE, "the training loss has been finite for 20 steps, at step 42", over=True)
    assert steps(RECOVERED_STEPS + 1, 1.0) == [over]


def test_warnings_end_at_some_point_and_none_is_taken_back_that_was_not_given() -> None:
    steps = Steps()
    told = [change for _ in range(20) for change in steps(1, math.nan) + steps(25, 1.0)]
    assert [change.over for change in told] == [False, True] * WARNINGS_MAX


def test_a_loss_that_runs_away_is_reported_once_while_it_does() -> None:
    steps = Steps()
    steps(RUNAWAY_AFTER_STEPS, 1.0)
    assert steps(50, 1.0) == []
    [told] = steps(200, 10.0) + steps(200, 60.0)
    assert (told.key, told.over) == (RISES, False)
    assert told.text.startswith("training diverges: loss has risen to ")
    assert told.text.endswith(", best 1.0000")


def test_a_loss_that_has_come_back_runs_away_no_more() -> None:
    steps = Steps()
    steps(40, 1.0)
    assert len(steps(20, 10.0)) == 1
    [told] = steps(200, 1.0)
    assert (told.key, told.over) == (RISES, True)
    assert told.text.startswith("the training loss has come back to 2.0")
    assert len(steps(20, 10.0)) == 1, "and is told again"


def test_the_first_steps_are_not_judged_but_count_as_a_beginning() -> None:
    steps = Steps()
    assert steps(1, 2.3) + steps(RUNAWAY_AFTER_STEPS - 1, 50.0) == []
    assert len(steps(200, 50.0)) == 1, "it has never been as good as at its beginning"


def test_noise_around_nothing_is_no_runaway() -> None:
    steps = Steps()
    steps(60, 0.0001)
    assert steps(60, 0.01) == []


def test_a_loss_that_does_not_fall_is_told_once_and_is_over_when_it_falls() -> None:
    steps = Steps(done=0.3)
    [told] = steps(400, 2.3)
    assert (told.key, told.over, told.rose) == (NOT_FALLING, False, False)
    assert (
        told.text == "the training loss has not fallen: 2.3000 in the first 8 steps, 2.3000 in the last 52 of 208 steps"
    )
    [told] = steps(400, 1.0)
    assert (told.key, told.over) == (NOT_FALLING, True)
    assert told.text.startswith("the training loss falls, at step ")


def test_the_whole_curve_is_not_judged_before_a_quarter_of_the_job_is_done() -> None:
    steps = Steps(done=0.2)
    assert steps(JUDGED_STEPS - 1, 2.3) == []
    steps.done = 1.0
    assert [told.key for told in steps(1, None)] == [NOT_FALLING], "a skipped step may be the last one"


def test_a_long_job_is_judged_before_a_quarter_of_it_is_done() -> None:
    steps = Steps(done=0.01)
    steps(JUDGED_STEPS - 1, 2.3)
    assert [told.key for told in steps(JUDGED_EVERY, 2.3)] == [NOT_FALLING]


def test_at_the_end_the_text_is_of_all_steps() -> None:
    steps = Steps(done=0.5)
    steps(900, 2.3)
    steps.done = 1.0
    [told] = steps(1, 2.3)
    assert told.text.endswith(" of 896 steps")


def test_a_loss_that_runs_away_is_not_told_of_twice() -> None:
    steps = Steps(done=0.5)
    steps(150, 0.1)
    assert [told.key for told in steps(500, 5.0)] == [RISES]


def test_a_later_coordinator_tells_again_of_a_loss_that_does_not_fall() -> None:
    steps = Steps(done=0.5)
    steps(500, 2.3)
    later = Learning()
    later.resume(steps.learning.losses(), steps.learning.curve.saved())
    assert [told.key for told in Steps(later, done=0.5)(16, 2.3)] == [NOT_FALLING]


def test_the_record_of_an_earlier_version_has_no_curve_and_may_be_of_a_model_at_its_best() -> None:
    later = Learning()
    later.resume((2.3, 2.3, 2.3), ())
    assert Steps(later, done=0.5)(500, 2.3) == []


def test_the_level_without_staleness_is_noted_when_staleness_begins() -> None:
    steps = Steps(done=0.1)
    for at in range(100):
        steps(1, 2.3 - 0.01 * at)
    steps(1, 1.6, fresh=False)
    assert steps.learning.curve.fresh is not None
    steps.done = 0.5
    assert [told.text.partition(":")[0] for told in steps(500, 1.6)] == [
        "the training loss falls more slowly than its first steps promised"
    ]


def test_a_job_that_ends_early_or_under_another_coordinator_is_judged_as_it_ends() -> None:
    steps = Steps(done=0.01)
    steps(500, 2.3)
    assert [(told.key, told.over) for told in steps.learning.ended(500)] == [(NOT_FALLING, False)]
    later = Learning()
    later.resume(steps.learning.losses(), steps.learning.curve.saved())
    assert [(told.key, told.over) for told in later.ended(500)] == [(NOT_FALLING, False)]
    assert Learning().ended(0) == []


RATE = "lower optimizer.learning_rate or set optimizer.clip_norm"
FRESHER = 'use consistency.policy = "auto"'
PIPELINE = "first set cluster.pipeline_depth = 0; then "


@pytest.mark.parametrize(
    ("policy", "depth", "workers", "first"),
    [
        ("async", 0, 1, ""),
        ("async", 0, 4, f"{FRESHER}, or "),
        ("async", 1, 1, PIPELINE),
        ("ssp:0", 0, 4, f"{FRESHER}, or "),
        ("ssp:3", 0, 4, f"{FRESHER} or a smaller K, or "),
        ("ssp:3", 1, 4, PIPELINE),
        ("sync:4", 1, 4, ""),
        ("auto:4", 0, 4, ""),
        ("auto:4", 1, 4, ""),
    ],
)
def test_staleness_is_advised_against_first_where_there_may_be_some(
    policy: str, depth: int, workers: int, first: str
) -> None:
    advice = advice_for(Policy.parse(policy), pipeline_depth=depth, workers=workers, clips=False)
    assert advice == Advice(f"{first}{RATE}", f"{first}{Advice().against_standstill}")


def test_a_norm_that_is_clipped_can_be_clipped_more() -> None:
    advice = advice_for(Policy.parse("sync:2"), pipeline_depth=0, workers=2, clips=True)
    assert advice.against_rise == "lower optimizer.learning_rate or lower optimizer.clip_norm"


@pytest.mark.parametrize(
    ("policy", "depth", "hideable", "advises"),
    [
        ("async", 0, 0.4, True),
        ("ssp:3", 0, 0.11, True),
        ("async", 0, 0.1, False),
        ("async", 1, 0.4, False),
        ("sync:4", 0, 0.4, False),
        ("auto:4", 0, 0.4, False),
    ],
)
def test_a_pipeline_is_named_where_it_would_hide_more_than_a_tenth(
    policy: str, depth: int, hideable: float, advises: bool
) -> None:
    told = pipeline_advice(Policy.parse(policy), depth, hideable)
    says = f"cluster.pipeline_depth = 1 would hide up to {hideable:.0%} of a step, and make each gradient a step staler"
    assert told == (says.replace("%", " %", 1) if advises else "")
