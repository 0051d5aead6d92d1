"""The oracles find what they are for, and nothing in a job that kept its promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.models.base import Audited
from parashard.models.oracles import LEDGER_EPOCHS_MAX, TORN_VARIABLES, Ledger, Torn, TornOptions, squares_total
from support.model_cases import spec_of, start
from support.tiers import fewer

EXAMPLES, BATCH = 10, 4


def pushes(model: Any, epochs: int) -> list[Any]:
    """Return the gradients of a job's steps, whose batches straddle no epoch and reorder each one."""
    gradients = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(EXAMPLES)
        for first in range(0, EXAMPLES, BATCH):
            indices = order[first : first + BATCH]
            batch = Batch(len(gradients), epoch, indices, np.zeros((len(indices), 1)), np.zeros(len(indices)))
            loss, gradient = model.loss_and_gradients(start(model), batch, np)
            assert loss == 0.0
            gradients.append(gradient)
    return gradients


def applied(model: Any, gradients: list[Any]) -> Any:
    """Return the weights after SGD at learning rate -1."""
    variables = start(model)
    for gradient in gradients:
        for name in variables:
            variables[name] += gradient[name]
    return variables


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(spec_of((1,), examples=EXAMPLES))


def test_a_ledger_that_got_every_step_once_is_right(ledger: Ledger) -> None:
    weights = applied(ledger, pushes(ledger, 3))
    np.testing.assert_array_equal(weights["ledger"], np.tile(np.array([3, 14], np.float32), (EXAMPLES, 1)))
    assert isinstance(ledger, Audited)
    assert ledger.audit(weights, 3) == {"ledger_wrong": 0}
    assert ledger.evaluate(weights, Batch(-1, -1, np.arange(1), np.zeros(1), np.zeros(1)), np) == {}


@given(lost=st.sets(st.integers(0, 8), max_size=3), doubled=st.sets(st.integers(0, 8), max_size=3))
@fewer(4)
def test_a_ledger_shows_lost_and_doubled_steps(lost: set[int], doubled: set[int]) -> None:
    ledger = Ledger(spec_of((1,), examples=EXAMPLES))
    steps = pushes(ledger, 3)
    counts = [1 - (s in lost) + (s in doubled) for s in range(9)]
    weights = applied(ledger, [gradient for gradient, count in zip(steps, counts, strict=True) for _ in range(count)])
    wrong = ledger.audit(weights, 3)["ledger_wrong"]
    assert (wrong == 0) == (counts == [1] * 9)


def test_a_ledger_shows_errors_that_cancel_in_the_first_column(ledger: Ledger) -> None:
    first, *others = pushes(ledger, 3)
    examples = np.flatnonzero(first["ledger"][:, 0])
    of_last_epoch = Batch(6, 2, examples, np.zeros((BATCH, 1)), np.zeros(BATCH))
    _, instead = ledger.loss_and_gradients(start(ledger), of_last_epoch, np)
    weights = applied(ledger, [instead, *others])
    assert (weights["ledger"][:, 0] == 3).all()
    assert ledger.audit(weights, 3) == {"ledger_wrong": BATCH}


def test_a_ledger_counts_an_index_as_often_as_the_batch_has_it(ledger: Ledger) -> None:
    batch = Batch(0, 1, np.array([2, 2, 5]), np.zeros((3, 1)), np.zeros(3))
    _, gradients = ledger.loss_and_gradients({"ledger": np.zeros((EXAMPLES, 2), np.float64)}, batch, np)
    expected = np.zeros((EXAMPLES, 2))
    expected[2], expected[5] = (2, 8), (1, 4)
    np.testing.assert_array_equal(gradients["ledger"], expected)
    assert gradients["ledger"].dtype == np.float64


def test_a_ledger_refuses_more_epochs_than_float32_counts(ledger: Ledger) -> None:
    assert squares_total(LEDGER_EPOCHS_MAX) == sum(n * n for n in range(1, LEDGER_EPOCHS_MAX + 1)) <= 2**24
    assert squares_total(LEDGER_EPOCHS_MAX) + (LEDGER_EPOCHS_MAX + 1) ** 2 > 2**24
    weights = start(ledger)
    with pytest.raises(ConfigurationError, match=r"at most 368 epochs .* found 369"):
        ledger.audit(weights, LEDGER_EPOCHS_MAX + 1)
    batch = Batch(0, LEDGER_EPOCHS_MAX, np.arange(1), np.zeros((1, 1)), np.zeros(1))
    with pytest.raises(ConfigurationError, match="found 369"):
        ledger.loss_and_gradients(weights, batch, np)


@pytest.fixture
def torn() -> Torn:
    return Torn(TornOptions(rows=5))


def test_every_attempt_pushes_another_constant(torn: Torn, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(number.to_bytes(2, "little") for number in (0, 1, 1023, 0x8000, 0x83FF))
    monkeypatch.setattr("os.urandom", lambda count: next(drawn))
    batch = Batch(3, 0, np.arange(2), np.zeros((2, 1)), np.zeros(2))
    constants = []
    for _ in range(5):  # one step, five attempts
        loss, gradients = torn.loss_and_gradients(start(torn), batch, np)
        assert loss == 0.0
        assert gradients.keys() == torn.initial_variables().keys() == set(TORN_VARIABLES)
        values = np.concatenate([gradient.ravel() for gradient in gradients.values()])
        assert values.dtype == np.float32
        assert len(values) == 8 * 5 * 16
        assert (values == values[0]).all()
        constants.append(float(values[0]))
    assert constants == [-1 / 1024, -2 / 1024, -1.0, 1 / 1024, 1.0]


def test_whole_pushes_leave_nothing_torn(torn: Torn) -> None:
    weights = applied(torn, pushes(torn, 2))
    assert isinstance(torn, Audited)
    assert torn.audit(weights, 2) == {"torn": 0}
    assert torn.evaluate(weights, Batch(-1, -1, np.arange(1), np.zeros(1), np.zeros(1)), np) == {}


def test_two_attempts_on_two_shards_are_no_tear(torn: Torn) -> None:
    weights = applied(torn, pushes(torn, 1))
    for name in TORN_VARIABLES[4:]:
        weights[name] += 0.25
    assert torn.audit(weights, 1) == {"torn": 0}


@pytest.mark.parametrize("value", [0.25, float("nan")])
def test_a_push_applied_in_part_is_torn(torn: Torn, value: float) -> None:
    weights = applied(torn, pushes(torn, 1))
    weights["torn_02"][3:] += value
    weights["torn_06"][4, 15] += value
    assert torn.audit(weights, 1) == {"torn": 2 * 16 + 1}
