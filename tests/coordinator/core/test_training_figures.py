"""What an epoch's steps add up to: each step once, in any order, over coordinators."""

from __future__ import annotations

import math
from itertools import permutations

import pytest

from parashard_coordinator.core.saved import Saved
from parashard_coordinator.core.training_figures import EPOCHS_KEPT, MetricSums, TrainingFigures

TOTAL, EPOCH = 12, 4


def figures_of(*steps: tuple[int, float | None]) -> TrainingFigures:
    figures = TrainingFigures(TOTAL, EPOCH)
    for step, loss in steps:
        figures.count(step, 2, loss)
    return figures


def test_the_loss_of_an_epoch_is_the_mean_over_its_examples_in_any_order_and_each_step_counts_once() -> None:
    losses = {0: (0.1, 3), 1: (0.2, 3), 2: (0.3, 3), 3: (1e-7, 1)}
    found = set()
    for order in permutations([0, 1, 2, 3, 1]):
        figures = TrainingFigures(TOTAL, EPOCH)
        counted = [figures.count(step, losses[step][1], losses[step][0]) for step in order]
        assert (sum(counted), figures.examples) == (4, 10)
        found.add(figures.loss_of(0))
    assert len(found) == 1
    assert found.pop() == pytest.approx(1.8000001 / 10, rel=1e-12)


def test_the_first_report_of_a_step_counts() -> None:
    figures = figures_of((0, 1.0), (0, 9.0), (1, 3.0))
    assert (figures.loss_of(0), figures.examples) == (2.0, 4)


def test_a_loss_that_is_not_finite_or_not_known_is_nan_and_stays_so_with_the_next_coordinator() -> None:
    figures = figures_of((0, math.inf), (1, 1.0), (4, None))
    assert all(math.isnan(figures.loss_of(epoch)) for epoch in (0, 1, 2))
    later = resumed(figures)
    later.count(2, 2, 1.0)
    assert math.isnan(later.loss_of(0))


def resumed(figures: TrainingFigures) -> TrainingFigures:
    later = TrainingFigures(TOTAL, EPOCH)
    later.resume(Saved(target=TOTAL, **figures.saved()))
    return later


def test_a_later_coordinator_counts_no_step_that_an_earlier_one_has_counted() -> None:
    later = resumed(figures_of((0, 1.0), (1, 3.0)))
    for step, loss in ((1, 100.0), (2, 5.0), (0, 100.0), (3, 7.0)):
        later.count(step, 2, loss)
    assert (later.loss_of(0), later.examples, later.saved()["counted"]) == (4.0, 8, ((0, 4),))


def test_steps_that_are_not_counted_are_known_by_epoch() -> None:
    figures = figures_of((0, 1.0), (5, 1.0), (11, 1.0))
    assert figures.missing(0, TOTAL) == 9
    assert [figures.missing_in(epochs) for epochs in ([], [0], [1, 2])] == [0, 3, 6]


def test_the_sums_of_an_epoch_can_be_dropped_and_its_steps_stay_counted() -> None:
    figures = figures_of((0, 1.0), (5, 1.0))
    figures.forget([0])
    assert figures.epochs() == [1]
    assert not figures.count(0, 2, 9.0)
    assert (figures.loss_of(0), figures.history()) == (1.0, {0: {"loss": 1.0}, 1: {"loss": 1.0}})


# --- metrics ---

RIGHT = MetricSums("accuracy", "mean", [1.0, 2.0])


def test_the_metrics_of_an_epoch_are_of_all_its_steps_each_once() -> None:
    figures = TrainingFigures(TOTAL, EPOCH)
    for step, right in enumerate([2.0, 1.0, 0.0, 1.0]):
        figures.count(step, 2, 0.5, [RIGHT._replace(values=[right, 2.0]), MetricSums("auc", "auc", [0, 1, 1, 0])])
    figures.count(1, 2, 0.5, [RIGHT._replace(values=[2.0, 2.0])])
    assert figures.metrics_of(0) == figures.newest() == {"accuracy": 0.5, "auc": 1.0}
    assert figures.figures_of(0) == {"loss": 0.5, "accuracy": 0.5, "auc": 1.0}


def test_sums_whose_figure_only_the_metric_has_are_kept_for_it() -> None:
    figures = TrainingFigures(TOTAL, EPOCH)
    for step in range(2):
        figures.count(step, 2, 0.5, [RIGHT, MetricSums("mine", "", [1.0, 2.0, 3.0])])
    assert figures.metrics_of(0) == {"accuracy": 0.5}
    assert figures.sums_of(0) == [MetricSums("mine", "", [2.0, 4.0, 6.0])]


def test_a_later_coordinator_adds_to_the_sums_and_keeps_the_figures_of_epochs_before() -> None:
    figures = TrainingFigures(TOTAL, EPOCH)
    for step in range(6):
        figures.count(step, 2, 0.5, [RIGHT])
    figures.forget([0])
    later = resumed(figures)
    assert not later.count(5, 2, 0.5, [RIGHT._replace(values=[0.0, 2.0])])
    assert later.count(6, 2, 0.5, [RIGHT._replace(values=[0.0, 2.0])])
    assert later.history() == {0: {"loss": 0.5, "accuracy": 0.5}, 1: {"loss": 0.5, "accuracy": 2 / 6}}


def test_sums_that_are_not_finite_or_not_alike_make_no_figure_and_can_be_stored() -> None:
    figures = TrainingFigures(TOTAL, EPOCH)
    figures.count(0, 2, 0.5, [RIGHT._replace(values=[math.nan, 2.0]), MetricSums("odd", "mean", [1.0, 1.0])])
    figures.count(1, 2, 0.5, [RIGHT, MetricSums("odd", "mean", [1.0, 1.0, 1.0])])
    for one in (figures, resumed(figures)):
        assert all(math.isnan(value) for value in one.metrics_of(0).values())
        assert list(one.metrics_of(0)) == ["accuracy", "odd"]


def test_a_loss_that_is_no_mean_over_examples_is_the_figure_of_its_own_sums() -> None:
    divided = TrainingFigures(TOTAL, EPOCH)
    divided.count(0, 4, 2.0)
    divided.count(1, 4, 5.0, [MetricSums("loss", "mean", [5.0, 1.0])])  # three of four targets are ignored
    assert divided.loss_of(0) == (4 * 2.0 + 5.0) / 5
    added = TrainingFigures(TOTAL, EPOCH)
    for step in range(2):
        added.count(step, 4, 8.0, [MetricSums("loss", "sum", [8.0, 1.0])])
    assert (added.loss_of(0), added.metrics_of(0), added.sums_of(0)) == (16.0, {}, [])


def test_of_a_job_that_nobody_follows_the_sums_of_whole_epochs_are_dropped_and_few_figures_kept() -> None:
    figures = TrainingFigures(3 * EPOCHS_KEPT, 2, keeps_sums=False)
    for step in range(3 * EPOCHS_KEPT):
        figures.count(step, 2, float(step))
    assert figures.epochs() == []
    assert list(figures.history()) == [EPOCHS_KEPT // 2 + n for n in range(EPOCHS_KEPT)]
    assert figures.ended == list(range(3 * EPOCHS_KEPT // 2))
