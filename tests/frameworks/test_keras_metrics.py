"""Evaluations of Keras models: what Keras itself says of all examples, by metrics that are added."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.metrics import kind_of
from parashard.models.evaluation import Totals
from support.keras_cases import X, Y, batch, compiled, figures, first_values, keras, layers, model, plain


def test_evaluations_are_those_of_keras() -> None:
    ours = model(plain)
    values = first_values(ours)
    due = ours.to_user_object(values).evaluate(X, Y, verbose=0, return_dict=True, batch_size=8)
    found = figures(ours.evaluate(values, batch(), np))
    assert found == pytest.approx(due)
    assert figures(ours.evaluate(values, batch(), np)) == found  # nothing is left of an evaluation


def test_metrics_of_batches_are_those_of_all_examples_though_they_are_no_means() -> None:
    """Of three batches of unequal size, with weights, as Keras has them of all at once."""

    def judged() -> Any:
        own = [keras.metrics.AUC(num_thresholds=50, name="auc"), keras.metrics.RootMeanSquaredError(), "mae"]
        weighted = [keras.metrics.Precision(name="precision"), keras.metrics.MeanAbsoluteError(name="weighted")]
        sigmoid = layers.Dense(1, activation="sigmoid")
        return compiled(sigmoid, loss="binary_crossentropy", metrics=own, weighted_metrics=weighted)

    ours = model(judged)
    values = first_values(ours)
    targets = np.array([0, 1, 1, 0, 1, 0, 0, 1], np.float32)[:, None]
    weights = np.arange(1, 9, dtype=np.float32) / 4
    totals = Totals()
    for rows in (slice(0, 3), slice(3, 4), slice(4, 8)):
        at = np.arange(8)[rows]
        totals.add(ours.evaluate(values, Batch(-1, -1, at, X[rows], targets[rows], weights[rows]), np), len(at))
    own = ours.to_user_object(values)
    due = own.evaluate(X, targets, sample_weight=weights, verbose=0, return_dict=True, batch_size=8)
    found = totals.figures()
    assert {name: found[name] for name in due if name != "loss"} == pytest.approx(
        {name: value for name, value in due.items() if name != "loss"}, rel=1e-5
    )
    assert 0 < found["auc"] <= 1


def test_a_metric_of_several_figures_is_refused() -> None:
    ours = model(lambda: compiled(layers.Dense(3), loss="mse", metrics=[keras.metrics.R2Score(None)]))
    with pytest.raises(
        ConfigurationError, match=r"'r2_score' has figures of shape \(3,\); allowed: one, such as F1Score"
    ):
        ours.check(batch(0, np.eye(3, dtype=np.float32)[Y]))


def test_a_figure_with_one_axis_is_a_number() -> None:
    """F1Score has one figure a class, here of one class, which JAX' float() refuses."""
    ours = model(lambda: compiled(layers.Dense(1), loss="mse", metrics=[keras.metrics.F1Score()]))
    values, some = first_values(ours), batch(0, (Y[:, None] > 0).astype(np.float32))
    due = ours.to_user_object(values).evaluate(some.inputs, some.targets, verbose=0, return_dict=True)["f1_score"]
    assert figures(ours.evaluate(values, some, np))["f1_score"] == pytest.approx(float(np.squeeze(due)))


def test_a_training_step_tells_the_compiled_metrics_of_its_own_outputs() -> None:
    """Means as a sum and a count, others as all variables; with weights that count in `weighted_metrics` only."""

    def judged() -> Any:
        own = [keras.metrics.AUC(num_thresholds=50, name="auc"), "mae"]
        weighted = [keras.metrics.MeanAbsoluteError(name="weighted")]
        sigmoid = layers.Dense(1, activation="sigmoid")
        return compiled(sigmoid, loss="binary_crossentropy", metrics=own, weighted_metrics=weighted)

    ours = model(judged)
    values = first_values(ours)
    targets = np.array([0, 1, 1, 0, 1, 0, 0, 1], np.float32)[:, None]
    weights = np.arange(1, 9, dtype=np.float32) / 4
    whole = Batch(0, 0, np.arange(8), X, targets, weights)
    ours.loss_and_gradients(values, whole, np)
    told = ours.step_metrics()
    due = ours.evaluate(values, whole, np)
    assert {name: float(sums) for name, sums in told.items()} == pytest.approx(
        {name: float(sums) for name, sums in due.items() if name != "loss"}
    )
    assert {name: kind_of(sums.metric) for name, sums in told.items()} == {"auc": "", "mae": "mean", "weighted": "mean"}
    assert ours.added_metrics["auc"].figure(told["auc"].values) == float(due["auc"])
    assert ours.step_metrics() == {}


def test_a_model_without_metrics_computes_none() -> None:
    ours = model(lambda: compiled(layers.Dense(1), loss="mse", metrics=None))
    ours.loss_and_gradients(first_values(ours), batch(), np)
    assert ours.step_metrics() == {}
