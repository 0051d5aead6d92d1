"""LoRA: a frozen MLP that reads digits learns to read them upside down, by adapters of rank 4 and AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import parashard as ps
from benchmarks.frameworks.mnist import CLASSES, PIXELS, batches, read
from benchmarks.statistics.tasks import NoData
from benchmarks.statistics.trial import Trial

PRETRAINED_ON, TRAIN, HELD_OUT, HIDDEN, RANK = 10_000, 10_000, 4000, 128, 4
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


def pretrained(images: Any, digits: Any) -> list[Any]:
    """Return linear layers that one epoch of Adam has trained."""
    nn = torch.nn
    torch.manual_seed(0)
    layers = [nn.Linear(PIXELS, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    x, y = torch.from_numpy(images), torch.from_numpy(digits)
    for some in batches(len(y), seed=0, epoch=0):
        optimizer.zero_grad()
        cross_entropy(net(x[some]), y[some]).backward()
        optimizer.step()
    return layers


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    if data is None:
        raise NoData
    (images, digits), (held_images, held_digits) = read(data, "train"), read(data, "t10k")
    first, second, last = pretrained(images[:PRETRAINED_ON], digits[:PRETRAINED_ON])
    torch.manual_seed(seed)
    relu = torch.nn.ReLU()
    net = torch.nn.Sequential(Adapted(first), relu, Adapted(second), relu, Adapted(last))
    return Trial(
        model=ps.torch.Model(net, cross_entropy, metrics=["accuracy"]),
        optimizer=ps.AdamW(1e-2, weight_decay=0.01, schedule={"kind": "cosine"}),
        train=(images[-TRAIN:, ::-1].copy(), digits[-TRAIN:]),
        held_out=(held_images[:HELD_OUT, ::-1].copy(), held_digits[:HELD_OUT]),
        epochs=5,
        batch_size=64,
        metric="accuracy",
        higher_is_better=True,
        tolerance=0.005,
    )
