"""The timeline is bounded, begins with the job, has the last minutes in full, and its times ascend."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard_coordinator.endpoints.history import (
    COMPLETE_S,
    HELD_OUT,
    METRICS_MAX,
    OLDER_POINTS,
    RECENT_POINTS,
    TRAINING,
    Timeline,
    columns,
)


def timeline_of(*times_s: float) -> Timeline:
    timeline = Timeline()
    for time_s in times_s:
        timeline.add({"elapsed_s": time_s, "steps_complete": int(time_s)})
    return timeline


def times_of(timeline: Timeline) -> list[float]:
    return [point.elapsed_s for point in timeline.since()]


@pytest.mark.parametrize("points", [1, RECENT_POINTS, 3000, 40_000])
def test_a_long_job_keeps_its_first_point_and_its_last_minutes(points: int) -> None:
    times = times_of(timeline_of(*range(points)))
    assert times[0] == 0
    assert times[-RECENT_POINTS:] == list(range(points))[-RECENT_POINTS:]
    assert len(times) <= RECENT_POINTS + OLDER_POINTS


def test_what_is_older_is_thinned_evenly() -> None:
    times = times_of(timeline_of(*range(40_000)))
    older = times[:-RECENT_POINTS]
    gaps = [after - before for before, after in pairwise(older)]
    assert len(older) > OLDER_POINTS // 2
    assert max(gaps) <= 2 * min(gaps), "the last gap may be of the stride before"


@given(st.lists(st.floats(0, 1e6), max_size=60))
def test_times_ascend_and_the_last_point_is_the_last_added(times_s: list[float]) -> None:
    timeline = timeline_of(*times_s)
    shown = times_of(timeline)
    assert shown == sorted(set(shown))
    assert shown[-1:] == times_s[-1:]
    assert timeline.last == len(times_s)


def test_a_later_coordinator_s_points_replace_those_that_it_knows_nothing_of() -> None:
    assert times_of(timeline_of(*range(1500), 1498.5, 500.0, 501.0))[-3:] == [499, 500.0, 501.0]


def test_points_after_one_are_those_that_were_added_since() -> None:
    timeline = timeline_of(*range(2000))
    assert [point.number for point in timeline.since(1998)] == [1999, 2000]
    assert timeline.since(timeline.last) == []
    timeline.add({"elapsed_s": 1990.0})
    assert [point.elapsed_s for point in timeline.since(2000)] == [1990.0], "one that replaces others is new"


@pytest.mark.parametrize("time", [None, math.nan, math.inf, "1.0", True, 10**400])
def test_a_row_without_a_time_is_no_point(time: object) -> None:
    timeline = timeline_of(1.0)
    timeline.add({"elapsed_s": time, "steps_complete": 5})
    assert times_of(timeline) == [1.0]


def test_what_is_no_finite_number_is_not_known() -> None:
    timeline = timeline_of(1.0)
    odd = {"training_loss": math.nan, "examples_per_s": "many", "shards_live": None, "workers_live": 2, "evil": 1.0}
    timeline.add({"elapsed_s": 2.0, "held_out": {"loss": math.inf, "accuracy": 0.5, "text": []}, **odd})
    timeline.add({"elapsed_s": 3.0, "held_out": 7})
    assert [point.figures for point in timeline.since(1)] == [{"workers_live": 2, "held_out.accuracy": 0.5}, {}]


def test_columns_are_as_long_as_the_times() -> None:
    timeline = timeline_of(1.0)
    timeline.add({"elapsed_s": 2.0, "held_out": {"loss": 0.5}})
    assert columns(timeline.since(), ["steps_complete", "held_out.loss"]) == {
        "elapsed_s": [1.0, 2.0],
        "steps_complete": [1, None],
        "held_out.loss": [None, 0.5],
    }


def test_held_out_metrics_are_the_newest_evaluation_s_and_not_too_many() -> None:
    timeline = timeline_of(1.0)
    timeline.add({"elapsed_s": 2.0, "held_out": {f"metric_{i:02}": 1.0 for i in range(METRICS_MAX + 1)}})
    timeline.add({"elapsed_s": 3.0})
    assert timeline.metrics(HELD_OUT) == [f"held_out.metric_{i:02}" for i in range(METRICS_MAX)]
    timeline.add({"elapsed_s": 4.0, "held_out": {"loss": 1.0}})
    assert timeline.metrics(HELD_OUT) == ["held_out.loss"]


def test_it_tells_whether_it_begins_with_the_job() -> None:
    assert Timeline().complete
    assert timeline_of(COMPLETE_S, 99.0).complete
    late = timeline_of(COMPLETE_S + 1, 99.0)
    assert (late.complete, late.begins_s) == (False, COMPLETE_S + 1)


def test_metrics_of_the_training_are_columns_of_their_own() -> None:
    timeline = timeline_of(1.0)
    timeline.add({"elapsed_s": 2.0, "training": {"accuracy": 0.5}, "held_out": {"accuracy": 0.25}})
    assert (timeline.metrics(TRAINING), timeline.metrics(HELD_OUT)) == (["training.accuracy"], ["held_out.accuracy"])
    assert timeline.since(1)[0].figures == {"training.accuracy": 0.5, "held_out.accuracy": 0.25}
