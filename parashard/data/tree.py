"""Trees: arrays in nested dicts, tuples and lists, such as several inputs; each leaf has a path as its name.

Owns what is a branch, the names of leaves, and the same function on every leaf. Knows no kind of array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    """Return a tree of what a function makes of each leaf, and of the leaves at its place in trees of the same form."""
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
