"""BatchUpdates: the parts of a batch move the weights together, once, in any order of arrival."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import MalformedFrame
from parashard.plan.intervals import IntervalSet
from parashard.plan.optimizers import Adam
from parashard.plan.variables import Variable
from parashard.protocol.messages import PushResult
from parashard_server.core.update_policies import BatchUpdates, ImmediateUpdates
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import Storage, drawn_from
from support.in_process import COUNTING, SEED, plan_of, variables_of

PLAN = plan_of(variables_of(Variable("w", (3,))))
NOTHING = np.empty(0, np.float32)


def storage_of(spec: object = COUNTING) -> Storage:
    return Storage(PLAN, 0, Optimizer(spec), drawn_from(SEED))  # type: ignore[arg-type]


def gradient_of(step: int) -> np.ndarray:
    """Return numbers whose float32 sum depends on the order of adding."""
    return (np.random.default_rng(step).standard_normal(3) * 10.0 ** (step % 7)).astype(np.float32)


@given(st.permutations(range(12)))
def test_a_batch_moves_the_weights_once_when_its_last_part_comes(order: list[int]) -> None:
    storage, alone = storage_of(Adam(1e-2)), storage_of(Adam(1e-2))
    updates, reference = BatchUpdates(storage, parts=3), ImmediateUpdates(alone)
    left = {batch: 3 for batch in range(4)}
    for step in order:
        assert not updates.holds(step)
        version = updates.version
        result = updates.take(step, gradient_of(step), 0)
        assert updates.holds(step)
        left[step // 3] -= 1
        assert result is (PushResult.BUFFERED if left[step // 3] else PushResult.APPLIED)
        assert updates.version == version + (result is PushResult.APPLIED)
        if result is PushResult.APPLIED:
            parts = [gradient_of(part) for part in range(step // 3 * 3, step // 3 * 3 + 3)]
            reference.take(step, parts[0] + parts[1] + parts[2], 0)
        assert storage.weights.tolist() == alone.weights.tolist()
        assert updates.buffered_steps == sum(3 - n for n in left.values() if n)
    assert (updates.applied, updates.held) == (IntervalSet([(0, 12)]),) * 2


def test_of_a_batch_that_is_not_whole_only_the_held_steps_tell() -> None:
    updates = BatchUpdates(storage_of(), parts=2)
    updates.take(0, gradient_of(0), 0)
    updates.take(3, gradient_of(3), 0)
    assert (list(updates.applied.intervals()), list(updates.held.intervals())) == ([], [(0, 1), (3, 4)])
    updates.begin_again()
    assert not updates.held
    updates.take(0, gradient_of(0), 0)
    assert updates.take(1, gradient_of(1), 0) is PushResult.APPLIED


def test_an_empty_part_is_no_gradient_and_counts_as_come() -> None:
    storage = storage_of()
    updates = BatchUpdates(storage, parts=2)
    updates.take(1, None, 0)
    assert updates.take(0, np.ones(3, np.float32), 0) is PushResult.APPLIED
    assert storage.weights.tolist() == [1.0] * 3


def test_a_batch_without_any_gradient_moves_what_decays_and_one_that_moves_nothing_does_not() -> None:
    counted: list[int] = []
    storage = storage_of()
    storage.apply = lambda gradient, *, t, pushes, **more: counted.append(pushes)  # type: ignore[method-assign]
    updates = BatchUpdates(storage, parts=2)
    for step, gradient in enumerate([None, None, NOTHING, NOTHING, NOTHING, np.ones(3, np.float32)]):
        updates.take(step, gradient, 0)
    assert counted == [0, 1]
    assert updates.version == 3


def test_what_a_checkpoint_has_counts() -> None:
    counted: list[int] = []
    storage = storage_of()
    storage.apply = lambda gradient, *, t, **more: counted.append(t)  # type: ignore[method-assign]
    updates = BatchUpdates(storage, parts=4, applied=IntervalSet([(0, 8), (12, 16)]))
    assert updates.version == 3
    for step in range(8, 12):
        updates.take(step, gradient_of(step), 0)
    assert counted == [4]


def test_a_batch_has_the_rate_of_its_steps() -> None:
    rates: list[float | None] = []
    storage = storage_of()
    storage.apply = lambda gradient, *, learning_rate, **more: rates.append(learning_rate)  # type: ignore[method-assign]
    updates = BatchUpdates(storage, parts=2)
    for step, rate in enumerate([None, None, 0.5, 0.5]):
        updates.take(step, gradient_of(step), 0, rate)
    assert rates == [None, 0.5]


def test_it_knows_no_rounds() -> None:
    updates = BatchUpdates(storage_of(), parts=2)
    assert (updates.round, updates.replaceable(0)) == (None, False)
    updates.reach(None)
    with pytest.raises(MalformedFrame, match="has no rounds"):
        updates.reach(0)
