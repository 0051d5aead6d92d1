"""An MLP on cluttered digits, harder as Fashion-MNIST is: Nesterov's momentum, cosine, weight decay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import parashard as ps
from benchmarks.statistics.tasks._digits import digits
from benchmarks.statistics.trial import Trial

TRAIN, HELD_OUT, SIDE, SHIFT, PIECES, PIECE = 24_000, 4000, 28, 2, 2, 8
PIXELS = SIDE * SIDE


def cluttered(images: np.ndarray[Any, Any], seed: int) -> np.ndarray[Any, Any]:
    """Return digits moved by up to 2 pixels, with two pieces of other digits over them, and noise."""
    rng = np.random.default_rng(seed)
    images = images.reshape(-1, SIDE, SIDE)
    result = np.empty_like(images)
    for number, image in enumerate(images):
        result[number] = np.roll(image, rng.integers(-SHIFT, SHIFT + 1, 2), (0, 1))
        for other in rng.integers(0, len(images), PIECES):
            a, b = rng.integers(0, SIDE - PIECE + 1, (2, 2))
            piece = images[other, b[0] : b[0] + PIECE, b[1] : b[1] + PIECE]
            place = result[number, a[0] : a[0] + PIECE, a[1] : a[1] + PIECE]
            np.maximum(place, piece, out=place)
    result += rng.normal(0, 0.2, result.shape)
    return result.reshape(-1, PIXELS)


def net() -> Any:
    """Return the net."""
    nn = torch.nn
    first, second = (
        [nn.Linear(PIXELS, 256), nn.ReLU(), nn.Dropout(0.3)],
        [nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.3)],
    )
    return nn.Sequential(*first, *second, nn.Linear(128, 10))


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    torch.manual_seed(seed)
    images, labels = digits(data, "train", slice(TRAIN))
    held_images, held_labels = digits(data, "t10k", slice(HELD_OUT))
    return Trial(
        model=ps.torch.Model(net(), torch.nn.functional.cross_entropy, metrics=["accuracy"]),
        optimizer=ps.Nesterov(0.05, momentum=0.9, weight_decay=5e-4, schedule={"kind": "cosine"}),
        train=(cluttered(images, seed=0), labels),
        held_out=(cluttered(held_images, seed=1), held_labels),
        epochs=6,
        batch_size=64,
        metric="accuracy",
        higher_is_better=True,
        tolerance=0.005,
    )
