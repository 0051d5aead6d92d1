"""The CNN of PyTorch's MNIST example with a quarter of its channels: momentum 0.9, the rate falls each epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import parashard as ps
from benchmarks.statistics.tasks._digits import digits
from benchmarks.statistics.trial import Trial

TRAIN, HELD_OUT, BATCH = 6400, 4000, 64


def net() -> Any:
    """Return the net."""
    nn = torch.nn
    convolutions = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)
    dense = nn.Flatten(), nn.Linear(16 * 12 * 12, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10)
    return nn.Sequential(*convolutions, *dense)


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    torch.manual_seed(seed)
    images, labels = digits(data, "train", slice(TRAIN))
    held_images, held_labels = digits(data, "t10k", slice(HELD_OUT))
    return Trial(
        model=ps.torch.Model(net(), torch.nn.functional.cross_entropy, metrics=["accuracy"]),
        optimizer=ps.Momentum(
            0.05, momentum=0.9, schedule={"kind": "step", "every_steps": TRAIN // BATCH, "factor": 0.7}
        ),
        train=(images.reshape(-1, 1, 28, 28), labels),
        held_out=(held_images.reshape(-1, 1, 28, 28), held_labels),
        epochs=5,
        batch_size=BATCH,
        metric="accuracy",
        higher_is_better=True,
        tolerance=0.005,
    )
