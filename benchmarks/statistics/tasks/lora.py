"""LoRA: a frozen MLP that reads digits learns to read them upside down, by adapters of rank 8; AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import threadpoolctl
import torch

import parashard as ps
from benchmarks.frameworks.mnist import CLASSES, PIXELS, batches
from benchmarks.statistics.tasks._digits import digits
from benchmarks.statistics.trial import Trial

PRETRAINED_ON, TRAIN, HELD_OUT, HIDDEN, RANK = 10_000, 10_000, 4000, 128, 8
cross_entropy = torch.nn.functional.cross_entropy


class Adapted(torch.nn.Module):
    """A frozen linear layer and the product of two small matrices, of which one begins as zeros."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(RANK, linear.in_features) / linear.in_features**0.5)
        self.up = torch.nn.Parameter(torch.zeros(linear.out_features, RANK))

    def forward(self, values: Any) -> Any:
        """Return the layer's output."""
        return self.linear(values) + values @ self.down.T @ self.up.T


def pretrained(images: Any, labels: Any) -> list[Any]:
    """Return linear layers that one epoch of Adam has trained, with the same bits on any number of cores."""
    nn = torch.nn
    torch.manual_seed(0)
    layers = [nn.Linear(PIXELS, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    with threadpoolctl.threadpool_limits(1):
        for some in batches(len(y), seed=0, epoch=0):
            optimizer.zero_grad()
            cross_entropy(net(x[some]), y[some]).backward()
            optimizer.step()
    return layers


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    images, labels = digits(data, "train", slice(-TRAIN, None))
    held_images, held_labels = digits(data, "t10k", slice(HELD_OUT))
    first, second, last = pretrained(*digits(data, "train", slice(PRETRAINED_ON)))
    torch.manual_seed(seed)
    relu = torch.nn.ReLU()
    net = torch.nn.Sequential(Adapted(first), relu, Adapted(second), relu, Adapted(last))
    return Trial(
        model=ps.torch.Model(net, cross_entropy, metrics=["accuracy"]),
        optimizer=ps.AdamW(3e-3, weight_decay=0.01, schedule={"kind": "cosine"}),
        train=(images[:, ::-1].copy(), labels),
        held_out=(held_images[:, ::-1].copy(), held_labels),
        epochs=8,
        batch_size=64,
        metric="accuracy",
        higher_is_better=True,
        tolerance=0.005,
    )
