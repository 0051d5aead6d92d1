"""What an epoch's steps add up to: each step once, in any order, over coordinators."""

from __future__ import annotations

import math
from itertools import permutations

import pytest

from parashard_coordinator.core.training_figures import TrainingFigures

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
    later.resume(figures.examples, figures.counted(), figures.losses(), figures.not_finite())
    return later


def test_a_later_coordinator_counts_no_step_that_an_earlier_one_has_counted() -> None:
    later = resumed(figures_of((0, 1.0), (1, 3.0)))
    for step, loss in ((1, 100.0), (2, 5.0), (0, 100.0), (3, 7.0)):
        later.count(step, 2, loss)
    assert (later.loss_of(0), later.examples, later.counted()) == (4.0, 8, ((0, 4),))


def test_steps_that_are_not_counted_are_known_by_epoch() -> None:
    figures = figures_of((0, 1.0), (5, 1.0), (11, 1.0))
    assert figures.missing(0, TOTAL) == 9
    assert [figures.missing_in(epochs) for epochs in ([], [0], [1, 2])] == [0, 3, 6]


def test_the_sums_of_an_epoch_can_be_dropped_and_its_steps_stay_counted() -> None:
    figures = figures_of((0, 1.0), (5, 1.0))
    figures.forget([0])
    assert figures.epochs() == [1]
    assert not figures.count(0, 2, 9.0)
    assert math.isnan(figures.loss_of(0))
