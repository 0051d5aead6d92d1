"""A small ResNet with batch normalisation on 4,000 images of MNIST: momentum 0.9, cosine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import parashard as ps
from benchmarks.statistics.tasks._digits import digits
from benchmarks.statistics.trial import Trial

TRAIN, HELD_OUT = 4000, 2000


class Block(torch.nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        nn = torch.nn
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, values: Any) -> Any:
        """Return the block's output."""
        return torch.relu(self.body(values) + self.shortcut(values))


def net() -> Any:
    """Return the net."""
    nn = torch.nn
    first = [nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*first, Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2), *last)


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    torch.manual_seed(seed)
    images, labels = digits(data, "train", slice(TRAIN))
    held_images, held_labels = digits(data, "t10k", slice(HELD_OUT))
    return Trial(
        model=ps.torch.Model(net(), torch.nn.functional.cross_entropy, metrics=["accuracy"]),
        optimizer=ps.Momentum(0.1, momentum=0.9, schedule={"kind": "cosine"}),
        train=(images.reshape(-1, 1, 28, 28), labels),
        held_out=(held_images.reshape(-1, 1, 28, 28), held_labels),
        epochs=3,
        batch_size=64,
        metric="accuracy",
        higher_is_better=True,
        tolerance=0.005,
    )
