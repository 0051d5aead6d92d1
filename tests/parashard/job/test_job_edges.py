"""Every number of a job file at its edges: it is refused with its key, or it is one that arithmetic can take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import ValidationError

import parashard.data.options
import parashard.job.model_options
import parashard.job.schema
import parashard.plan.optimizers  # noqa: F401  # these have the tables
from parashard.errors import ConfigurationError
from parashard.frozen_model import FrozenModel, validated
from parashard.job.load import job_from_toml
from parashard.plan.schedules import UPDATES_MAX, CosineSchedule, ExponentialSchedule, StepSchedule
from support.message_edges import NUMBERS
from support.small_job import SMALL_JOB

OWNERS = {
    *(f"parashard.job.{name}" for name in ("embeddings", "schema", "settings", "tables")),
    *("parashard.data.options", "parashard.job.model_options", "parashard.plan.optimizers", "parashard.plan.schedules"),
}
WHOLE = (-(2**63), -1, 0, 1, 10**9, 2**53 + 1, 2**64, 10**400)
ANY_NUMBER = {"seed", "split_seed", "target_loss", "target_mean_squared_error", "noise", "kernel", "shared", "rows"}
"""Keys whose number is only compared or hashed, or is too large for what it asks for, which is told there."""


def tables(base: type[FrozenModel] = FrozenModel) -> Iterator[type[FrozenModel]]:
    for table in base.__subclasses__():
        yield from tables(table)
        if table.__module__ in OWNERS:
            yield table


def number_keys() -> Iterator[Any]:
    for table in sorted(set(tables()), key=lambda table: f"{table.__module__}.{table.__name__}"):
        for name, field in table.model_fields.items():
            if "float" in str(field.annotation) or "int" in str(field.annotation):
                yield pytest.param(
                    Annotated[field.annotation, None, *field.metadata], name, id=f"{table.__name__}.{name}"
                )


@pytest.mark.parametrize(("annotation", "name"), list(number_keys()))
def test_a_number_is_refused_or_one_that_float32_has(annotation: Any, name: str) -> None:
    for value in (*NUMBERS, *WHOLE):
        try:
            taken = validated(annotation, value)
        except ValidationError:
            continue
        if name not in ANY_NUMBER and isinstance(taken, int | float):
            assert np.isfinite(np.float32(taken)), value


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400"])
@pytest.mark.parametrize("key", ["data.noise", "optimizer.learning_rate", "cluster.silence_s", "checkpoint.every_s"])
def test_what_is_no_finite_number_is_refused_with_its_key(key: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=key.replace(".", r"\.")):
        job_from_toml(SMALL_JOB, [(key, float(value), "--set")])


@pytest.mark.parametrize("length", [1, UPDATES_MAX])
def test_the_longest_schedules_have_multipliers(length: int) -> None:
    for schedule in (
        CosineSchedule(decay_steps=length, warmup_steps=length),
        ExponentialSchedule(decay_steps=length, rate=5e-324),
        StepSchedule(every_steps=length, factor=5e-324),
    ):
        for update in (1, length, length + 1, 2**63):
            assert 0.0 <= schedule.factor(update) <= 1.0
            assert math.isfinite(schedule.factor(update))


@pytest.mark.parametrize("key", ["decay_steps", "warmup_steps"])
def test_a_longer_schedule_is_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"optimizer.schedule.{key}"):
        job_from_toml(SMALL_JOB, [("optimizer.schedule", {"kind": "cosine", key: UPDATES_MAX + 1}, "--set")])
