"""RoundWeights: in the mean of a round each example weighs the same, whatever the sizes of its steps."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.data.base import DataSpec
from parashard.job.load import job_from_toml
from parashard.plan.partition import fixed_shards
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Variable
from parashard_worker.computing import Task, WrongResult, clip_and_weight
from parashard_worker.device import Cpu
from parashard_worker.round_weights import RoundWeights, round_weights
from support.in_process import plan_of, variables_of
from support.small_job import SMALL_JOB


class Batches:
    """Batches of the given sizes, by index; an example of batch i is the number i."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.spec = DataSpec(len(sizes), 0, (1,), 0, "00", batched=True)

    def examples(self, indices: Any) -> Any:
        rows = self.sizes[indices[0]]
        return np.full((rows, 1), indices[0], np.float32), np.zeros(rows, np.int64)

    def held_out(self, start: int, stop: int) -> Any:
        raise AssertionError("none is held out")


class Mean:
    """The gradient of weight i is how much batch i weighs."""

    def initial_variables(self) -> Any:
        return {"w": Variable("w", (3,)), "seen": Variable("seen", (1,), state="sum")}

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        gradient = np.bincount(batch.inputs[:, 0].astype(int), minlength=3) / len(batch.inputs)
        return 0.5, {"w": gradient, "seen": np.ones(1)}


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 7), st.integers(1, 3))
def test_each_example_weighs_the_same(examples: int, batch_size: int, round_steps: int, epochs: int) -> None:
    steps = StepPlan(examples, batch_size, epochs, seed=0)
    weights = RoundWeights(steps, round_steps)
    for first in range(0, steps.total, round_steps):
        of_round = range(first, min(first + round_steps, steps.total))
        in_all = sum(len(steps.indices(step)) for step in of_round)
        for step in of_round:
            size = len(steps.indices(step))
            assert steps.size(step) == size
            weighs = Fraction(weights.factor(step)) / size / len(of_round)
            assert abs(weighs - Fraction(1, in_all)) < Fraction(1, 10**12)
            if in_all == size * len(of_round):
                assert weights.factor(step) == 1.0, "equal steps keep their bits"


def test_only_the_mean_of_several_steps_is_weighed() -> None:
    steps = StepPlan(5, 2, 1, seed=0)
    weighed = {}
    for policy, reduce in (("sync:2", "mean"), ("sync:1", "mean"), ("sync:2", "sum"), ("async", "mean")):
        job = job_from_toml(
            SMALL_JOB,
            [(f"consistency.{key}", value, "test") for key, value in (("policy", policy), ("reduce", reduce))],
        )
        weighed[policy, reduce] = round_weights(job, steps) is not None
    assert [key for key, value in weighed.items() if value] == [("sync:2", "mean")]


def test_batches_weigh_by_their_examples() -> None:
    assert np.array(pushed(Batches(4, 4, 2))) == pytest.approx(np.array([[0.4, 0.4, 0.2]] * 2))


def test_batches_of_several_sizes_are_refused() -> None:
    with pytest.raises(WrongResult, match="batch 1 of the data has 3 examples and the first has 4: in rounds of 3"):
        pushed(Batches(4, 3, 2))


def pushed(source: Batches) -> list[list[float]]:
    """Return the mean gradient of each epoch's round; state is never weighed."""
    steps = StepPlan(3, 1, 2, 0)
    plan = plan_of(variables_of(*Mean().initial_variables().values()), shards=1, partitioner=fixed_shards(1))
    model: Any = Mean()
    task = Task(model, source, steps, plan, Cpu(), None, 3, weights=RoundWeights(steps, 3, source))
    means = []
    for first in (0, 3):
        gradients = [task.gradients(task.batch_of(step), {})[2] for step in range(first, first + 3)]
        assert [found["seen"].tolist() for found in gradients if found] == [[1.0]] * 3
        means.append(sum(found["w"] for found in gradients if found) / 3)
    return [mean.tolist() for mean in means]


def test_a_step_is_clipped_before_it_is_weighed_and_rows_of_tables_are_weighed_too() -> None:
    variables = {"w": Variable("w", (4,)), "seen": Variable("seen", (1,), state="sum")}
    gradients = {name: np.ones(shape, np.float32) for name, shape in (("w", 2), ("rows", (2, 1)), ("seen", 1))}
    found = clip_and_weight(0, 1.0, gradients, (1.0, None), variables, 0.5)
    assert [found[name].ravel().tolist() for name in ("w", "rows", "seen")] == [[0.25] * 2, [0.25] * 2, [1.0]]
