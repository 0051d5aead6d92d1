"""What models of every framework share: metrics by name, the seed of a step, arrays with at least one axis.

Knows no framework. Called by `parashard.torch` and `parashard.jax`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parashard.data.base import Array
from parashard.errors import ConfigurationError

Metric = str | Callable[[Any, Any], Any]
"""A known name, or a function of outputs and targets."""

ACCURACY = "accuracy"


class WrongModel(ValueError):
    """A model computes what no step can be made of. It is a failure of the step, as any other error in a model."""


def metrics_by_name(
    metrics: Sequence[Metric], known: Mapping[str, Callable[[Any, Any], Any]]
) -> dict[str, Callable[[Any, Any], Any]]:
    """Return the functions of metrics by their names.

    Raises
    ------
    ConfigurationError
        If a name is unknown, or two have the same.
    """
    found: dict[str, Callable[[Any, Any], Any]] = {}
    for metric in metrics:
        name = metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")
        function = known.get(name) if isinstance(metric, str) else metric
        if not callable(function):
            raise ConfigurationError(f"metric {metric!r} is unknown; allowed: {', '.join(known)}, or a function")
        if name in found or name == "loss":
            raise ConfigurationError(f"two metrics are named {name!r}")
        found[name] = function
    return found


def step_seed(framework: str, seed: int, step: int, part: int = 0) -> int:
    """Return what a framework's generators are seeded with before a step, or a part of one: 63 bits of all these."""
    piece = f"\0{part}" if part else ""
    digest = hashlib.sha256(f"parashard {framework}\0{seed}\0{step}{piece}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def rows(array: Array) -> Array:
    """Return an array with at least one axis: a variable has rows."""
    return array if array.ndim else array.reshape(1)
