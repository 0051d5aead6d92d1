"""How state without gradients moves: averages stay within what they saw, and counters are exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.plan.state import ROUND_STEPS_MAX, counter_rows, counter_values
from parashard_server.state.storage import move

INT64 = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(-1e6, 1e6, width=32)


@given(value=FINITE, batches=st.lists(FINITE, min_size=1, max_size=20), factor=st.floats(0.01, 1))
def test_an_average_stays_between_the_values_that_it_saw(value: float, batches: list[float], factor: float) -> None:
    values = np.array([value], np.float32)
    low, high = min([value, *batches]), max([value, *batches])
    for batch in batches:
        move(values, np.array([batch], np.float32), f"average:{factor}", 1)
    slack = 1e-6 * max(abs(low), abs(high))
    assert low - slack <= values[0] <= high + slack


def test_an_average_moves_towards_the_mean_of_a_round() -> None:
    values = np.array([1.0, -2.0], np.float32)
    move(values, np.array([9.0, 6.0], np.float32), "average:0.5", 3)
    assert values.tolist() == [2.0, 0.0]


@given(start=INT64, added=st.lists(INT64, min_size=1, max_size=30), data=st.data())
def test_a_counter_counts_pushes_alone_and_in_rounds(start: int, added: list[int], data: st.DataObject) -> None:
    values = counter_rows(start).reshape(-1)
    at = 0
    while at < len(added):
        some = added[at : at + data.draw(st.integers(1, 8))]
        pushed = np.sum([counter_rows(number) for number in some], axis=0, dtype=np.float32).reshape(-1)
        move(values, pushed, "counter", len(some))
        at += len(some)
    assert ((values >= 0) & (values <= 255)).all()
    assert (int(counter_values(values.reshape(-1, 8))[0]) - start - sum(added)) % 2**64 == 0


def test_a_counter_counts_in_the_longest_round() -> None:
    values = counter_rows(-1).reshape(-1)
    pushed = counter_rows(-1).reshape(-1) * np.float32(ROUND_STEPS_MAX)
    move(values, pushed, "counter", ROUND_STEPS_MAX)
    assert counter_values(values) == -1 - ROUND_STEPS_MAX


def test_counters_of_several_rows_do_not_touch_each_other() -> None:
    values = counter_rows([255, -1, 7]).reshape(-1)
    move(values, counter_rows([1, 1, 0]).reshape(-1), "counter", 1)
    assert counter_values(values.reshape(-1, 8)).tolist() == [256, 0, 7]


@pytest.mark.parametrize("pushes", [1, 3])
def test_a_sum_adds_what_is_pushed(pushes: int) -> None:
    values = np.array([1.0], np.float32)
    move(values, np.array([0.5], np.float32), "sum", pushes)
    assert values.tolist() == [1.5]
