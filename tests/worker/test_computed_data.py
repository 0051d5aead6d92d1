"""What of the data a task computes with: trees, weights, batches by index, and examples of a step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from parashard.data.base import BadExample, DataSpec
from parashard.plan.partition import fixed_shards
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Variable
from parashard_worker.computing import Task
from parashard_worker.device import Cpu
from support.in_process import plan_of, variables_of


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
