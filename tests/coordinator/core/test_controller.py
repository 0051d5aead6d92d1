"""The controller of `auto`: who gets parts and how far batches may overlap, by figures alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard_coordinator.core.controller import (
    AHEAD_MAX,
    DRIFT_MAX,
    FIRST_POINT,
    MEASURED,
    PACE_BATCHES,
    PACED_S,
    PAUSE_S,
    PROBES,
    SETTLED,
    SLOW,
    Controller,
    Drift,
    Lag,
    LagDecision,
    LagInputs,
    choose_lag,
    point_after,
    slowness,
    waiting_share,
)
from parashard_coordinator.core.policies import Auto
from parashard_coordinator.core.progress import median

SECOND_POINT = 2 * FIRST_POINT
LIVE = ["worker-0", "worker-1", "worker-2"]


def spent(lease: float = 0.0, compute: float = 0.0, transfer: float = 0.0) -> dict[str, float]:
    """Return where a worker's time went; all of its transfers are pulls that were waited for."""
    return {"lease": lease, "pull": transfer, "compute": compute, "push": 0.0, "transfer": transfer}


def controller_of(parts: int) -> Controller:
    """Return a controller of batches in so many parts."""
    return Controller(Auto(parts))


def paused() -> Controller:
    """Return a controller that has found worker-2 slow at 0 s."""
    controller = controller_of(3)
    assert controller.judge_worker("worker-2", [1.0] * MEASURED, 0.1, 0.0)
    return controller


def looked(controller: Controller, batch: int, spent_s: dict[str, dict[str, float]], now_s: float) -> None:
    """Decide where it is time to; a change holds from the next batch on."""
    decision = controller.decide_lag(batch, spent_s, now_s, diverges=False)
    if decision is not None:
        controller.apply_decision(decision, controller.parts * (batch + 1))


def driven(
    waiting: float,
    drift: float | Sequence[float] | None,
    batches: int,
    controller: Controller | None = None,
    *,
    first: int = 0,
) -> Controller:
    """Return a controller of 2 parts after so many batches of a second, with this share of waiting and this drift.

    Several drifts are measured in turn, and then no more.
    """
    controller = controller or controller_of(2)
    drifts: Iterator[float | None] = repeat(drift) if drift is None or isinstance(drift, float) else iter(drift)
    for batch in range(first, batches):
        for step in (2 * batch, 2 * batch + 1):
            if controller.measures_drift(step) and (found := next(drifts, None)) is not None:
                controller.record_drift(Drift(step, found, 1))
        times = {"worker-0": spent(lease=batch * waiting, compute=batch * (1 - waiting))}
        looked(controller, batch, times, float(batch))
    return controller


# --- slow workers ---


def test_a_worker_is_slow_by_the_best_of_its_latest_times() -> None:
    assert "1.3 s" in slowness([0.1, 2.0, 1.3, 1.5], 0.4, 3)
    assert slowness([2.0, 1.3, 0.5], 0.4, 3) == ""
    assert slowness([2.0, 2.0], 0.4, 3) == ""  # not measured yet
    assert slowness([2.0, 2.0, 2.0], None, 3) == ""  # there is no other
    assert slowness([0.04] * 3, 0.001, 3) == ""  # quick enough


def test_a_slow_worker_gets_no_parts_and_the_others_share_them() -> None:
    controller = paused()
    assert "a part takes it 1 s, the others 0.1 s" in controller.paused_reason("worker-2", LIVE, 1.0)
    assert controller.paused_reason("worker-1", LIVE, 1.0) == ""
    assert controller.taking_part(LIVE, 1.0) == ["worker-0", "worker-1"]


def test_a_slow_worker_works_where_there_is_no_other() -> None:
    controller = paused()
    assert controller.paused_reason("worker-2", ["worker-2"], 1.0) == ""
    assert controller.taking_part(["worker-2"], 1.0) == ["worker-2"]


def test_a_slow_worker_is_tried_again_after_a_while_that_doubles() -> None:
    controller = paused()
    assert controller.paused_reason("worker-2", LIVE, PAUSE_S - 0.1)
    assert controller.paused_reason("worker-2", LIVE, PAUSE_S) == ""
    assert "60 s" in controller.judge_worker("worker-2", [1.0], 0.1, PAUSE_S + 1)  # one time is enough
    assert controller.paused_reason("worker-2", LIVE, PAUSE_S + 60)


def test_a_worker_that_is_quick_again_is_like_any_other() -> None:
    controller = paused()
    assert controller.judge_worker("worker-2", [0.1] * MEASURED, 0.1, PAUSE_S + 1) == ""
    assert controller.judge_worker("worker-2", [1.0], 0.1, PAUSE_S + 2) == ""  # one time is not enough any more


@given(
    st.dictionaries(st.sampled_from("abcde"), st.floats(0.001, 100.0), min_size=1),
    st.lists(st.sampled_from("abcde"), min_size=1, unique=True),
    st.floats(0.0, 1000.0),
)
def test_some_live_worker_always_gets_parts(times: dict[str, float], live: list[str], now_s: float) -> None:
    controller = controller_of(2)
    for name, seconds in times.items():
        others = [other_s for other, other_s in times.items() if other != name]
        controller.judge_worker(name, [seconds] * MEASURED, median(others) if others else None, 0.0)
    taking = controller.taking_part(live, now_s)
    assert taking
    assert set(taking) == {name for name in live if not controller.paused_reason(name, live, now_s)}


# --- the lag ---


def test_the_lag_is_0_while_workers_hardly_wait() -> None:
    controller = driven(0.06, 0.001, 200)
    assert (controller.lag, controller.lags) == (0, [])
    assert controller.reason == "workers wait 6% of their time"


def test_the_lag_is_0_while_the_drift_is_not_known() -> None:
    controller = driven(0.5, None, 200)
    assert controller.lag == 0
    assert "not known" in controller.reason


@pytest.mark.parametrize("drifts", [[0.001], [0.001, 0.001, 2 * DRIFT_MAX], [2 * DRIFT_MAX, 0.001, 0.001]])
def test_a_small_drift_may_be_chance(drifts: list[float]) -> None:
    assert driven(0.5, [*[0.001] * 3, *drifts], SECOND_POINT + SETTLED + 1).lag == 0
    assert driven(0.5, [0.001] * 6, SECOND_POINT + SETTLED + 1).lag == 1


def test_the_lag_is_0_where_an_update_changes_gradients_much() -> None:
    controller = driven(0.5, 2 * DRIFT_MAX, 200)
    assert controller.lag == 0
    assert f"an update changes a gradient by {2 * DRIFT_MAX:.0%}" in controller.reason


def test_the_lag_rises_where_workers_wait_and_updates_change_little() -> None:
    controller = driven(0.5, 0.01, FIRST_POINT + SETTLED + 1)
    assert (controller.lag, controller.reason[-24:]) == (0, ", which must be so twice")
    driven(0.5, 0.01, SECOND_POINT + SETTLED + 1, controller, first=FIRST_POINT + SETTLED + 1)
    (change,) = controller.lags
    batch = SECOND_POINT + SETTLED
    assert change == Lag(2 * batch + 2, 1, "workers wait 50% of their time, and an update changes a gradient by 1%")


def test_a_lag_that_saves_no_time_is_taken_back_and_tried_again_with_other_workers() -> None:
    controller = driven(0.5, 0.01, 3000)  # a batch takes a second at any lag
    assert [change.lag for change in controller.lags] == [1, 0]
    assert controller.lags[1].reason.endswith("but a lag does not make batches quicker: 1 s a batch, 1 s without")
    for batch in range(3000, 5000):
        for step in (2 * batch, 2 * batch + 1):
            if controller.measures_drift(step):
                controller.record_drift(Drift(step, 0.01, 1))
        times = {f"worker-{i}": spent(lease=batch * 0.5, compute=batch * 0.5) for i in range(2)}
        looked(controller, batch, times, float(batch))
    assert [change.lag for change in controller.lags] == [1, 0, 1, 0]


def test_a_newer_measurement_takes_the_lag_back() -> None:
    controller = driven(0.5, 0.01, SECOND_POINT + SETTLED + 1)
    driven(0.5, 0.5, 400, controller, first=SECOND_POINT + SETTLED + 1)
    assert [change.lag for change in controller.lags] == [1, 0]
    assert "50%" in controller.lags[1].reason


def test_a_loss_that_rises_takes_the_lag_back_at_once() -> None:
    controller = driven(0.5, 0.01, SECOND_POINT + SETTLED + 1)
    batch = SECOND_POINT + SETTLED + 1
    assert controller.decide_lag(batch, {}, float(batch), diverges=True) == LagDecision(
        0, "the training loss does not fall"
    )


def test_a_drift_over_several_updates_is_shared_out() -> None:
    controller = controller_of(2)
    for batch in range(SECOND_POINT + SETTLED + 1):
        if controller.measures_drift(2 * batch):
            controller.record_drift(Drift(2 * batch, 0.16, 4))
        times = {"worker-0": spent(lease=batch * 1.0, compute=batch * 1.0)}
        looked(controller, batch, times, float(batch))
    assert controller.lag == 1


def test_the_drift_is_measured_at_one_step_of_each_of_a_point_s_batches() -> None:
    controller, steps = controller_of(4), range(4 * (FIRST_POINT + SETTLED))
    for _ in range(2):  # steps that came back are leased again
        assert [step for step in steps if controller.measures_drift(step)] == [
            4 * (FIRST_POINT + after) for after in PROBES
        ]


def test_a_controller_goes_on_from_what_was_decided() -> None:
    lags = [Lag(100, 1, "workers wait"), Lag(300, 2, "workers wait more")]
    controller = controller_of(4)
    controller.resume(lags, [Drift(64, 0.01, 1)])
    assert (controller.lag, controller.reason) == (2, "workers wait more")
    assert controller.decide_lag(5000, {}, 0.0, diverges=False) is None  # it measures before it decides
    assert controller.lag == 2


shares = st.none() | st.floats(0.0, 1.0)
drifts = st.none() | st.floats(0.0, 2.0)


@given(st.integers(0, 3), shares, drifts, drifts, st.booleans())  # an earlier version allowed lags above 1
def test_a_lag_is_only_where_two_drifts_allow_it(
    lag: int, waiting: float | None, drift: float | None, before: float | None, gains: bool
) -> None:
    decision = choose_lag(LagInputs(lag, waiting, drift, before, gains=gains))
    assert decision.lag in (0, 1)
    assert decision.reason
    if decision.lag:
        assert gains
        assert drift is not None
        assert drift <= DRIFT_MAX
        assert lag or (before or 0.0) <= DRIFT_MAX
        assert lag or before is not None


def test_points_are_powers_of_two_and_then_a_thousand_batches_apart() -> None:
    found, batch = [], 0
    while batch < 4000:
        batch = point_after(batch, 0)
        found.append(batch)
    assert found == [32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]
    assert point_after(2048, 1) == 2048 + 128


def test_the_waiting_share_leaves_out_workers_that_came_or_went() -> None:
    before = {"a": spent(lease=1.0, compute=1.0), "gone": spent(lease=9.0)}
    after = {"a": spent(lease=2.0, compute=3.0, transfer=1.0), "new": spent(lease=9.0)}
    assert waiting_share(before, after) == 0.5
    assert waiting_share({}, after) is None


@pytest.mark.parametrize(("lag", "transfer", "overlaps"), [(0, 1.0, False), (1, 0.05, False), (1, 0.2, True)])
def test_only_with_a_lag_and_long_transfers_a_worker_holds_another_part(
    lag: int, transfer: float, overlaps: bool
) -> None:
    controller = controller_of(2)
    controller.resume([Lag(0, lag, "")], [])
    assert controller.overlaps(spent(compute=1.0, transfer=transfer)) is overlaps


def test_the_slow_factor_is_above_an_even_share_of_one_worker_less() -> None:
    assert SLOW > 2  # leaving one of two workers out doubles the other's work


@pytest.mark.parametrize(
    ("batch_s", "ahead"), [(0.001, AHEAD_MAX), (0.01, 5), (0.04, 2), (0.06, 1), (0.45, 1), (0.6, 0)]
)  # `AHEAD_S` of them, and at least one of those that take at most `PACED_S`
def test_parts_are_leased_ahead_where_batches_are_quick(batch_s: float, ahead: int) -> None:
    controller = controller_of(2)
    assert controller.ahead == 0, "nothing is known"
    for batch in range(PACE_BATCHES + 1):
        controller.keep_pace(batch, batch * batch_s)
    assert controller.ahead == ahead


def test_nothing_more_is_leased_ahead_once_a_batch_takes_long() -> None:
    controller = controller_of(2)
    for batch in range(PACE_BATCHES + 1):
        controller.keep_pace(batch, batch * 0.01)
    assert controller.ahead == 5
    controller.keep_pace(PACE_BATCHES + 1, 0.08 + 0.9 * PACE_BATCHES * PACED_S)
    assert controller.ahead == 5
    controller.keep_pace(PACE_BATCHES + 1, 0.1 + PACE_BATCHES * PACED_S)
    assert controller.ahead == 0


def test_the_weights_of_a_step_have_all_updates_but_the_lag() -> None:
    controller = controller_of(2)
    assert [controller.least_version(step) for step in (0, 1, 2, 7)] == [0, 0, 1, 3]
    controller.resume([Lag(8, 2, "")], [])
    assert [controller.least_version(step) for step in (0, 5, 7, 8)] == [0, 0, 1, 2], "as far as the limit goes"
