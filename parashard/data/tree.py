"""Arrays of examples: trees of them (nested dicts, tuples and lists), such as several inputs, and ragged arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Tree = Any
"""An array, or a dict, tuple or list of trees."""


def leaves(tree: Tree, path: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of a tree with their paths, such as ("inputs/ids", ids), in its own order."""
    if isinstance(tree, dict):
        return [leaf for key, below in tree.items() for leaf in leaves(below, _joined(path, key))]
    if isinstance(tree, tuple | list):
        return [leaf for place, below in enumerate(tree) for leaf in leaves(below, _joined(path, place))]
    return [(path, tree)]


def map_leaves(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply a function to each leaf, with the corresponding leaves of other trees, and return the tree of results."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, tree[key], *(other[key] for other in others)) for key in tree}
    if isinstance(tree, tuple | list):
        made = [map_leaves(function, *below) for below in zip(tree, *others, strict=True)]
        if isinstance(tree, list):
            return made
        return type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)  # a named tuple stays one
    return function(tree, *others)


def rows_of(tree: Tree) -> int:
    """Return how many examples a tree of arrays has, by its first leaf."""
    return len(leaves(tree)[0][1])


def _joined(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


# --- ragged ---

Int64s = npt.NDArray[np.int64]

LISTS = "inputs/lists/"
"""Prefix of the field names (`parashard.data.base.Field`) of lists of keys, before the column's name."""
NO_KEY = -1
"""Padding of short rows of a ragged array; no value of a list column has this key."""


def run_lengths(offsets: Int64s) -> Int64s:
    """Return the length of each row."""
    lengths: Int64s = np.diff(offsets)
    return lengths


def places_of_rows(offsets: Int64s, rows: npt.NDArray[Any]) -> tuple[Int64s, Int64s]:
    """Return the indices of the values of some rows, concatenated in their order, and the offsets of the result."""
    lengths = run_lengths(offsets)[rows]
    ends: Int64s = np.concatenate(([0], np.cumsum(lengths)))
    places = np.repeat(offsets[:-1][rows] - ends[:-1], lengths) + np.arange(ends[-1])
    return places, ends


class Ragged:
    """Rows of different numbers of keys; indexing returns new padded arrays of shape (rows, width)."""

    def __init__(self, values: Int64s, offsets: Int64s, width: int) -> None:
        # `values`: those of all rows, concatenated; `offsets`: the start of each row, and the end of the last.
        self.values, self.offsets = values, offsets
        self.shape = (len(offsets) - 1, width)
        self.dtype = values.dtype
        assert run_lengths(offsets).max(initial=0) <= width

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Int64s:
        return self.take(np.arange(*rows.indices(len(self))))

    def take(self, rows: npt.NDArray[Any], axis: int = 0) -> Int64s:
        """Return these rows as an array of int64, shape (rows, width), as `ndarray.take` does."""
        assert axis == 0
        places, ends = places_of_rows(self.offsets, rows)
        padded = np.full((len(rows), self.shape[1]), NO_KEY, np.int64)
        padded[np.arange(self.shape[1]) < run_lengths(ends)[:, None]] = self.values[places]
        return padded
