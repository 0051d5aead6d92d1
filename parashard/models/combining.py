"""Combining: one vector from the rows of several keys of an example, their sum or mean, and its pullback.

Owns the arithmetic and the order of look-ups. Knows no table. Called by `parashard.models.clicks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from parashard.data.base import Array
from parashard.data.ragged import NO_KEY
from parashard.layers.row_sums import sum_by_place

PullBack = Callable[[Array], Array]


class Bags(NamedTuple):
    """Which look-ups make one vector: bag i * columns + c has those of example i in column c of lists.

    Parameters
    ----------
    of : array of int64, shape (look-ups,)
        Each look-up's bag; column by column, and in each in the order of the examples.
    sizes : array of int64, shape (examples * columns,)
        How many look-ups each has.
    """

    of: Array
    sizes: Array


def keys_of_lists(keys: Array, lists: Sequence[Array]) -> Array:
    """Return the keys that examples look up, in the order in which rows are combined: those of one key, then lists.

    Parameters
    ----------
    keys : ndarray of int64, shape (examples, columns)
        Of the columns of one key.
    lists : sequence of ndarray of int64, shape (examples, values)
        Of each column of lists, filled up with `NO_KEY`.

    Returns
    -------
    ndarray of int64, shape (look-ups,)
    """
    return np.concatenate([keys.reshape(-1), *(column[column != NO_KEY] for column in lists)])


def bags_of(lists: Sequence[Array], xp: Any) -> Bags:
    """Return the bags of columns of lists, of which there is one at least."""
    there = [column != NO_KEY for column in lists]
    of = [xp.nonzero(one)[0] * len(lists) + place for place, one in enumerate(there)]
    return Bags(xp.concatenate(of), xp.stack([one.sum(axis=1) for one in there], axis=1).reshape(-1))


def combined(rows: Array, bags: Bags, combiner: str, xp: Any) -> tuple[Array, PullBack]:
    """Return one vector for each bag, and from the gradient by these that by the rows of the look-ups.

    Parameters
    ----------
    rows : array, shape (look-ups, dimension)
        Of each look-up.
    bags : Bags
    combiner : {"sum", "mean"}
        An empty bag has zeros, and no gradient.
    xp : module
        NumPy or CuPy.

    Returns
    -------
    array, shape (bags, dimension)
        As of `torch.nn.EmbeddingBag`.
    callable
    """
    vectors = sum_by_place(rows, bags.of, len(bags.sizes), xp)
    sizes = xp.maximum(bags.sizes, 1).astype(rows.dtype)[:, None]
    if combiner == "mean":
        vectors /= sizes

    def pull_back(gradient: Array) -> Array:
        return (gradient / sizes if combiner == "mean" else gradient)[bags.of]

    return vectors, pull_back
