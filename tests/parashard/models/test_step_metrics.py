"""Metrics of the batches that a model trains on: of the outputs that it has, as sums that are added elsewhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api.splitting import Accumulated
from parashard.data.base import Batch
from parashard.metrics import AUC, FIGURES, Accuracy, Metric, NormalizedEntropy, figure, kind_of
from parashard_worker.loop import metric_sums
from support.model_cases import start

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
BATCH = Batch(0, 0, np.arange(8), X, (X[:, 0] > 0).astype(np.int64))


class Counting(ps.layers.Layer):
    """Passes its inputs on, and counts how often."""

    name = "counting"
    calls = 0

    def output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def apply(self, variables: Any, inputs: Any, run: Any) -> Any:
        self.calls += 1
        return inputs, lambda gradient, to_input: (gradient, {})


def made(metrics: list[Any], counting: Counting | None = None) -> ps.Sequential:
    layers = [ps.layers.Dense(2), *([counting] if counting else [])]
    return ps.Sequential(layers, input_shape=(3,), loss="softmax_cross_entropy", metrics=metrics)


def test_a_step_s_metrics_are_of_the_outputs_that_it_has_and_told_once() -> None:
    counting = Counting()
    model = made(["accuracy"], counting)
    values = start(model)
    model.loss_and_gradients(values, BATCH, np)
    told = {name: float(sums) for name, sums in model.step_metrics().items()}
    assert (counting.calls, model.step_metrics()) == (1, {})
    due = model.evaluate(values, BATCH, np)
    assert told == {"accuracy": float(due["accuracy"])}


def test_without_metrics_nothing_is_kept_of_a_step() -> None:
    model = made([])
    model.loss_and_gradients(start(model), BATCH, np)
    assert (model._step_outputs, model.step_metrics()) == (None, {})


def test_a_metric_that_keeps_its_own_state_is_of_evaluations_only() -> None:
    class Kept:
        def update(self, outputs: Any, targets: Any) -> None: ...
        def compute(self) -> float:
            return 1.0

        def reset(self) -> None: ...

    model = made(["accuracy", Kept()])
    model.loss_and_gradients(start(model), BATCH, np)
    assert list(model.step_metrics()) == list(model.added_metrics) == ["accuracy"]


def test_the_pieces_of_a_batch_are_added() -> None:
    whole, pieces = made(["accuracy"]), Accumulated(made(["accuracy"]), 3)
    values = start(whole)
    for model in (whole, pieces):
        model.loss_and_gradients(values, BATCH, np)
    found = pieces.step_metrics()["accuracy"]
    assert found.values.tolist() == whole.step_metrics()["accuracy"].values.tolist()
    assert list(pieces.added_metrics) == ["accuracy"]


class Ratio(Metric):
    name, length = "ratio", 2

    def figure(self, values: Any) -> float:
        return float(values[1] / values[0])


@pytest.mark.parametrize("metric", [Accuracy(), AUC(), NormalizedEntropy(), Ratio()], ids=lambda metric: metric.name)
def test_a_figure_is_the_same_where_there_is_no_metric(metric: Metric) -> None:
    values = np.random.default_rng(1).integers(1, 9, metric.length).astype(np.float64)
    values[-1] += 20
    kind = kind_of(metric)
    assert figure(kind, values.tolist()) == (metric.figure(values) if kind else None)
    assert (kind == "") == isinstance(metric, Ratio)


def test_numbers_that_no_metric_gave_make_no_figure_and_no_error() -> None:
    wrong: list[list[float]] = [[], [1.0], [math.inf, 1.0], [1.0, 0.0], [-1.0, 3.0, 2.0]]
    for kind in FIGURES:
        for values in wrong:
            found = figure(kind, values)
            assert found is not None
            assert kind == "sum" or math.isnan(found) or values == wrong[-1]


def test_states_that_are_too_long_for_a_report_are_left_out() -> None:
    long, short = AUC(3000), Accuracy()
    sums = {
        "auc": long.of(np.array([0.5, 0.25]), np.array([0, 1])),
        "accuracy": short.of(np.eye(2), np.array([0, 1])),
    }
    assert [one.name for one in metric_sums(sums)] == ["accuracy"]
