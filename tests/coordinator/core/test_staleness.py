"""Quantiles over exact counts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard_coordinator.core.staleness import merged, quantile


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


def test_shards_are_counted_together() -> None:
    assert merged([[(0, 2), (5, 1)], [], [(0, 1)]]) == {0: 3, 5: 1}
    assert merged([]) == {}
