"""The data of the race of embedding rows: the ids of steps, and gradients of their rows. NumPy only.

Called by the contestants of `benchmarks.races.embedding_rows`, peers' too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ROWS = 1 << 20
DIMENSION = 16
BATCH, COLUMNS = 4096, 26
ZIPF = 1.2
LEARNING_RATE = 0.01
STEPS = 16
"""Batches that contestants take in turn."""


def batches() -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the ids of each batch, shape (BATCH, COLUMNS): rank r has a weight of r^-ZIPF, and a random id."""
    rng = np.random.default_rng(7)
    reached = np.cumsum(np.arange(1, ROWS + 1) ** -ZIPF)
    place = rng.permutation(ROWS)
    return [place[np.searchsorted(reached, rng.random((BATCH, COLUMNS)) * reached[-1])] for _ in range(STEPS)]


def gradients(rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return gradients for this many rows."""
    return np.random.default_rng(rows).uniform(-1e-3, 1e-3, (rows, DIMENSION)).astype(np.float32)
