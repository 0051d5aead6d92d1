"""A ResNet of small images in PyTorch, for `benchmarks.gpu.speed`; width 64 has 1.2 M parameters, 384 has 44 M."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.frameworks.mnist import read

PIXELS, CLASSES = 28, 10
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels
HELD_OUT = 10_000
AT_ONCE = 1000  # of them

loss = nn.functional.cross_entropy


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        turned = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Sequential(*turned)

    def forward(self, values: Any) -> Any:
        """Return the block's output."""
        return torch.relu(self.body(values) + self.shortcut(values))


def net(width: int) -> nn.Module:
    """Return the net, with the weights of seed 0."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    blocks = Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES))


def data(examples: int, folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the first images of MNIST in a folder, or else noise in which a row of pixels encodes the class."""
    if folder is not None:
        return _digits(folder, slice(examples))
    rng = np.random.default_rng(0)
    classes = rng.integers(0, CLASSES, examples)
    images = rng.standard_normal((examples, 1, PIXELS, PIXELS), np.float32)
    images[np.arange(examples), 0, 2 * classes + 4] += 1.0
    return images, classes


def _digits(folder: Path, some: slice) -> tuple[np.ndarray, np.ndarray]:
    images, labels = read(folder, "train")
    standard = (images[some] - np.float32(MEAN)) / np.float32(DEVIATION)
    return standard.reshape(-1, 1, PIXELS, PIXELS), labels[some]


class Plain:
    """PyTorch's own loop over examples in memory."""

    def __init__(self, module: nn.Module, examples: tuple[np.ndarray, np.ndarray], batch: int, device: str) -> None:
        self.module = module.to(device).train()
        self._x, self._y = map(torch.from_numpy, examples)
        self._batch, self._device = batch, device
        self._generator = torch.Generator().manual_seed(0)

    def epoch(self, optimizer: torch.optim.Optimizer) -> Any:
        """Train on every example, in a new order; return the last loss, which is not waited for."""
        found = None
        for some in torch.randperm(len(self._y), generator=self._generator).split(self._batch):
            x, y = self._x[some].to(self._device), self._y[some].to(self._device)
            optimizer.zero_grad()
            found = loss(self.module(x), y)
            found.backward()
            optimizer.step()
        return found


def accuracy(module: nn.Module, folder: Path, device: str) -> float:
    """Return the accuracy on the last images of MNIST's training set, which are not used for training here."""
    images, labels = _digits(folder, slice(-HELD_OUT, None))
    module.to(device).eval()
    right = 0
    with torch.no_grad():
        for at in range(0, HELD_OUT, AT_ONCE):
            found = module(torch.from_numpy(images[at : at + AT_ONCE]).to(device)).argmax(1).cpu().numpy()
            right += int((found == labels[at : at + AT_ONCE]).sum())
    return right / HELD_OUT
