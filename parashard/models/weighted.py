"""Losses of weighted examples: sum(weight * loss) / examples, as in Keras; not divided by the sum of the weights.

Owns how a loss that returns a mean is asked for that. Knows no framework. Called by `parashard.torch`,
`parashard.jax` and `parashard.layers`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from parashard.models.framework import WrongModel

PARAMETER = "sample_weight"
"""Of a loss that applies weights itself."""

Weighted = Callable[[Any, Any, Any], Any]


def takes_weights(function: Any) -> bool:
    """Tell whether a function has a parameter for weights."""
    return PARAMETER in _parameters(function)


def weighted_loss(loss: Any) -> Weighted | None:
    """Return the loss as a function of outputs, targets and weights.

    A loss with a parameter `sample_weight` is called with it. A loss with PyTorch's `reduction`, which is "mean", gives
    the loss of each example instead, and the mean over all of its numbers is taken here. None: it can do neither, or
    weighs classes itself, so that its mean is another one.
    """
    if takes_weights(loss):
        return lambda outputs, targets, weights: loss(outputs, targets, **{PARAMETER: weights})
    if getattr(loss, "weight", None) is not None or _bound(loss).get("weight") is not None:
        return None
    reduction = _parameters(loss).get("reduction")
    if reduction is not None and reduction.default == "mean":
        return lambda outputs, targets, weights: _mean(loss(outputs, targets, reduction="none"), weights)
    if getattr(loss, "reduction", None) == "mean":  # an object, such as torch.nn.MSELoss()
        each = copy.copy(loss)
        each.reduction = "none"
        return lambda outputs, targets, weights: _mean(each(outputs, targets), weights)
    return None


def _mean(values: Any, weights: Any) -> Any:
    """Return the mean of an example's losses, each times the example's weight."""
    if values.shape[:1] != weights.shape:
        raise WrongModel(
            f"the loss gives values of shape {tuple(values.shape)} for {len(weights)} weighted examples; due is one "
            "row for each"
        )
    return (values * weights.reshape(-1, *[1] * (len(values.shape) - 1)).to(values.dtype)).mean()


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def _bound(function: Any) -> dict[str, Any]:
    return dict(function.keywords) if isinstance(function, functools.partial) else {}
