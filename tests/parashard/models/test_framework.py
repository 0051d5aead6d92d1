"""What models of every framework share: a loss that pairs outputs with the wrong targets, and weights of examples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch
from parashard.errors import WrongModel
from parashard.layers import Dense
from parashard.models.framework import (
    Pairing,
    takes_weights,
    weighted_loss,
)

DRAWN = np.random.default_rng(0)
OUTPUTS, TARGETS = (DRAWN.standard_normal(32).astype(np.float32) for _ in range(2))


def checked(pairing: Pairing, outputs: Any, targets: Any, loss: Callable[[Any, Any], Any]) -> None:
    if pairing.is_doubtful(outputs, targets):
        pairing.check(outputs, targets, float(loss(outputs, targets)), lambda: float(loss(outputs, targets[::-1])))


def square(outputs: Any, targets: Any) -> Any:
    return ((outputs - targets) ** 2).mean()


def test_outputs_against_every_target_are_refused_each_time() -> None:
    pairing = Pairing()
    for _ in range(3):  # the step is computed again
        with pytest.raises(WrongModel, match=r"\(32, 1\) and targets \(32,\), which broadcast to \(32, 32\)"):
            checked(pairing, OUTPUTS[:, None], TARGETS, square)
    with pytest.raises(WrongModel, match="compares each output with every target"):
        checked(Pairing(), OUTPUTS, TARGETS[:, None], square)


def test_it_is_seen_once_outputs_differ() -> None:
    pairing, same = Pairing(), np.zeros((32, 1), np.float32)
    checked(pairing, same, TARGETS, square)
    checked(pairing, OUTPUTS[:, None], np.ones(32, np.float32), square)
    with pytest.raises(WrongModel):
        checked(pairing, OUTPUTS[:, None], TARGETS, square)


@pytest.mark.parametrize(
    ("outputs", "targets", "loss"),
    [
        (OUTPUTS, TARGETS, square),
        (OUTPUTS[:, None], TARGETS[:, None], square),
        (OUTPUTS[:, None], TARGETS, lambda o, t: square(o[:, 0], t)),
        (np.zeros((32, 1)), TARGETS, lambda o, t: square(o[:, 0], t)),
        (OUTPUTS[:1, None], TARGETS[:1], square),  # one example has one target
        (OUTPUTS.reshape(8, 4), TARGETS[:8], lambda o, t: square(o[:, 0], t)),  # an output of several numbers
        ((OUTPUTS, OUTPUTS), TARGETS, lambda o, t: square(o[0], t)),
    ],
)
def test_a_loss_that_pairs_them_is_taken(outputs: Any, targets: Any, loss: Callable[[Any, Any], Any]) -> None:
    checked(Pairing(), outputs, targets, loss)


@pytest.mark.parametrize("right", [True, False])
def test_a_function_as_the_loss_of_a_sequential(right: bool) -> None:
    def loss(outputs: Any, targets: Any, xp: Any) -> tuple[Any, Any]:
        apart = outputs - (targets[:, None] if right else targets)
        return (apart**2).mean(), 2 * apart.sum(1, keepdims=True) / apart.size

    model = ps.Sequential([Dense(1)], input_shape=(3,), loss=loss)
    inputs = DRAWN.standard_normal((32, 3)).astype(np.float32)
    variables = {name: np.ones(v.shape, np.float32) for name, v in model.initial_variables().items()}
    batch = Batch(0, 0, np.arange(32), inputs, TARGETS)
    if right:
        model.loss_and_gradients(variables, batch, np)
    else:
        with pytest.raises(WrongModel, match="compares each output with every target"):
            model.loss_and_gradients(variables, batch, np)


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
