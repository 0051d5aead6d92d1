"""A small DLRM of synthetic clicks with a table of ids: Adagrad for the rows, Adam for the rest; AUC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import parashard as ps
from benchmarks.statistics.trial import Trial

TRAIN, HELD_OUT, COLUMNS, NUMBERS, VOCABULARY, DIMENSION = 80_000, 10_000, 6, 4, 300, 8


class Clicks(torch.nn.Module):
    """Numbers become one more vector beside those of ids; products of all pairs go into a small tower."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.ids = ps.torch.Embedding(
            ps.Table("ids", DIMENSION, initializer="normal", scale=0.2, optimizer=ps.Adagrad(0.05))
        )
        self.numbers = nn.Linear(NUMBERS, DIMENSION)
        self.tower = nn.Sequential(
            nn.Linear(COLUMNS * (COLUMNS + 1) // 2 + (COLUMNS + 1) * DIMENSION, 32), nn.ReLU(), nn.Linear(32, 1)
        )
        self.pairs = tuple(torch.triu_indices(COLUMNS + 1, COLUMNS + 1, 1))

    def forward(self, ids: Any, numbers: Any) -> Any:
        """Return the logit of a click."""
        vectors = torch.cat([self.ids(ids), self.numbers(numbers)[:, None]], 1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.tower(torch.cat([products, vectors.flatten(1)], 1))[:, 0]


def log() -> tuple[dict[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Return ids, most of them rare, numbers, and clicks by a hidden factorisation machine."""
    rng = np.random.default_rng(0)
    number = TRAIN + HELD_OUT
    ids = (VOCABULARY * rng.random((number, COLUMNS)) ** 3).astype(np.int64) + VOCABULARY * np.arange(COLUMNS)
    numbers = rng.normal(0, 1, (number, NUMBERS)).astype(np.float32)
    weight, factor = rng.normal(0, 0.6, COLUMNS * VOCABULARY), rng.normal(0, 0.35, (COLUMNS * VOCABULARY, 3))
    summed = factor[ids].sum(1)
    pairs = 0.5 * (summed**2 - (factor[ids] ** 2).sum(1)).sum(1)
    logits = weight[ids].sum(1) + pairs + numbers @ rng.normal(0, 0.4, NUMBERS) - 1
    clicked = rng.random(number) < 1 / (1 + np.exp(-logits))
    return {"ids": ids, "numbers": numbers}, clicked.astype(np.float32)


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    torch.manual_seed(seed)
    inputs, clicked = log()
    return Trial(
        model=ps.torch.Model(
            Clicks(),
            torch.nn.functional.binary_cross_entropy_with_logits,
            metrics=[ps.metrics.AUC(2001, from_logits=True)],
            keys=lambda inputs: {"ids": inputs["ids"]},
        ),
        optimizer=ps.Adam(5e-3),
        train=({name: of[:TRAIN] for name, of in inputs.items()}, clicked[:TRAIN]),
        held_out=({name: of[TRAIN:] for name, of in inputs.items()}, clicked[TRAIN:]),
        epochs=3,
        batch_size=128,
        metric="auc",
        higher_is_better=True,
        tolerance=0.005,
    )
