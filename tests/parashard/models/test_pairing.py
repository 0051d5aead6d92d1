"""A loss that compares each output with every target, as shapes that broadcast have it, is refused."""

from __future__ import annotations

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
