"""What of a pytree can be trained here: the paths and kinds of its leaves, and what is refused.

Knows no step. Called by `parashard.jax`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from parashard.errors import ConfigurationError
from parashard.models.jax_arrays import array_of, jax
from parashard.models.state import checked_kind


def leaves_of(tree: Any) -> dict[str, Any]:
    """Return the leaves by their paths."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(_word(key) for key in path) or "parameters": leaf for path, leaf in found}


def kinds_of(leaves: Mapping[str, Any], patterns: Mapping[str, str]) -> dict[str, str]:
    """Return what each leaf is: "" with a gradient, "frozen", or a kind of state.

    Raises
    ------
    ConfigurationError
        If a pattern matches none, or a leaf cannot be what it is to be.
    """
    kinds = dict.fromkeys(leaves, "")
    for pattern, kind in patterns.items():
        names = [name for name in leaves if fnmatchcase(name, pattern)]
        if not names:
            raise ConfigurationError(f"state: {pattern!r} matches none of the leaves: {', '.join(leaves)}")
        kinds |= {name: checked_kind(name, kind, array_of(leaves[name]).dtype) for name in names}
    for name, leaf in leaves.items():
        if not kinds[name] and not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            raise ConfigurationError(
                f"parameter {name!r} is {leaf.dtype}; allowed: real floating point, or whole numbers that state= "
                "names as a counter"
            )
    return kinds


def check(made: Any) -> None:
    """Refuse what is no tree of arrays, such as an object that JAX does not take for a tree."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(made)[0]:
        _check_leaf("/".join(map(_word, path)), leaf)


def _check_leaf(name: str, leaf: Any) -> None:
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int | complex):
        return
    kind = type(leaf).__name__
    if dataclasses.is_dataclass(leaf):
        raise ConfigurationError(
            f"init returned a {kind}, which JAX takes for one value: decorate the class with "
            "@jax.tree_util.register_dataclass"
        )
    raise ConfigurationError(
        f"parameter {name!r} is a {kind}; allowed: arrays. What is no array goes into the functions: flax.nnx.split "
        "and equinox.partition part a module"
    )


def _word(key: Any) -> str:
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))
