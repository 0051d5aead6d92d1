"""The perceptron that predicts values: exact gradients, metrics in the targets' unit, and any unit learns alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parashard.data.arrays import ArraySource, Split
from parashard.data.base import Batch
from parashard.frozen_model import validated
from parashard.job.model_options import ModelOptions
from parashard.models.base import Model
from parashard.models.building import build_model
from parashard.plan.variables import Variable, initial_rows
from support.model_cases import SEED, OnBoth, finite_differences, start

EXAMPLES = 64
KINDS = [
    {"kind": "mlp", "hidden": []},
    {"kind": "mlp", "hidden": [7, 4]},
    {"kind": "mlp", "hidden": [6], "activation": "gelu", "dropout": 0.3, "loss": "squared"},
]
each_kind = pytest.mark.parametrize("options", KINDS, ids=str)


def source_of(scale: float = 1.0, offset: float = 0.0) -> ArraySource:
    """Return examples whose targets are a line, times `scale`, plus `offset`."""
    rng = np.random.default_rng(4)
    inputs = rng.standard_normal((EXAMPLES, 3)).astype(np.float32)
    targets = (inputs @ np.array([1, -2, 3], np.float32)) * np.float32(scale) + np.float32(offset)
    whole = Split(inputs, targets.astype(np.float32))
    return ArraySource(whole, whole.take(np.arange(0)), 0)


def built(options: Any, source: ArraySource) -> Model:
    return build_model(validated(ModelOptions, options), source.spec, SEED, None)


def batch_of(source: ArraySource, n: int = EXAMPLES) -> Batch:
    return Batch(11, 2, np.arange(n), *source.examples(np.arange(n)))


@each_kind
@pytest.mark.parametrize("n", [1, 4])
def test_gradients_are_those_of_finite_differences(options: Any, n: int) -> None:
    source = source_of(scale=1000.0, offset=-5.0)
    model, batch = built(options, source), batch_of(source, n)
    variables = start(model, np.float64)
    _, gradients = model.loss_and_gradients(variables, batch, np)
    for name, expected in finite_differences(model, variables, batch).items():
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-5, atol=1e-8, err_msg=name)


@each_kind
def test_it_uses_what_both_namespaces_have_and_keeps_the_dtype(options: Any) -> None:
    source = source_of()
    model, batch = built(options, source), batch_of(source)
    variables = start(model)
    for held in (*variables.values(), batch.inputs, batch.targets):
        held.flags.writeable = False
    loss, gradients = model.loss_and_gradients(variables, batch, OnBoth())
    assert np.shape(loss) == ()
    assert {gradient.dtype for gradient in gradients.values()} == {np.dtype(np.float32)}
    model.evaluate(variables, batch, OnBoth())


def test_metrics_are_named_and_have_the_targets_unit() -> None:
    source = source_of(scale=1000.0, offset=7e4)
    model, batch = built({"kind": "mlp", "hidden": [5]}, source), batch_of(source)
    variables = start(model, np.float64)
    outputs, _ = model.forward(variables, batch.inputs, None, np)  # type: ignore[attr-defined]
    target = source.spec.preprocessing.target  # type: ignore[union-attr]
    error = target.mean + target.deviation * outputs[:, 0] - batch.targets  # type: ignore[union-attr]
    metrics = model.evaluate(variables, batch, np)
    assert metrics == {
        "loss": pytest.approx(np.mean(error**2) / np.var(batch.targets.astype(np.float64))),
        "mean_squared_error": pytest.approx(np.mean(error**2)),
        "mean_absolute_error": pytest.approx(np.mean(abs(error))),
    }
    assert [type(value) for value in metrics.values()] == [float, float, float]


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (30_000.0, 500_000.0), (1e-5, 0.0)])
def test_sgd_learns_whatever_the_targets_unit_is(scale: float, offset: float) -> None:
    source = source_of(scale, offset)
    model, batch = built({"kind": "mlp", "hidden": []}, source), batch_of(source)
    declared = model.initial_variables().values()
    variables = {v.name: initial_rows(v, SEED, 0, v.rows) for v in declared if isinstance(v, Variable)}
    for _ in range(60):
        for name, gradient in model.loss_and_gradients(variables, batch, np)[1].items():
            variables[name] -= 0.1 * gradient
    assert model.evaluate(variables, batch, np)["loss"] < 1e-4
