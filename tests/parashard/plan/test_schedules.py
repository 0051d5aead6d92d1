"""Schedules against their closed forms, at the boundaries above all."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from parashard.errors import ConfigurationError
from parashard.frozen_model import validated
from parashard.plan.schedules import (
    ConstantSchedule,
    CosineRestartsSchedule,
    CosineSchedule,
    ExponentialSchedule,
    PiecewiseSchedule,
    PolynomialSchedule,
    Schedule,
    ScheduleOptions,
    StepSchedule,
)

ALL: list[Schedule] = [
    ConstantSchedule(),
    StepSchedule(every_steps=3, factor=0.5),
    ExponentialSchedule(decay_steps=10, rate=0.1),
    ExponentialSchedule(decay_steps=10, rate=0.1, staircase=True),
    CosineSchedule(decay_steps=8, final_fraction=0.2),
    CosineRestartsSchedule(first_steps=3, height_factor=0.5),
    PolynomialSchedule(decay_steps=8, power=2.0, final_fraction=0.2),
    PiecewiseSchedule(changes=((3, 0.5), (5, 0.1))),
]


def factors(schedule: Schedule, count: int) -> list[float]:
    return [schedule.factor(t) for t in range(1, count + 1)]


def test_constant() -> None:
    assert factors(ConstantSchedule(), 3) == [1.0, 1.0, 1.0]


def test_step_falls_after_every_steps_updates() -> None:
    assert factors(StepSchedule(every_steps=3, factor=0.5), 7) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]


def test_exponential_smooth_and_as_a_staircase() -> None:
    smooth = ExponentialSchedule(decay_steps=4, rate=0.5)
    assert factors(smooth, 9) == pytest.approx([0.5 ** (n / 4) for n in range(9)], rel=1e-15)
    assert factors(smooth.replaced(staircase=True), 9) == [1] * 4 + [0.5] * 4 + [0.25]


def test_cosine_starts_at_one_and_stays_at_its_final_fraction() -> None:
    cosine = CosineSchedule(decay_steps=4, final_fraction=0.2)
    root = math.sqrt(0.5)
    expected = [1.0, 0.6 + 0.4 * root, 0.6, 0.6 - 0.4 * root, 0.2, 0.2, 0.2]
    assert factors(cosine, 7) == pytest.approx(expected, rel=1e-15)
    assert CosineSchedule(decay_steps=4).factor(100) == 0.0


def test_polynomial_falls_along_its_power_and_stays() -> None:
    line = PolynomialSchedule(decay_steps=4, final_fraction=0.2)
    assert factors(line, 6) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2], rel=1e-12)
    assert factors(line.replaced(power=2.0), 3) == pytest.approx([1.0, 0.2 + 0.8 * 0.75**2, 0.2 + 0.8 * 0.25])
    assert factors(line.replaced(final_fraction=3.0), 5) == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0])


def test_piecewise_changes_after_so_many_updates() -> None:
    pieces = PiecewiseSchedule(changes=((2, 0.5), (3, 4.0), (5, 0.0)))
    assert factors(pieces, 7) == [1.0, 1.0, 0.5, 4.0, 4.0, 0.0, 0.0]
    assert factors(PiecewiseSchedule(changes=((0, 0.25),)), 2) == [0.25, 0.25]


@pytest.mark.parametrize(
    "changes",
    [[], [[3, 0.5], [2, 0.1]], [[2, 0.5], [2, 0.1]], [[-1, 0.5]], [[2, -0.5]], [[2, math.inf]], [[2]], [2, 3]],
)
def test_changes_that_are_none_are_refused(changes: Any) -> None:
    with pytest.raises(ValidationError, match="changes"):
        validated(PiecewiseSchedule, {"kind": "piecewise", "changes": changes})


def test_restarts_are_longer_and_lower() -> None:
    restarts = CosineRestartsSchedule(first_steps=2, length_factor=2.0, height_factor=0.5)
    root = math.sqrt(0.5) / 2
    assert factors(restarts, 7) == pytest.approx(
        [1.0, 0.5, 0.5, 0.25 + root / 2, 0.25, 0.25 - root / 2, 0.25], abs=1e-12
    )
    equal = CosineRestartsSchedule(first_steps=2, length_factor=1.0, height_factor=0.5)
    assert factors(equal, 5) == pytest.approx([1.0, 0.5, 0.5, 0.25, 0.25], abs=1e-12)


def test_a_warm_up_may_begin_with_a_share_or_nothing() -> None:
    assert factors(ConstantSchedule(warmup_steps=4, warmup_from=0.0), 5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert factors(ConstantSchedule(warmup_steps=2, warmup_from=0.5), 3) == [0.5, 0.75, 1.0]


@pytest.mark.parametrize("schedule", ALL)
def test_warm_up_is_linear_and_then_the_curve_begins(schedule: Schedule) -> None:
    warm = schedule.replaced(warmup_steps=4)
    assert factors(warm, 4) == [0.25, 0.5, 0.75, 1.0]
    assert [warm.factor(t) for t in range(5, 20)] == factors(schedule, 15)


@given(schedule=st.sampled_from(ALL), warmup=st.integers(0, 5), t=st.integers(1, 10**9))
def test_every_factor_lies_between_zero_and_one(schedule: Schedule, warmup: int, t: int) -> None:
    assert 0.0 <= schedule.replaced(warmup_steps=warmup).factor(t) <= 1.0


@pytest.mark.parametrize("schedule", ALL)
def test_concrete_schedules_resolve_to_themselves(schedule: Schedule) -> None:
    assert schedule.resolved(3) == schedule


@pytest.mark.parametrize("schedule", [CosineSchedule(warmup_steps=10), ExponentialSchedule(warmup_steps=10, rate=0.5)])
def test_job_is_what_the_warm_up_leaves(schedule: CosineSchedule | ExponentialSchedule) -> None:
    assert schedule.resolved(100).decay_steps == 90
    assert schedule.resolved(11).decay_steps == 1
    with pytest.raises(ConfigurationError, match=r"warmup_steps must be less than the job's 10 updates .*found 10"):
        schedule.resolved(10)
    with pytest.raises(AssertionError, match="comes before factor"):
        schedule.factor(11)


@pytest.mark.parametrize("schedule", [*ALL, CosineSchedule(warmup_steps=2)])
def test_schedules_survive_a_dump(schedule: Schedule) -> None:
    assert validated(ScheduleOptions, schedule.plain()) == schedule


@pytest.mark.parametrize(
    ("table", "where"),
    [
        ({"kind": "linear"}, "linear"),
        ({"kind": "cosine", "decay_steps": "jobs"}, "decay_steps.*an integer >= 1 or \"job\".*found 'jobs'"),
        ({"kind": "cosine", "decay_steps": 0}, "decay_steps.*an integer >= 1"),
        ({"kind": "cosine", "decay_steps": True}, "decay_steps.*an integer >= 1"),
        ({"kind": "cosine", "final_fraction": 1.5}, "final_fraction"),
        ({"kind": "cosine", "epochs": 3}, "epochs"),
        ({"kind": "step", "every_steps": 0, "factor": 0.5}, "every_steps"),
        ({"kind": "step", "every_steps": 5, "factor": 0.0}, "factor"),
        ({"kind": "step", "every_steps": 5, "factor": 2.0}, "factor"),
        ({"kind": "step", "every_steps": 5}, "factor"),
        ({"kind": "exponential", "rate": math.nan}, "rate"),
        ({"kind": "exponential", "rate": 1.1}, "rate"),
        ({"kind": "constant", "warmup_steps": -1}, "warmup_steps"),
    ],
)
def test_errors_name_the_field(table: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){where}"):
        validated(ScheduleOptions, table)
