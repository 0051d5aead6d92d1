"""Small models with a batch each, and central finite differences: what the tests of this folder share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from parashard.data.base import Batch, DataSpec
from parashard.frozen_model import validated
from parashard.job.model_options import ModelOptions
from parashard.models.base import Model
from parashard.models.building import build_model
from parashard.models.evaluation import Totals
from parashard.plan.variables import Variable, initial_rows

SEED = 7

CLASSIFIERS = {
    "softmax": ({"kind": "softmax"}, (5,)),
    "mlp-relu": ({"kind": "mlp", "hidden": [7, 4]}, (6,)),
    "mlp-gelu": ({"kind": "mlp", "hidden": [5], "activation": "gelu"}, (2, 3)),
    "mlp-tanh-dropout": ({"kind": "mlp", "hidden": [9, 6], "activation": "tanh", "dropout": 0.4}, (4,)),
    "mlp-no-hidden": ({"kind": "mlp", "hidden": []}, (3,)),
    "mlp-relu-dropout": ({"kind": "mlp", "hidden": [16, 16], "dropout": 0.5}, (4,)),
    "mlp-gelu-dropout": ({"kind": "mlp", "hidden": [8], "activation": "gelu", "dropout": 0.3}, (4,)),
    "cnn-same": ({"kind": "cnn", "channels": [2, 3], "hidden": [5]}, (6, 5)),
    "cnn-valid": ({"kind": "cnn", "channels": [3], "padding": "valid", "hidden": [4]}, (7, 6, 2)),
    "cnn-even-kernel": ({"kind": "cnn", "channels": [2, 2], "kernel": 2, "hidden": [], "activation": "tanh"}, (5, 4)),
    "cnn-gelu-dropout": (
        {"kind": "cnn", "channels": [2, 2], "kernel": 5, "hidden": [6], "activation": "gelu", "dropout": 0.5},
        (4, 4, 3),
    ),
}
ORACLES = {"ledger": ({"kind": "ledger"}, (3,)), "torn": ({"kind": "torn", "rows": 3}, (3,))}


def spec_of(shape: tuple[int, ...], classes: int = 3, examples: int = 20) -> DataSpec:
    return DataSpec(examples, 0, shape, classes, "00")


def built(options: Mapping[str, Any], shape: tuple[int, ...], classes: int = 3, seed: int = SEED) -> Model:
    return build_model(validated(ModelOptions, options), spec_of(shape, classes), seed, None)


def start(model: Model, dtype: Any = np.float32) -> dict[str, Any]:
    """Return the initial variables, with biases that are not zero, so that no gradient hides behind one."""
    values = {}
    for name, declared in model.initial_variables().items():
        assert isinstance(declared, Variable)
        assert name == declared.name
        values[name] = initial_rows(declared, SEED, 0, declared.rows).astype(dtype)
        if name.endswith(".bias"):
            values[name] += np.linspace(-0.2, 0.3, declared.rows).astype(dtype)
    return values


def batch_of(shape: tuple[int, ...], n: int = 4, classes: int = 3, step: int = 11, xp: Any = np) -> Batch:
    rng = np.random.default_rng(n)
    inputs = rng.standard_normal((n, *shape)).astype(np.float32)
    targets = rng.integers(0, classes, n)
    return Batch(step, 2, np.arange(n) * 2, xp.asarray(inputs), xp.asarray(targets))


def finite_differences(model: Model, variables: dict[str, Any], batch: Batch, width: float = 1e-6) -> dict[str, Any]:
    """Return (loss(v + width) - loss(v - width)) / (2 width) for every element v of float64 variables."""
    gradients = {}
    for name, values in variables.items():
        gradients[name] = np.zeros_like(values)
        for at in np.ndindex(values.shape):
            losses = []
            for sign in (1, -1):
                moved = values.copy()
                moved[at] += sign * width
                losses.append(model.loss_and_gradients(variables | {name: moved}, batch, np)[0])
            gradients[name][at] = (losses[0] - losses[1]) / (2 * width)
    return gradients


class OnBoth:
    """A namespace that passes on what NumPy and CuPy both have, and nothing else."""

    NAMES = (
        *(
            "arange",
            "argsort",
            "asarray",
            "broadcast_to",
            "concatenate",
            "empty",
            "exp",
            "full",
            "log",
            "log1p",
            "matmul",
            "maximum",
            "multiply",
            "nonzero",
            "ones",
        ),
        *("sqrt", "stack", "subtract", "tanh", "uint16", "uint64", "where", "zeros", "zeros_like"),
    )

    def __getattr__(self, name: str) -> Any:
        assert name in self.NAMES, f"look up whether CuPy has {name}, then add it here"
        return getattr(np, name)


def first_output(outputs: Any, targets: Any) -> Any:
    """Return one number an example: a metric that a user writes, in any framework."""
    return outputs[:, 0]


def check_metrics_of_batches(model: Any, values: Any, inputs: Any, targets: Any) -> None:
    """Judge eight examples in three batches by accuracy, TopK(2) and `first_output`, and as one."""
    outputs, totals = model.predict(values, inputs), Totals()
    for rows in (slice(0, 1), slice(1, 3), slice(3, 8)):
        judged = model.evaluate(values, Batch(-1, -1, np.arange(8)[rows], inputs[rows], targets[rows]), np)
        totals.add(judged, len(targets[rows]))
    second = np.sort(outputs)[:, -2]
    due = {
        "accuracy": np.mean(outputs.argmax(1) == targets),
        "top_k_categorical_accuracy": np.mean(outputs[np.arange(8), targets] >= second),
        "first_output": np.mean(outputs[:, 0]),
    }
    found = totals.figures()
    assert {name: found[name] for name in due} == pytest.approx(due, rel=1e-5)
    whole = model.evaluate(values, Batch(-1, -1, np.arange(8), inputs, targets), np)
    assert found["loss"] == pytest.approx(float(whole["loss"]))
