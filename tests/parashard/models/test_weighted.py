"""Losses of weighted examples: which can be weighed, and that weights without effect have none."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from parashard.models.framework import takes_weights, weighted_loss


class Values(np.ndarray):  # type: ignore[type-arg]
    """An array with PyTorch's `to`."""

    def to(self, dtype: Any) -> Values:
        return self.astype(dtype).view(Values)


def squares(outputs: Any, targets: Any, reduction: str = "mean") -> Any:
    found = ((outputs - targets) ** 2).view(Values)
    return found if reduction == "none" else found.mean()


class Squares:
    """A loss that is an object, as those of torch.nn are."""

    reduction = "mean"

    def __call__(self, outputs: Any, targets: Any) -> Any:
        return squares(outputs, targets, self.reduction)


def own(outputs: Any, targets: Any, sample_weight: Any) -> Any:
    return (((outputs - targets) ** 2) * sample_weight.reshape(-1, 1)).mean()


X, Y = np.arange(6.0).reshape(3, 2), np.ones((3, 2))
WEIGHTS = np.array([0.0, 1.0, 4.0]).view(Values)


@pytest.mark.parametrize("loss", [squares, functools.partial(squares), Squares(), own])
def test_the_mean_is_over_all_examples_whatever_they_weigh(loss: Any) -> None:
    weighted = weighted_loss(loss)
    assert weighted is not None
    assert weighted(X, Y, WEIGHTS) == ((((X - Y) ** 2).mean(1)) * WEIGHTS).sum() / 3
    assert weighted(X, Y, np.ones(3).view(Values)) == squares(X, Y)


class Summed(Squares):
    reduction = "sum"


class ByClass(Squares):
    weight = np.ones(2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: 0.0,
        lambda outputs, targets, reduction="sum": 0.0,
        functools.partial(squares, reduction="sum"),
        Summed(),
        ByClass(),
        len,
        3,
    ],
)
def test_a_loss_whose_mean_is_another_takes_no_weights(loss: Any) -> None:
    assert weighted_loss(loss) is None
    assert not takes_weights(loss)
