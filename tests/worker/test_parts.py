"""Parts: the sum over the parts of a batch of share * gradient is the gradient of the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.data.base import DataSpec
from parashard.data.tree import rows_of
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Variable
from parashard_worker.computing import Task, read_step
from parashard_worker.device import Cpu
from support.in_process import plan_of, variables_of


class Rows:
    """Example i has the input i + 1 and the class i % 3; `batch` examples are an item where `batched`."""

    def __init__(self, examples: int, sizes: list[int] | None = None) -> None:
        self.sizes = sizes
        self.reads: list[int] = []
        spec = {"batched": True} if sizes is not None else {}
        self.spec = DataSpec(examples if sizes is None else len(sizes), 0, (1,), 3, "00", **spec)

    def examples(self, indices: Any) -> Any:
        if self.sizes is not None:
            first = sum(self.sizes[: indices[0]])
            indices = np.arange(first, first + self.sizes[indices[0]])
        self.reads.append(len(indices))
        return (indices[:, None] + 1).astype(np.float32), (indices % 3).astype(np.int64)

    def held_out(self, start: int, stop: int) -> Any:
        raise AssertionError("none is held out")


class MeanModel:
    """The gradient of entry i is the mean over the examples of class i."""

    def initial_variables(self) -> Any:
        return {"w": Variable("w", (3,)), "seen": Variable("seen", (1,), state="sum")}

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        divisor = self.divisor(batch)
        if not divisor:
            return np.nan, {"w": np.full(3, np.nan), "seen": np.ones(1)}
        weighed = batch.inputs[:, 0] * self.weights[batch.targets]
        return 0.5, {"w": np.bincount(batch.targets, weighed, minlength=3) / divisor, "seen": np.ones(1)}

    weights = np.ones(3)

    def divisor(self, batch: Any) -> float:
        return len(batch.targets)


class SumModel(MeanModel):
    """The gradients of the examples, added up."""

    adds_losses = True

    def divisor(self, batch: Any) -> float:
        return 1.0


class WeighedModel(MeanModel):
    """A mean over the weights of the classes, of which class 0 counts nothing, as in a PyTorch loss."""

    weights = np.array([0.0, 1.0, 2.5])

    def divisor(self, batch: Any) -> float:
        return float(self.weights[batch.targets].sum())

    def share(self, piece: Any, whole: Any) -> float:
        return self.divisor(piece) / (self.divisor(whole) or np.nan)

    def counts_rows(self, piece: Any) -> bool:
        return False


MODELS = (MeanModel, SumModel, WeighedModel)


def of_batch(model: Any, source: Rows, steps: StepPlan, first: int) -> list[dict[str, Any] | None]:
    """Return what each part of a batch pushes."""
    plan = plan_of(variables_of(*model.initial_variables().values()))
    task = Task(model, source, steps, plan, Cpu(), None, None)
    return [task.gradients(task.batch_of(step), {})[2] for step in range(first, first + steps.parts)]


def whole_gradient(model: Any, source: Rows, steps: StepPlan, first: int) -> Any:
    whole = replace(steps, parts=1)
    return model.loss_and_gradients({}, read_step(model, source, whole, first // steps.parts), np)[1]["w"]


def check(model: Any, source: Rows, steps: StepPlan) -> None:
    for first in range(0, steps.total, steps.parts):
        expected = whole_gradient(model, source, steps, first)
        if np.isnan(expected).any():  # nothing counts in the whole batch: that is so on one machine, too
            continue
        pushed = of_batch(model, source, steps, first)
        found = sum(gradients.get("w", np.zeros(3)) for gradients in pushed if gradients is not None)
        assert found == pytest.approx(expected, rel=1e-5)
        seen = [gradients["seen"].tolist() for gradients in pushed if gradients]
        assert set(map(tuple, seen)) == {(1.0,)}, "state is not weighed"


@given(
    st.sampled_from(MODELS), st.integers(1, 50), st.integers(1, 24), st.integers(1, 6), st.integers(0, 3), st.booleans()
)
def test_the_parts_of_a_batch_are_its_gradient(
    model: type[MeanModel], examples: int, batch_size: int, parts: int, seed: int, shuffle: bool
) -> None:
    steps = StepPlan(examples, batch_size, 2, seed, parts=parts, shuffle=shuffle)
    check(model(), Rows(examples), steps)


@given(st.sampled_from(MODELS), st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 6))
def test_so_are_those_of_a_batch_that_the_data_made(model: type[MeanModel], sizes: list[int], parts: int) -> None:
    check(model(), Rows(0, sizes), StepPlan(len(sizes), 1, 1, 0, parts=parts, batched=True))


def test_a_part_of_a_short_batch_may_be_empty_and_pushes_nothing() -> None:
    steps = StepPlan(18, 16, 1, 0, parts=4)  # the last batch has 2 examples: one part
    source = Rows(18)
    batches = [read_step(MeanModel(), source, steps, step) for step in range(4, 8)]
    assert [rows_of(batch.inputs) for batch in batches] == [2, 0, 0, 0]
    assert of_batch(MeanModel(), source, steps, 4)[1:] == [{}, {}, {}]


def test_a_part_of_which_no_example_counts_pushes_nothing() -> None:
    steps = StepPlan(8, 8, 1, 0, parts=2, shuffle=False)

    class SecondHalf(WeighedModel):
        def divisor(self, batch: Any) -> float:
            return float((batch.inputs > 4).sum())

    first, second = of_batch(SecondHalf(), Rows(8), steps, 0)
    assert first == {}, "its own loss is NaN, and the batch's is not"
    assert second is not None
    assert np.isfinite(second["w"]).all()


def test_of_a_batch_in_which_no_example_counts_no_part_pushes_anything() -> None:
    class Uncounted(WeighedModel):
        def share(self, piece: Any, whole: Any) -> float:
            return float("nan")  # none of none

    steps = StepPlan(16, 8, 1, 1, parts=2)
    assert [rows_of(read_step(Uncounted(), Rows(16), steps, step).inputs) for step in (0, 1)] == [0, 0]


def test_only_the_examples_of_the_part_are_read_where_they_say_all() -> None:
    steps = StepPlan(32, 16, 1, 0, parts=4)
    mean, weighed = Rows(32), Rows(32)
    read_step(MeanModel(), mean, steps, 1)
    read_step(WeighedModel(), weighed, steps, 1)
    assert mean.reads == [4]
    assert weighed.reads[-1] == 16


def test_every_part_of_a_batch_that_is_drawn_at_random_is_cut_of_the_same_one() -> None:
    class Drawn(Rows):
        def examples_of(self, step: int, indices: Any) -> Any:
            inputs, targets = self.examples(indices)
            return np.random.default_rng(step).permutation(inputs), targets

    steps = StepPlan(2, 1, 1, 0, parts=3, shuffle=False, batched=True)
    found = [read_step(MeanModel(), Drawn(0, [12, 13]), steps, step).inputs for step in range(6)]
    assert sorted(np.concatenate(found)[:, 0].tolist()) == list(range(1, 26))
