"""Task: state without gradients is not clipped, and what a model returns for it is checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from parashard.data.base import BadExample, Batch, DataSpec
from parashard.errors import NonFiniteGradient
from parashard.plan.partition import fixed_shards
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Initializer, Variable
from parashard_worker.computing import Task, WrongResult, clip_and_weight
from parashard_worker.device import Cpu
from support.in_process import plan_of, variables_of
from support.loop_cases import BATCH_SIZE, EXAMPLES, Numbered

VARIABLES = variables_of(
    Variable("count", (1, 8), state="counter"),
    Variable("mean", (2,), Initializer("constant", 1.0), state="average:0.5"),
    Variable("weight", (4,)),
)
VALUES = {name: np.zeros(variable.shape, np.float32) for name, variable in VARIABLES.items()}


class Stateful:
    """A model whose gradient has a norm of 2, beside state that is larger."""

    def __init__(self, **returned: Any) -> None:
        self.returned = returned

    def initial_variables(self) -> Mapping[str, Variable]:
        return VARIABLES

    def loss_and_gradients(
        self, variables: Mapping[str, Any], batch: Batch, xp: Any
    ) -> tuple[float, Mapping[str, Any]]:
        count = np.array([[100.0] + [0.0] * 7], np.float32)
        return 0.0, {"count": count, "mean": np.full(2, 50.0), "weight": np.ones(4), **self.returned}

    def evaluate(self, variables: Mapping[str, Any], batch: Batch, xp: Any) -> Mapping[str, float]:
        raise NotImplementedError


def pushed(clip_norm: float | None = None, **returned: Any) -> dict[str, Any]:
    steps = StepPlan(EXAMPLES, BATCH_SIZE, epochs=1, seed=1)
    task = Task(Stateful(**returned), Numbered(), steps, plan_of(VARIABLES), Cpu(), clip_norm, None)
    return task.gradients(task.batch_of(0), VALUES)[2]


def test_clipping_leaves_state_alone() -> None:
    found = pushed(clip_norm=1.0)
    assert found["weight"].tolist() == [0.5] * 4
    assert (found["count"].sum(), found["mean"].tolist()) == (100, [50.0, 50.0])


def test_nothing_to_add_is_zeros() -> None:  # every push that is not empty has the state
    assert pushed(count=None)["count"].tolist() == [[0.0] * 8]
    assert "weight" not in pushed(weight=None)


def test_an_average_needs_the_batch_s_value() -> None:
    with pytest.raises(WrongResult, match="returned None for 'mean'; due is the batch's value: it is an average"):
        pushed(mean=None)


def test_large_finite_gradients_pass_and_others_do_not_whatever_their_layout() -> None:
    variables = {"w": Variable("w", (3, 2))}
    for order in ("C", "F"):
        gradient = np.full((3, 2), 3e38, np.float32, order=order)  # their squares overflow, and their sum
        assert clip_and_weight(0, 1.0, {"w": gradient}, (None, None), variables)["w"] is gradient
        for bad in (np.nan, np.inf, -np.inf):
            gradient[2, 0] = bad
            with pytest.raises(NonFiniteGradient, match="'w' became"):
                clip_and_weight(0, 1.0, {"w": gradient}, (None, None), variables)


def test_each_variable_is_clipped_by_its_own_norm_and_then_all_together() -> None:
    variables = {"w": Variable("w", (2,)), "b": Variable("b", (1,))}
    gradients = {"w": np.array([3.0, 4.0], np.float32), "b": np.array([0.5], np.float32)}
    each = clip_and_weight(0, 1.0, gradients, (None, 1.0), variables)
    assert each["w"].tolist() == pytest.approx([0.6, 0.8])
    assert each["b"] is gradients["b"], "it is within the bound"
    both = clip_and_weight(0, 1.0, gradients, (0.5, 1.0), variables, 2.0)
    norm = math.sqrt(1.0 + 0.25)
    assert both["w"].tolist() == pytest.approx([2 * 0.5 * 0.6 / norm, 2 * 0.5 * 0.8 / norm])
    assert both["b"].tolist() == pytest.approx([2 * 0.5 * 0.5 / norm])


def test_an_error_of_what_is_still_being_computed_is_the_model_s() -> None:
    class Late:
        dtype, shape = np.dtype(np.float32), (4,)

        def block_until_ready(self) -> None:
            raise ValueError("bad thing in a callback")

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            raise AssertionError("it is waited for first")

    with pytest.raises(ValueError, match="bad thing in a callback"):
        pushed(weight=Late())


class Batches:
    """Two batches by index, of 3 and 1 examples; a step's examples have its number."""

    spec = DataSpec(2, 2, (1,), 0, "00", batched=True)
    bad = False

    def examples(self, indices: Any) -> Any:
        raise AssertionError("a step asks for its own")

    def examples_of(self, step: int, indices: Any) -> Any:
        x = np.full((3, 1), np.nan if self.bad else step, np.float32)
        return {"x": x}, (np.arange(3),), np.ones(3, np.float32)

    def held_out(self, start: int, stop: int) -> Any:
        assert stop == start + 1, "one batch at once"
        rows = (3, 1)[start]
        return {"x": np.full((rows, 1), start, np.float32)}, (np.arange(rows),)


class Mean:
    """The gradient is the mean of the inputs."""

    def initial_variables(self) -> Any:
        return {"w": Variable("w", (1,))}

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        assert batch.weights is not None
        return 0.5, {"w": batch.inputs["x"].mean(axis=0)}

    def evaluate(self, variables: Any, batch: Any, xp: Any) -> Any:
        assert batch.weights is None
        return {"mean": float(batch.inputs["x"].mean())}


@pytest.fixture
def task() -> Task:
    plan = plan_of(variables_of(Variable("w", (1,))), shards=1, partitioner=fixed_shards(1))
    return Task(Mean(), Batches(), StepPlan(2, 1, 2, 0), plan, Cpu(), None, None)


def test_a_step_of_a_whole_batch_counts_its_examples(task: Task) -> None:
    _, examples, gradients = task.gradients(task.batch_of(3), {"w": np.zeros(1, np.float32)})
    assert (examples, gradients["w"].tolist()) == (3, [3.0])


def test_batches_are_judged_one_by_one_and_count_by_their_examples(task: Task) -> None:
    assert task.metrics({"w": np.zeros(1, np.float32)}, nullcontext) == {"mean": 0.25}


def test_a_value_that_is_not_finite_is_found_in_a_tree(task: Task) -> None:
    task.source.bad = True  # type: ignore[attr-defined]
    index = task.steps.indices(0)[0]
    with pytest.raises(BadExample, match=f"example 0 of batch {index} of the data has a value that is not finite"):
        task.gradients(task.batch_of(0), {"w": np.zeros(1, np.float32)})
