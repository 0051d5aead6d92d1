"""Two hidden layers on scikit-learn's digits with momentum 0.9 at a large rate; needs no framework."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import parashard as ps
from benchmarks.statistics.trial import Trial
from parashard.layers import Dense, ReLU

HELD_OUT = 497


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed, which also draws what is held out."""
    inputs, targets = load_digits(return_X_y=True)
    inputs = (inputs / 16).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(inputs))
    held_out, train = order[:HELD_OUT], order[HELD_OUT:]
    layers = [Dense(64, initializer="he_normal"), ReLU(), Dense(64, initializer="he_normal"), ReLU(), Dense(10)]
    return Trial(
        model=ps.Sequential(layers, input_shape=(64,), loss="softmax_cross_entropy", metrics=["accuracy"]),
        optimizer=ps.Momentum(0.1, momentum=0.9),
        train=(inputs[train], targets[train]),
        held_out=(inputs[held_out], targets[held_out]),
        epochs=15,
        batch_size=32,
        metric="accuracy",
        higher_is_better=True,
        tolerance=0.005,
    )
