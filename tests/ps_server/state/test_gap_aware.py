"""Gap-Aware: a push is divided by how far the weights have moved since its own pull, in mean steps."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import NonFiniteGradient
from parashard.plan.optimizers import SGD, Adam, AdamW, Momentum, OptimizerSpec
from parashard.plan.variables import Initializer, Variable
from parashard_server.core.shard import Shard
from parashard_server.state.kernels import fused, reference
from parashard_server.state.optimizer import Before, Optimizer
from parashard_server.state.pulled_weights import PulledWeights
from support.in_process import plan_of, pull, push, push_for, shard_of, state_of, variables_of
from support.kernel_cases import assert_same_bits, drawn

ADDING = SGD(learning_rate=-1.0, gap_aware=True)
"""Adds every gradient, divided by its gap, to the weights."""


def gap_aware(spec: OptimizerSpec = ADDING, **more: Any) -> Shard:
    return shard_of(plan_of(variables_of(Variable("w", (4,), Initializer("constant", 0.0)))), spec=spec, **more)


def test_a_gradient_is_divided_by_the_mean_steps_since_its_pull() -> None:
    shard = gap_aware()
    for step in (2, 3):
        pull(shard, step=step)
    push(shard, 0, 3.0)  # its own pull is unknown
    push(shard, 1, 1.0)
    push(shard, 2, 6.0, pulled_version=0)  # w moved by 4, in steps of 2: 6 / (1 + 4 / 2)
    assert pull(shard)[1].tolist() == [4.0 + 2.0] * 4
    assert shard.storage.slots["distance"].tolist() == [6.0] * 4
    push(shard, 3, 8.0, pulled_version=0)  # 6 in steps of 2: 8 / (1 + 6 / 2)
    assert pull(shard)[1].tolist() == [8.0] * 4


class Equation:
    """v = gamma v + g / G; w = w - eta v; G = 1 + |w - w_pulled| / C, C the mean |step| of each weight so far."""

    def __init__(self, weights: np.ndarray, eta: float, gamma: float) -> None:
        self.weights, self.eta, self.gamma = weights.astype(np.float64), eta, gamma
        self.velocity = self.steps = np.zeros(len(weights))
        self.count = 0

    def push(self, gradient: np.ndarray, pulled: np.ndarray) -> None:
        mean = self.steps / max(1, self.count)
        gap = 1 + np.abs(self.weights - pulled) / np.maximum(mean, 1e-12) if self.count else 1.0
        self.velocity = self.gamma * self.velocity + gradient / gap
        self.weights = self.weights - self.eta * self.velocity
        self.steps, self.count = self.steps + np.abs(self.eta * self.velocity), self.count + 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 9))
def test_a_shard_follows_the_equation_whatever_the_order_of_workers(order: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    variable = Variable("w", (6,), Initializer("normal", 1.0))
    shard = shard_of(plan_of(variables_of(variable)), spec=Momentum(0.1, momentum=0.9, gap_aware=True), steps=100)
    equation = Equation(shard.storage.weights, 0.1, 0.9)
    held = {worker: (worker, *pull(shard, step=worker), equation.weights) for worker in range(4)}
    for number, worker in enumerate(order, 4):
        step, version, _, pulled = held[worker]
        gradient = rng.standard_normal(6).astype(np.float32)
        push(shard, step, gradient, pulled_version=version)
        equation.push(gradient, pulled)
        held[worker] = (number, *pull(shard, step=number), equation.weights)
    np.testing.assert_allclose(shard.storage.weights, equation.weights, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(shard.storage.slots["distance"], equation.steps, rtol=1e-3)


@pytest.mark.parametrize("kernels", [fused, reference])
@pytest.mark.parametrize(
    "spec",
    [AdamW(0.1, weight_decay=0.5, gap_aware=True), Momentum(0.1, weight_decay=0.5, decoupled_weight_decay=True)],
    ids=["adamw", "decoupled"],
)
def test_a_step_is_all_that_an_update_moves(kernels: Any, spec: OptimizerSpec) -> None:
    optimizer = Optimizer(spec.replaced(gap_aware=True), kernels)
    weights, gradient = np.random.default_rng(1).standard_normal((2, 9)).astype(np.float32)
    slots = {name: np.zeros(9, np.float32) for name in optimizer.slots}
    expected = np.zeros(9, np.float32)
    for t in (1, 2):
        before = weights.copy()
        optimizer.update(weights, gradient, slots, t=t, scale=1.0, variable=Variable("w", (9,)))
        expected += np.abs(before - weights)
    assert_same_bits([slots["distance"]], [expected])
    assert (expected > 0).all()


@pytest.mark.parametrize("size", [0, 1, 7, 1000, 4099])
def test_fused_and_reference_give_the_same_bits(size: int) -> None:
    results = []
    for kernels in (fused, reference):
        gradient, distance = drawn(1, size), np.abs(drawn(2, size))
        kernels.divide_by_gap(gradient, drawn(3, size), drawn(4, size), distance, 7.0)
        kernels.add_distance(distance, drawn(3, size), drawn(4, size))
        results.append([gradient, distance])
    assert_same_bits(*results)


@pytest.mark.parametrize("kernels", [fused, reference])
def test_a_weight_that_never_moved_has_no_gap(kernels: Any) -> None:
    gradient, weights = np.array([2.0, 2.0], np.float32), np.array([5.0, 5.0], np.float32)
    kernels.divide_by_gap(gradient, weights, np.array([5.0, 4.0], np.float32), np.array([0.0, 8.0], np.float32), 4.0)
    assert gradient.tolist() == [2.0, np.float32(2.0 / 1.5)]


def test_updates_before_a_job_count() -> None:
    optimizer = Optimizer(ADDING, before=Before(state=3))
    gradient, weights = np.full(1, 3.0, np.float32), np.full(1, 2.0, np.float32)
    optimizer.divide_by_gap(gradient, weights, np.zeros(1, np.float32), {"distance": np.full(1, 4.0, np.float32)}, 1)
    assert gradient.tolist() == [1.0], "4 in 4 updates: 3 / (1 + 2 / 1)"


def test_before_the_first_update_and_for_a_fresh_push_the_gap_is_one() -> None:
    shard = gap_aware()
    pull(shard, step=0)
    push(shard, 0, 2.0, pulled_version=0)
    pull(shard, step=1)
    push(shard, 1, 2.0, pulled_version=1)
    assert pull(shard)[1].tolist() == [4.0] * 4


def test_without_a_known_version_a_push_is_applied_as_it_is() -> None:  # P16
    shard = gap_aware()
    pull(shard, step=1)
    push(shard, 0, 3.0)
    push(shard, 1, 2.0, pulled_version=None)
    assert pull(shard)[1].tolist() == [5.0] * 4


def test_the_oldest_copy_is_forgotten() -> None:
    shard = gap_aware(copies=2)
    for step in (1, 2, 3):
        pull(shard, step=step)
    push(shard, 0, 3.0)
    push(shard, 1, 3.0, pulled_version=0)  # forgotten: as it is
    assert pull(shard)[1].tolist() == [6.0] * 4
    push(shard, 2, 3.0, pulled_version=0)  # kept: 3 / (1 + 6 / 3)
    assert pull(shard)[1].tolist() == [7.0] * 4


def test_a_pull_for_no_step_keeps_nothing() -> None:
    shard = gap_aware(copies=1)
    pull(shard, step=1)
    pull(shard)  # an evaluation
    push(shard, 0, 3.0)
    push(shard, 1, 2.0, pulled_version=0)
    assert pull(shard)[1].tolist() == [4.0] * 4


def test_weights_that_overflow_are_no_reason_for_a_gradient_that_is_not_finite() -> None:  # P14
    shard = gap_aware(SGD(learning_rate=-1e15, gap_aware=True))
    pull(shard, step=1)
    push(shard, 0, 1e38)
    before = state_of(shard)
    for _ in range(2):
        with pytest.raises(NonFiniteGradient):
            push(shard, 1, 1.0, pulled_version=0)
        assert state_of(shard) == before


def test_a_step_that_is_in_keeps_no_copy() -> None:
    shard = gap_aware(copies=1)
    pull(shard, step=0)
    push(shard, 0, 1.0, pulled_version=0)
    pull(shard, step=0)  # a second worker, which computes the step again
    push(shard, 0, 1.0, pulled_version=1)
    assert shard._pulled is not None
    assert shard._pulled.of(0, 1) is None


def test_copies_are_put_together_from_runs_and_are_copies() -> None:
    pulled, values = PulledWeights(4, 2), np.arange(4, dtype=np.float32)
    pulled.keep(7, 5, 2, values[2:])
    assert pulled.of(7, 5) is None  # half of it is not here yet
    pulled.keep(7, 6, 0, values[:2])
    values[:] = -1.0
    copy = pulled.of(7, 5)  # the lowest version of its runs
    assert copy is not None
    assert copy.tolist() == [0.0, 1.0, 2.0, 3.0]
    pulled.forget(7)
    pulled.forget(7)
    assert pulled.of(7, 5) is None


def test_the_push_itself_is_only_read() -> None:
    shard = gap_aware()
    pull(shard, step=1)
    push(shard, 0, 3.0)
    request = push_for(shard, 1, np.full(4, 2.0), pulled_version=0)
    shard.push(request)
    assert np.frombuffer(request.payload.whole(), "<f4").tolist() == [2.0] * 4


def test_after_the_warm_up_a_push_loads_nothing() -> None:
    shard = gap_aware(Adam(gap_aware=True))
    fused._function.cache_clear()
    fused.warm_up()
    shard.storage._optimizer.warm_up()
    loaded = fused._function.cache_info().misses
    pull(shard, step=1)
    push(shard, 0, 3.0)
    push(shard, 1, 3.0, pulled_version=0)
    assert fused._function.cache_info().misses == loaded > 0
