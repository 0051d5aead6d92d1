"""The MLP in `ps.layers`; alone is PyTorch, whose autograd its gradients are compared with."""

from __future__ import annotations

import numpy as np

import parashard as ps
from benchmarks.frameworks import torch_mlp
from benchmarks.frameworks.mnist import CLASSES, HIDDEN, PIXELS
from parashard.layers import Dense, ReLU

alone = torch_mlp.alone


def model():
    """Return the model for a trainer."""
    layers = [Dense(HIDDEN, initializer="he_normal"), ReLU(), Dense(CLASSES)]
    return ps.Sequential(layers, input_shape=(PIXELS,), loss="softmax_cross_entropy", metrics=["accuracy"])


def gradients(values, x, y):
    """Return the gradients of a batch by PyTorch: its layers have their weights the other way round."""
    turned = dict(zip(torch_mlp.net().state_dict(), (_turned(values[name]) for name in _ordered(values)), strict=True))
    found = torch_mlp.gradients(turned, x, y)
    return dict(zip(_ordered(values), map(_turned, found.values()), strict=True))


def _ordered(values):
    """Return the names in PyTorch's order: of each layer the weight, then the bias."""
    return sorted(values, key=lambda name: (name.rpartition(".")[0], -values[name].ndim))


def _turned(array):
    return np.ascontiguousarray(array.T)
