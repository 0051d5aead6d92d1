"""What a model returns at the edges of numbers: each is pushed and told as it is, or refused; none ends a worker."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from parashard.data.base import DataSpec
from parashard.errors import NonFiniteGradient
from parashard.plan.partition import fixed_shards
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Variable
from parashard_worker.computing import Task, WrongResult
from parashard_worker.device import Cpu
from support.in_process import plan_of, variables_of

NOT_FINITE, WRONG = NonFiniteGradient, WrongResult
TINY, HUGE = 1e-320, 1e308


class Two:
    """Two examples, and two held out."""

    spec = DataSpec(2, 2, (1,), 0, "00")

    def examples(self, indices: Any) -> Any:
        return np.zeros((len(indices), 1), np.float32), np.zeros(len(indices), np.float32)

    def held_out(self, start: int, stop: int) -> Any:
        return self.examples(range(start, stop))


class Returning:
    """Returns a loss, a gradient and a figure."""

    def __init__(self, loss: Any = 0.5, gradient: Any = 1.0, figure: Any = 0.5) -> None:
        self.loss, self.gradient, self.figure = loss, gradient, figure

    def initial_variables(self) -> Any:
        return {"w": Variable("w", (2,))}

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        return self.loss, {"w": self.gradient}

    def evaluate(self, variables: Any, batch: Any, xp: Any) -> Any:
        return {"loss": self.figure}


def task_of(**returned: Any) -> Task:
    model: Any = Returning(**returned)
    plan = plan_of(variables_of(*model.initial_variables().values()), shards=1, partitioner=fixed_shards(1))
    return Task(model, Two(), StepPlan(2, 2, 1, 0), plan, Cpu(), None, 1)


def computed(**returned: Any) -> Any:
    task = task_of(**returned)
    return task.gradients(task.batch_of(0), {"w": np.zeros(2, np.float32)})


LOSSES: list[tuple[Any, Any]] = [
    (math.nan, math.nan),
    (math.inf, math.inf),
    (-math.inf, -math.inf),
    (HUGE, HUGE),
    (-HUGE, -HUGE),
    (TINY, TINY),
    (-0.0, 0.0),
    (np.float64(0.5), 0.5),
    (np.ones((), np.float16), 1.0),
    (np.ones(1, np.float32), 1.0),
    (2, 2.0),
    (True, 1.0),
    (2**80, float(2**80)),
    (2**2000, WRONG),
    (None, WRONG),
    ("0.5", WRONG),
    (1j, WRONG),
    ([0.5], WRONG),
    (np.ones(2, np.float32), WRONG),
    (np.datetime64("2026-01-01"), WRONG),
]


@pytest.mark.parametrize(("loss", "due"), LOSSES, ids=[repr(loss)[:24] for loss, _ in LOSSES])
def test_a_loss(loss: Any, due: Any) -> None:
    if due is WRONG:
        with pytest.raises(WRONG):
            computed(loss=loss, gradient=np.ones(2, np.float32))
        return
    found, examples, gradients = computed(loss=loss, gradient=np.ones(2, np.float32))
    assert found == pytest.approx(due, nan_ok=True)
    assert (examples, gradients["w"].tolist()) == (2, [1.0, 1.0])


def pair(value: Any, dtype: Any = np.float64) -> Any:
    return np.array([1, value], dtype)


GRADIENTS: list[tuple[Any, Any]] = [
    (pair(math.nan), NOT_FINITE),
    (pair(math.inf), NOT_FINITE),
    (pair(-math.inf), NOT_FINITE),
    (pair(HUGE), NOT_FINITE),
    (pair(TINY), [1.0, 0.0]),
    (pair(1e-45), [1.0, 1e-45]),
    (pair(3e38), [1.0, 3e38]),
    (pair(-2, np.int64), WRONG),
    (pair(True, bool), WRONG),
    (pair(0.5, np.float16), [1.0, 0.5]),
    (pair(1j, np.complex64), WRONG),
    (pair("1", object), WRONG),
    (pair(2, "datetime64[s]"), WRONG),
    (np.ones(3, np.float32), WRONG),
    (np.ones((1, 2), np.float32), WRONG),
    (1.0, WRONG),
    ("w", WRONG),
]


@pytest.mark.parametrize(("gradient", "due"), GRADIENTS, ids=[repr(gradient)[:32] for gradient, _ in GRADIENTS])
def test_a_gradient(gradient: Any, due: Any) -> None:
    if isinstance(due, type):
        with pytest.raises(due), np.errstate(over="ignore"):
            computed(gradient=gradient)
        return
    assert computed(gradient=gradient)[2]["w"].tolist() == pytest.approx(due)


FIGURES: list[tuple[Any, Any]] = [
    (math.nan, math.nan),
    (math.inf, math.inf),
    (HUGE / 2, HUGE / 2),
    (HUGE, math.inf),  # the sum over two examples is
    (TINY, TINY),
    (np.float32(0.5), 0.5),
    (np.ones((), np.int64), 1.0),
    (True, 1.0),
    (2**2000, WRONG),
    (None, WRONG),
    ("0.5", WRONG),
    (1j, WRONG),
    (np.ones(2), WRONG),
]


@pytest.mark.parametrize(("figure", "due"), FIGURES, ids=[repr(figure)[:24] for figure, _ in FIGURES])
def test_a_figure_of_an_evaluation(figure: Any, due: Any) -> None:
    task, values = task_of(figure=figure), {"w": np.zeros(2, np.float32)}
    if due is WRONG:
        with pytest.raises(WRONG):
            task.metrics(values, nullcontext)
        return
    assert task.metrics(values, nullcontext)["loss"] == pytest.approx(due, nan_ok=True)
