"""Embedding: a row of a weight for each whole number.

Knows no other layer. Called by users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from parashard.data.base import Array
from parashard.layers.base import Layer, Pass, Pullback, Shape, Start, need_count, need_start, start_of
from parashard.models.framework import WrongModel
from parashard.plan.variables import Initializer, Variable


@dataclass(frozen=True)
class Embedding(Layer):
    """Row i of W for each whole number i of the input: shape (...) becomes (..., units). A network's first layer.

    Variables: "weight", shape (values, units). Its gradient is dense: rows that a batch does not name have zeros, and
    an optimizer with momentum or decay moves them all the same.

    Parameters
    ----------
    values : int
        How many different numbers there are: 0 to values - 1. Others are refused on NumPy; on a GPU they are not looked
        for, and undefined.
    units : int
        Length of a row.
    initializer : Initializer or {"glorot_uniform", "he_normal"}
        Default: normal with a standard deviation of 1, as in PyTorch.
    """

    name: ClassVar[str] = "embedding"
    of_indices: ClassVar[bool] = True

    values: int
    units: int
    initializer: Start = Initializer("normal", 1.0)

    def __post_init__(self) -> None:
        need_count("Embedding", "values", self.values)
        need_count("Embedding", "units", self.units)
        need_start("Embedding", self.initializer)

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape with an axis more."""
        return (*shape, self.units)

    def variables(self, shape: Shape) -> dict[str, Variable]:
        """Return the declared weight."""
        start = start_of(self.initializer, self.values, self.units)
        return {"weight": Variable("weight", (self.values, self.units), start)}

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        """Return the rows, and the pullback; there is no gradient by the input."""
        indices = x.astype(np.int64).reshape(-1)
        if isinstance(x, np.ndarray) and x.size and not 0 <= x.min() <= x.max() < self.values:
            raise WrongModel(
                f"Embedding: inputs are {x.min()} to {x.max()}; allowed: whole numbers of 0 to {self.values - 1}"
            )

        def pull_back(gradient: Array, to_input: bool) -> tuple[Array | None, dict[str, Array]]:
            return None, {"weight": summed_by_row(gradient.reshape(-1, self.units), indices, self.values, at.xp)}

        return weights["weight"].take(indices, axis=0).reshape(*x.shape, self.units), pull_back


def summed_by_row(gradient: Array, indices: Array, rows: int, xp: Any) -> Array:
    """Return for each row the sum of the gradients with its index, in an order that the indices alone decide.

    Sorted by index, runs of equal ones are summed in pairs at growing distances: without atomic additions, whose order,
    and so whose bits, differ from run to run on a GPU.

    Parameters
    ----------
    gradient : array, shape (n, units)
    indices : array of int64, shape (n,)

    Returns
    -------
    array, shape (rows, units)
        New, in the gradient's dtype.
    """
    order = xp.argsort(indices, kind="stable")
    sums, ends = gradient[order], indices[order]
    distance = 1
    while distance < len(ends):
        same = ends[distance:] == ends[:-distance]
        sums[distance:] += xp.where(same[:, None], sums[:-distance], 0)
        distance *= 2
    total = xp.zeros((rows, gradient.shape[1]), gradient.dtype)
    last = xp.ones(len(ends), bool)
    last[:-1] = ends[1:] != ends[:-1]
    total[ends[last]] = sums[last]
    return total
