"""Ballast: a model that computes nothing and moves a given number of bytes.

Its gradient is the same at every step, so the final weights show how many pushes were applied. Named by
`ballast.toml` beside it; built by coordinator, workers and, for its gradient, by the races.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from parashard.data.base import Array, Batch, DataSpec
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.variables import Float32s, Variable

COLUMNS = 256
DENOMINATOR = 1024  # with few bits in every value, sums are exact in float32 in any order


class Ballast:
    """One variable, "ballast", of shape (elements / 256, 256), zeros at the start.

    Parameters
    ----------
    spec : DataSpec
        Only the number of examples matters, and only to the audit: a job must have one example in a step.
    elements : int
        A multiple of 256.
    """

    def __init__(self, spec: DataSpec, elements: int) -> None:
        assert elements % COLUMNS == 0, f"{elements} elements are not whole rows of {COLUMNS}"
        self._examples = spec.examples
        self._shape = (elements // COLUMNS, COLUMNS)
        self._gradient: Float32s | None = None

    def initial_variables(self) -> Mapping[str, Variable]:
        """Return the variable."""
        return {"ballast": Variable("ballast", self._shape, decay=False)}

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float, Mapping[str, Array]]:
        """Return 0.0 and the gradient, which is the same array at every step."""
        if self._gradient is None:
            self._gradient = gradient(self._shape)
        return 0.0, {"ballast": self._gradient}

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, float]:
        """Return no metric."""
        return {}

    def audit(self, variables: Mapping[str, Float32s], epochs: int) -> Mapping[str, int]:
        """Return {"wrong": weights that SGD at learning rate 1 would not have after every step, once}."""
        expected = -np.float32(epochs * self._examples) * gradient(self._shape)
        return {"wrong": int((variables["ballast"] != expected).sum())}


def gradient(shape: tuple[int, int]) -> Float32s:
    """Return 1/1024 to 7/1024, in turn."""
    values = np.empty(shape, np.float32)
    flat = values.reshape(-1)
    filled = min(7, flat.size)
    flat[:filled] = np.arange(1, filled + 1, dtype=np.float32) / DENOMINATOR
    while filled < flat.size:  # np.resize joins as many arrays as there are turns: a second for 256 MiB
        more = min(filled, flat.size - filled)
        flat[filled : filled + more] = flat[:more]
        filled += more
    return values


class BallastOfRows(Ballast):
    """Ballast of a job with tables; the race itself chooses the rows to pull and push."""

    def keys(self, batch: Batch) -> Mapping[str, Array]:
        """Return no key."""
        return {}


def build(spec: DataSpec, elements: int, tables: Mapping[str, EmbeddingTable]) -> Ballast:
    """Return the model: the factory that the job file names."""
    return (BallastOfRows if tables else Ballast)(spec, elements)
