"""Pullback of embedding look-ups: sums of gradients by row, in the order of the examples (P35).

Compiled by Numba on the host; on a GPU an ordered sum without atomics.
"""

# Numba infers the loops' types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from parashard.data.base import Array
from parashard.process.cached_code import Loop, Vector, const


def sum_by_place(gradients: Array, places: Array, rows: int, xp: Any) -> Array:
    """Sum the gradients of look-ups by row, in a new array; `places` has the row of each look-up."""
    # The gradients of a row are added in their order. Shapes: (look-ups, row_elements) and (look-ups,) become (rows,
    # row_elements).
    if not isinstance(gradients, np.ndarray):
        return summed_by_row(gradients, places, rows, xp)
    total = np.zeros((rows, gradients.shape[1]), gradients.dtype)
    _summing(gradients.dtype.name)(np.ascontiguousarray(gradients), np.ascontiguousarray(places), total)
    return total


@functools.cache
def _summing(dtype: str) -> Loop:
    return Loop(_added, const(Vector(dtype, dimensions=2)), const(Vector("int64")), Vector(dtype, dimensions=2))


def _added(gradients, places, total):
    for look_up in range(len(places)):
        row = places[look_up]
        for element in range(gradients.shape[1]):
            total[row, element] += gradients[look_up, element]


def summed_by_row(gradient: Array, indices: Array, rows: int, xp: Any) -> Array:
    """Sum gradients by row index, in a new array; the order of addition depends only on the indices."""
    # Sorted by index, runs of equal indices are summed in pairs at growing distances. Atomic additions on a GPU would
    # differ in order, and so in the last bits, from run to run.
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
