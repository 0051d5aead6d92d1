"""Optimizer specifications: defaults, bounds and their messages, and which need whole variables."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from parashard.errors import ConfigurationError
from parashard.frozen_model import validated
from parashard.plan.optimizers import (
    FTRL,
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Momentum,
    Nesterov,
    OptimizerOptions,
    OptimizerSpec,
    RMSProp,
)
from parashard.plan.schedules import CosineSchedule

KINDS: dict[str, type[OptimizerSpec]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "nesterov": Nesterov,
    "adagrad": Adagrad,
    "rmsprop": RMSProp,
    "adam": Adam,
    "adamw": AdamW,
    "ftrl": FTRL,
    "lamb": LAMB,
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind_selects_the_class(kind: str) -> None:
    spec = validated(OptimizerOptions, {"kind": kind, "learning_rate": 0.1, "schedule": {"kind": "cosine"}})
    assert type(spec) is KINDS[kind]
    assert isinstance(spec.schedule, CosineSchedule)
    assert validated(OptimizerOptions, spec.plain()) == spec


def test_defaults_are_the_papers() -> None:
    assert Momentum(learning_rate=0.1).momentum == Nesterov(learning_rate=0.1).momentum == 0.9
    for spec in (Adam(), AdamW()):
        assert (spec.learning_rate, spec.beta1, spec.beta2, spec.epsilon) == (0.001, 0.9, 0.999, 1e-8)
    assert (RMSProp().rho, FTRL(learning_rate=0.1).beta, LAMB(learning_rate=0.1).epsilon) == (0.9, 1.0, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_on_unless_asked_for(kind: str) -> None:
    spec = KINDS[kind](learning_rate=0.1)
    assert spec.weight_decay == (0.01 if kind in ("adamw", "lamb") else 0.0)
    assert (spec.clip_value, spec.clip_norm) == (None, None)
    assert spec.schedule.factor(10**6) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_only_lamb_needs_whole_variables(kind: str) -> None:
    assert KINDS[kind](learning_rate=0.1).requires_unsplit_variables == (kind == "lamb")


@pytest.mark.parametrize("kind", KINDS)
def test_only_sgd_may_ascend(kind: str) -> None:
    if kind == "sgd":
        assert validated(SGD, {"learning_rate": -1}).learning_rate == -1.0
    else:
        with pytest.raises(ValidationError, match=r"(?s)learning_rate.*between 1e-30 and 1e\+15, found -1.0"):
            validated(KINDS[kind], {"learning_rate": -1.0})


def test_the_identity_of_a_job_is_that_of_earlier_versions() -> None:
    plain = Adam().identity()
    assert (plain["staleness_damping"], plain["delay_compensation"]) == ("none", 0.0)


@pytest.mark.parametrize("removed", [{"staleness_damping": "inverse"}, {"delay_compensation": 0.0}])
def test_a_setting_that_was_removed_is_refused_with_what_to_use(removed: dict[str, Any]) -> None:
    says = rf'^ps\.Adam has no {next(iter(removed))}=; it was removed, .* use consistency "auto"$'
    with pytest.raises(ConfigurationError, match=says):
        Adam(**removed)


def test_resolved_fills_in_the_schedule() -> None:
    spec = Adam(schedule=CosineSchedule(warmup_steps=5)).resolved(20)
    assert spec.schedule == CosineSchedule(warmup_steps=5, decay_steps=15)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [1e300, 1e20])
def test_no_setting_overflows_float32(kind: str, value: float) -> None:
    settings = KINDS[kind](learning_rate=0.1).plain()
    numbers = [name for name, default in settings.items() if isinstance(default, float)]
    for name in [*numbers, "clip_value", "clip_norm"]:
        with pytest.raises(ValidationError, match=name):
            validated(KINDS[kind], {"learning_rate": 0.1} | {name: value})


@pytest.mark.parametrize("kind", ["adagrad", "rmsprop", "adam", "adamw", "lamb"])
def test_no_epsilon_rounds_to_zero(kind: str) -> None:
    with pytest.raises(ValidationError, match="epsilon"):
        validated(KINDS[kind], {"learning_rate": 0.1, "epsilon": 1e-50})


def test_specs_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Adam().learning_rate = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("table", "where", "allowed"),
    [
        (
            {"kind": "adamm"},
            "adamm",
            "'sgd', 'momentum', 'nesterov', 'adagrad', 'rmsprop', 'adam', 'adamw', 'ftrl', 'lamb'",
        ),
        ({"kind": "sgd"}, "learning_rate", "required"),
        (
            {"kind": "sgd", "learning_rate": 1e-40},
            "learning_rate",
            r"0, or between 1e-30 and 1e\+15 or the negative .*found 1e-40",
        ),
        ({"kind": "sgd", "learning_rate": math.nan}, "learning_rate", "finite number"),
        ({"kind": "sgd", "learning_rate": -math.inf}, "learning_rate", "finite number"),
        ({"kind": "sgd", "learning_rate": 1e300}, "learning_rate", r"1e\+15.*found 1e\+300"),
        ({"kind": "sgd", "learning_rate": "fast"}, "learning_rate", "valid number"),
        ({"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9}, "momentum", "not permitted"),
        ({"kind": "momentum", "learning_rate": 0.1, "momentum": 1.0}, "momentum", "less than 1"),
        ({"kind": "adam", "beta2": 1.0}, "beta2", "less than 1"),
        ({"kind": "adam", "epsilon": 0.0}, "epsilon", "between 1e-30 and"),
        ({"kind": "adam", "weight_decay": -0.1}, "weight_decay", "between 0 and.*found -0.1"),
        ({"kind": "adam", "clip_value": 0.0}, "clip_value", "between 1e-30 and"),
        ({"kind": "adam", "clip_norm": -1.0}, "clip_norm", "between 1e-30 and"),
        (
            {"kind": "adagrad", "learning_rate": 0.1, "initial_accumulator": -1.0},
            "initial_accumulator",
            "between 0 and",
        ),
        ({"kind": "ftrl", "learning_rate": 0.1, "beta": 0.0}, "beta", "between 1e-30 and"),
        ({"kind": "adam", "schedule": {"kind": "cosine", "decay_steps": 0}}, "schedule.*decay_steps", "integer >= 1"),
    ],
)
def test_errors_name_the_field_and_what_is_allowed(table: dict[str, Any], where: str, allowed: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){where}.*{allowed}"):
        validated(OptimizerOptions, table)
