"""The optimizer hands its kernel the right numbers: rate, decay, slots, t; and leaves frozen variables alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parashard.plan.optimizers import (
    SGD,
    Momentum,
    OptimizerSpec,
)
from parashard.plan.schedules import StepSchedule
from parashard.plan.variables import Variable
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer
from support import reference_rules as reference
from support.optimizer_specs import SPECS

VARIABLE = Variable("w", (40,))


def updated(
    spec: OptimizerSpec, *, kernels: Any = fused, variable: Variable = VARIABLE, t: int = 3
) -> list[np.ndarray]:
    """Return [weights, *slots] after one update of drawn weights."""
    rng = np.random.default_rng(5)
    weights, gradient = rng.standard_normal((2, 40)).astype(np.float32)
    optimizer = Optimizer(spec, kernels)
    slots = {name: np.full(40, optimizer.initial_values[name], np.float32) for name in optimizer.slots}
    optimizer.update(weights, gradient, slots, t=t, scale=0.5, variable=variable)
    return [weights, *slots.values()]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", SPECS)
def test_slots_and_their_initial_values(kind: str) -> None:
    spec, slots = SPECS[kind]
    optimizer = Optimizer(spec)
    assert optimizer.slots == slots
    assert spec.slots == slots
    assert optimizer.initial_values == dict.fromkeys(slots, 0.25 if kind == "adagrad" else 0.0)


@pytest.mark.parametrize("kind", SPECS)
def test_reference_and_fused_agree_through_the_optimizer(kind: str) -> None:
    spec = SPECS[kind][0]
    assert same(updated(spec), updated(spec, kernels=reference))


@pytest.mark.parametrize("kind", SPECS)
def test_a_frozen_variable_is_untouched(kind: str) -> None:
    spec, slots = SPECS[kind]
    initial = Optimizer(spec).initial_values
    weights, *state = updated(spec, variable=Variable("w", (40,), frozen=True))
    np.testing.assert_array_equal(weights, np.random.default_rng(5).standard_normal((2, 40)).astype(np.float32)[0])
    for slot, array in zip(slots, state, strict=True):
        np.testing.assert_array_equal(array, np.float32(initial[slot]))
    assert not same(updated(spec), [weights, *state])


@pytest.mark.parametrize("kind", SPECS)
def test_decay_false_means_no_regularisation(kind: str) -> None:
    spec = SPECS[kind][0]
    off: dict[str, float] = {"weight_decay": 0.0} | ({"l1": 0.0, "l2": 0.0} if kind == "ftrl" else {})
    bias = Variable("b", (40,), decay=False)
    assert same(updated(spec, variable=bias), updated(spec.replaced(**off)))
    assert not same(updated(spec, variable=bias), updated(spec))


@pytest.mark.parametrize("kind", SPECS)
def test_the_rate_is_a_product(kind: str) -> None:
    spec = SPECS[kind][0]
    scheduled = spec.replaced(schedule=StepSchedule(every_steps=2, factor=0.5))
    quarter = spec.replaced(learning_rate=spec.learning_rate / 4)
    quick = Variable("w", (40,), learning_rate_factor=0.5)
    assert same(updated(scheduled, variable=quick, t=3), updated(quarter, t=3))
    assert not same(updated(spec), updated(quarter))


@pytest.mark.parametrize("kind", SPECS)
def test_t_is_an_argument_and_no_counter(kind: str) -> None:
    spec = SPECS[kind][0]
    optimizer = Optimizer(spec)
    results = []
    for _ in range(2):
        weights, gradient = np.random.default_rng(5).standard_normal((2, 40)).astype(np.float32)
        slots = {name: np.full(40, value, np.float32) for name, value in optimizer.initial_values.items()}
        optimizer.update(weights, gradient, slots, t=3, scale=0.5, variable=VARIABLE)
        results.append([weights, *slots.values()])
    assert same(*results)
    assert same(updated(spec, t=9), updated(spec, t=3)) == (kind not in ("adam", "adamw", "lamb"))


def test_clip_value_bounds_each_element() -> None:
    weights = np.zeros(3, np.float32)
    Optimizer(SGD(learning_rate=1.0, clip_value=0.5)).update(
        weights, np.array([4.0, -4.0, 0.25], np.float32), {}, t=1, scale=1.0, variable=VARIABLE
    )
    assert weights.tolist() == [-0.5, 0.5, -0.25]
    Optimizer(SGD(learning_rate=1.0)).update(
        weights, np.array([4.0, 0.0, 0.0], np.float32), {}, t=1, scale=1.0, variable=VARIABLE
    )
    assert weights.tolist() == [-4.5, 0.5, -0.25]


def test_an_empty_push_moves_moments() -> None:  # P15
    weights, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    slots = {"velocity": np.ones(4, np.float32)}
    optimizer = Optimizer(Momentum(learning_rate=1.0, momentum=0.5))
    optimizer.update(weights, zeros, slots, t=2, scale=1.0, variable=VARIABLE)
    assert weights.tolist() == [0.5] * 4
    assert slots["velocity"].tolist() == [0.5] * 4


@pytest.mark.parametrize("kind", SPECS)
def test_warm_up_calls_the_kernel_once_on_nothing(kind: str) -> None:
    spec, slots = SPECS[kind]
    calls = []

    def update(rule: str, values: Any, *vectors: np.ndarray) -> None:
        calls.append((rule, [vector.size for vector in vectors]))
        fused.update(rule, values, *vectors)

    Optimizer(spec, SimpleNamespace(update=update)).warm_up()
    assert calls == [(kind, [0] * (2 + len(slots)))]
