"""Matrix factorisation with a table of users and one of items: Adagrad; staleness is as good as harmless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import parashard as ps
from benchmarks.statistics.trial import Trial

USERS, ITEMS, RATINGS, HELD_OUT, RANK, DIMENSION = 1000, 500, 100_000, 10_000, 4, 8
NOISE, RATE = 0.5, 0.3


class Factors(torch.nn.Module):
    """The mean rating, and the product of a user's row and an item's."""

    def __init__(self) -> None:
        super().__init__()
        rows = {"initializer": "normal", "scale": 0.3, "optimizer": ps.Adagrad(RATE)}
        self.users = ps.torch.Embedding(ps.Table("users", DIMENSION, **rows))
        self.items = ps.torch.Embedding(ps.Table("items", DIMENSION, **rows))
        self.mean = torch.nn.Parameter(torch.zeros(1))

    def forward(self, user: Any, item: Any) -> Any:
        """Return a rating for each pair."""
        return self.mean + (self.users(user) * self.items(item)).sum(1)


def ratings() -> tuple[dict[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Return users, items that few or many of them rate, and ratings of a hidden rank with noise."""
    rng = np.random.default_rng(0)
    number = RATINGS + HELD_OUT
    user, item = rng.integers(0, USERS, number), (ITEMS * rng.random(number) ** 2).astype(np.int64)
    left, right = rng.normal(0, RANK**-0.25, (USERS, RANK)), rng.normal(0, RANK**-0.25, (ITEMS, RANK))
    values = 3 + (left[user] * right[item]).sum(1) + rng.normal(0, NOISE, number)
    return {"user": user, "item": item}, values.astype(np.float32)


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    torch.manual_seed(seed)
    inputs, values = ratings()
    return Trial(
        model=ps.torch.Model(
            Factors(),
            torch.nn.functional.mse_loss,
            keys=lambda inputs: {"users": inputs["user"], "items": inputs["item"]},
        ),
        optimizer=ps.Adagrad(RATE),
        train=({name: of[:RATINGS] for name, of in inputs.items()}, values[:RATINGS]),
        held_out=({name: of[RATINGS:] for name, of in inputs.items()}, values[RATINGS:]),
        epochs=4,
        batch_size=128,
        metric="loss",
        higher_is_better=False,
        tolerance=0.01,
    )
