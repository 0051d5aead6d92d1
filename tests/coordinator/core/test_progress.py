"""Steps, throughput and staleness in virtual time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parashard_coordinator.core.progress import RATE_BUCKET_S, RATE_WINDOW_S, Progress, Rate, quantile
from support.tiers import fewer


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
    progress.step_completed("a", 30, 10.0)
    progress.step_completed("b", 10, 11.0)
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
    progress.step_completed("a", 8, 13.0)
    assert (progress.elapsed_s(20.0), progress.training_s()) == (10.0, 3.0)


@pytest.mark.parametrize(
    ("counts", "fraction", "value"),
    [
        ({}, 0.5, 0),
        ({3: 1}, 0.5, 3),
        ({0: 1, 1: 1}, 0.5, 0),
        ({0: 1, 1: 2}, 0.5, 1),
        ({0: 95, 7: 5}, 0.95, 0),
        ({0: 94, 7: 6}, 0.95, 7),
        ({9: 1, 2: 1}, 1.0, 9),
    ],
)
def test_quantiles(counts: dict[int, int], fraction: float, value: int) -> None:
    assert quantile(Counter(counts), fraction) == value


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 20), min_size=1), st.sampled_from((0.5, 0.95, 0.25)))
def test_a_quantile_is_the_least_value_that_enough_pushes_do_not_exceed(counts: dict[int, int], at: float) -> None:
    pushes = sorted(Counter(counts).elements())
    value = quantile(Counter(counts), at)
    assert sum(push <= value for push in pushes) >= at * len(pushes)
    assert value == pushes[0] or sum(push < value for push in pushes) < at * len(pushes)
