"""Throughput and loss in virtual time, and the warning when the training loss rises."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parashard_coordinator.core.progress import (
    LOSS_SMOOTHING,
    NOT_FINITE,
    RATE_BUCKET_S,
    RATE_WINDOW_S,
    RECOVERED_STEPS,
    RISES,
    RUNAWAY_AFTER_STEPS,
    WARNINGS_MAX,
    Change,
    Progress,
    Rate,
)
from support.tiers import fewer


def steps(progress: Progress, count: int, loss: float, now_s: float = 0.0) -> list[Change]:
    """Return what `count` steps with this loss tell."""
    return [told for _ in range(count) for told in progress.step_completed("a", progress.steps, 8, loss, now_s)]


def test_a_steady_rate_is_found() -> None:
    rate = Rate()
    for tick in range(200):
        rate.add(10, tick * 0.1)
    assert rate.per_s(20.0) == pytest.approx(100.0, rel=0.06)


def test_a_young_rate_is_over_its_own_age() -> None:
    rate = Rate()
    assert rate.per_s(5.0) == 0.0
    rate.add(10, 100.0)
    assert rate.per_s(100.0) == 10 / RATE_BUCKET_S
    assert rate.per_s(102.0) == 5.0


def test_a_rate_falls_to_zero_when_nothing_comes() -> None:
    rate = Rate()
    rate.add(10, 0.0)
    assert rate.per_s(RATE_WINDOW_S) == 10 / RATE_WINDOW_S
    assert rate.per_s(RATE_WINDOW_S + 1.0) == 0.0


@fewer(4)
@given(st.lists(st.floats(0, 0.5), max_size=200))
@example([RATE_BUCKET_S / 5] * 400)
def test_a_rate_takes_constant_memory(gaps: list[float]) -> None:
    rate, now_s = Rate(), 0.0
    for gap in gaps:
        now_s += gap
        rate.add(1, now_s)
        assert len(rate._buckets) <= RATE_WINDOW_S / RATE_BUCKET_S + 2


def test_examples_are_counted_for_each_worker_and_for_all() -> None:
    progress = Progress()
    progress.step_completed("a", 0, 30, 1.0, 10.0)
    progress.step_completed("b", 1, 10, 1.0, 11.0)
    assert progress.steps == 2
    assert progress.examples_per_s(12.0) == 20.0
    assert progress.examples_per_s(12.0, "a") == 15.0
    assert progress.examples_per_s(12.0, "b") == 10.0
    assert progress.examples_per_s(12.0, "unknown") == 0.0


def test_times_count_from_the_first_lease() -> None:
    progress = Progress()
    assert (progress.elapsed_s(99.0), progress.training_s()) == (0.0, 0.0)
    progress.first_lease_s = 10.0
    assert (progress.elapsed_s(12.0), progress.training_s()) == (2.0, 0.0)
    progress.step_completed("a", 0, 8, 1.0, 13.0)
    assert (progress.elapsed_s(20.0), progress.training_s()) == (10.0, 3.0)


def test_the_loss_is_smoothed() -> None:
    progress = Progress()
    assert math.isnan(progress.loss)
    steps(progress, 1, 2.0)
    assert progress.loss == 2.0
    steps(progress, 1, 1.0)
    assert progress.loss == pytest.approx(2.0 - LOSS_SMOOTHING)


def test_a_skipped_step_has_no_loss() -> None:
    progress = Progress()
    assert progress.step_completed("a", 0, 8, None, 0.0) == []
    assert math.isnan(progress.loss)
    assert progress.steps == 1


ADVICE = "lower optimizer.learning_rate or set optimizer.clip_norm"


@pytest.mark.parametrize(("loss", "named"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")])
def test_a_loss_that_is_not_finite_is_named_as_a_divergence_and_left_out(loss: float, named: str) -> None:
    progress = Progress(ADVICE)
    steps(progress, 18, 1.0)
    told = f"training diverged: loss became {named} at step 18; {ADVICE}"
    assert steps(progress, 2, loss) == [Change(NOT_FINITE, told)]
    assert progress.loss == 1.0


def test_a_loss_that_was_not_finite_is_a_problem_no_more_once_others_are() -> None:
    progress = Progress()
    steps(progress, 1, 1.0)
    steps(progress, 2, math.nan)
    assert steps(progress, RECOVERED_STEPS - 1, 1.0) == []
    assert steps(progress, 1, math.nan) == [], "it still holds"
    over = Change(NOT_FINITE, "the training loss has been finite for 20 steps, at step 42", over=True)
    assert steps(progress, RECOVERED_STEPS + 1, 1.0) == [over]


def test_warnings_end_at_some_point_and_none_is_taken_back_that_was_not_given() -> None:
    progress = Progress()
    told = [change for _ in range(20) for change in steps(progress, 1, math.nan) + steps(progress, 25, 1.0)]
    assert [change.over for change in told] == [False, True] * WARNINGS_MAX


def test_a_loss_that_runs_away_is_reported_once_while_it_does() -> None:
    progress = Progress(ADVICE)
    steps(progress, RUNAWAY_AFTER_STEPS, 1.0)
    assert steps(progress, 50, 1.0) == []
    [told] = steps(progress, 200, 10.0) + steps(progress, 200, 60.0)
    assert (told.key, told.over) == (RISES, False)
    assert told.text.startswith("training diverges: loss has risen to ")
    assert told.text.endswith(f", best 1.0000; {ADVICE}")


def test_a_loss_that_has_come_back_runs_away_no_more() -> None:
    progress = Progress()
    steps(progress, 40, 1.0)
    assert len(steps(progress, 20, 10.0)) == 1
    [told] = steps(progress, 200, 1.0)
    assert (told.key, told.over) == (RISES, True)
    assert told.text.startswith("the training loss has come back to 2.0")
    assert len(steps(progress, 20, 10.0)) == 1, "and is told again"


def test_the_first_steps_are_not_judged_but_count_as_a_beginning() -> None:
    progress = Progress()
    assert steps(progress, 1, 2.3) + steps(progress, RUNAWAY_AFTER_STEPS - 1, 50.0) == []
    assert len(steps(progress, 200, 50.0)) == 1, "it has never been as good as at its beginning"


def test_noise_around_nothing_is_no_runaway() -> None:
    progress = Progress()
    steps(progress, 60, 0.0001)
    assert steps(progress, 60, 0.01) == []
