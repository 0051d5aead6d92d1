"""The classifiers learn: plain SGD on a small synthetic set, with the variables that a job would start from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parashard.data.base import Batch
from parashard.frozen_model import validated
from parashard.job.model_options import ModelOptions
from parashard.models.building import build_model
from parashard.plan.variables import Variable, initial_rows
from support.model_cases import spec_of

EXAMPLES, SIDE, CLASSES = 256, 8, 4


def blobs() -> tuple[Any, Any]:
    """Return noisy images of a bright square in one of four corners, and the corners."""
    rng = np.random.default_rng(5)
    corners = np.arange(EXAMPLES) % CLASSES
    images = rng.standard_normal((EXAMPLES, SIDE, SIDE)).astype(np.float32) * 0.7
    for image, corner in zip(images, corners, strict=True):
        y, x = divmod(int(corner), 2)
        image[y * 4 : y * 4 + 4, x * 4 : x * 4 + 4] += 0.8
    return images, corners


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({"kind": "softmax"}, 0.1),
        ({"kind": "mlp", "hidden": [32, 16]}, 0.1),
        ({"kind": "mlp", "hidden": [32], "activation": "gelu", "dropout": 0.2}, 0.1),
        ({"kind": "mlp", "hidden": [32], "activation": "tanh"}, 0.1),
        ({"kind": "cnn", "channels": [4, 8], "hidden": [16]}, 0.1),
    ],
    ids=str,
)
def test_sgd_learns(options: Any, rate: float) -> None:
    model = build_model(validated(ModelOptions, options), spec_of((SIDE, SIDE), CLASSES, EXAMPLES), 3, None)
    declared = model.initial_variables().values()
    variables = {v.name: initial_rows(v, 3, 0, v.rows) for v in declared if isinstance(v, Variable)}
    images, corners = blobs()
    train, held_out = np.arange(192), np.arange(192, EXAMPLES)
    last = Batch(-1, -1, held_out, images[held_out], corners[held_out])
    before = model.evaluate(variables, last, np)
    for step in range(90):
        indices = train[step % 6 * 32 : step % 6 * 32 + 32]
        batch = Batch(step, step // 6, indices, images[indices], corners[indices])
        _, gradients = model.loss_and_gradients(variables, batch, np)
        for name, gradient in gradients.items():
            variables[name] -= rate * gradient
    after = model.evaluate(variables, last, np)
    assert float(before["accuracy"]) < 0.8
    assert float(after["accuracy"]) > 0.95
    assert float(after["loss"]) < float(before["loss"]) / 2
