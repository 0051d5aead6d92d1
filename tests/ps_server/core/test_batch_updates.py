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
from parashard_server.core.step_sum import PartNorms
from parashard_server.core.update_policies import BatchUpdates, ImmediateUpdates
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.rows.embedding_tables import RowGradients
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
def test_whole_batches_move_the_weights_once_each_and_in_their_order(order: list[int]) -> None:
    storage, alone = storage_of(Adam(1e-2)), storage_of(Adam(1e-2))
    updates, reference = BatchUpdates(storage, parts=3), ImmediateUpdates(alone)
    come: set[int] = set()
    for step in order:
        assert not updates.holds(step)
        result = updates.take(step, gradient_of(step))
        come.add(step)
        while come.issuperset(range(3 * reference.version, 3 * reference.version + 3)):
            parts = [gradient_of(part) for part in range(3 * reference.version, 3 * reference.version + 3)]
            reference.take(reference.version, parts[0] + parts[1] + parts[2])
        assert updates.holds(step)
        assert result is (PushResult.APPLIED if step < 3 * reference.version else PushResult.BUFFERED)
        assert (updates.version, storage.weights.tolist()) == (reference.version, alone.weights.tolist())
        assert updates.applied == IntervalSet([(0, 3 * reference.version)] if reference.version else [])
        assert updates.buffered_steps == len(come) - 3 * reference.version
        assert all(updates.holds(one) for one in come)
    assert updates.held == IntervalSet([(0, 12)])


def test_of_a_batch_that_is_not_whole_only_the_held_steps_tell() -> None:
    updates = BatchUpdates(storage_of(), parts=2)
    updates.take(0, gradient_of(0))
    updates.take(3, gradient_of(3))
    assert (list(updates.applied.intervals()), list(updates.held.intervals())) == ([], [(0, 1), (3, 4)])
    updates.begin_again()
    assert not updates.held
    updates.take(0, gradient_of(0))
    assert updates.take(1, gradient_of(1)) is PushResult.APPLIED


def test_an_empty_part_is_no_gradient_and_counts_as_come() -> None:
    storage = storage_of()
    updates = BatchUpdates(storage, parts=2)
    updates.take(1, None)
    assert updates.take(0, np.ones(3, np.float32)) is PushResult.APPLIED
    assert storage.weights.tolist() == [1.0] * 3


def test_a_batch_without_any_gradient_moves_what_decays_and_one_that_moves_nothing_does_not() -> None:
    counted: list[int] = []
    storage = storage_of()
    storage.apply = lambda gradient, *, t, pushes, **more: counted.append(pushes)  # type: ignore[method-assign]
    updates = BatchUpdates(storage, parts=2)
    for step, gradient in enumerate([None, None, NOTHING, NOTHING, NOTHING, np.ones(3, np.float32)]):
        updates.take(step, gradient)
    assert counted == [0, 1]
    assert updates.version == 3


def test_what_a_checkpoint_has_counts() -> None:
    counted: list[int] = []
    storage = storage_of()
    storage.apply = lambda gradient, *, t, **more: counted.append(t)  # type: ignore[method-assign]
    updates = BatchUpdates(storage, parts=4, applied=IntervalSet([(0, 12)]))
    assert updates.version == 3
    for step in range(12, 16):
        updates.take(step, gradient_of(step))
    assert counted == [4]


def test_a_batch_has_the_rate_of_its_steps() -> None:
    rates: list[float | None] = []
    storage = storage_of()
    storage.apply = lambda gradient, *, learning_rate, **more: rates.append(learning_rate)  # type: ignore[method-assign]
    updates = BatchUpdates(storage, parts=2)
    for step, rate in enumerate([None, None, 0.5, 0.5]):
        updates.take(step, gradient_of(step), rate)
    assert rates == [None, 0.5]


def test_it_knows_no_rounds() -> None:
    updates = BatchUpdates(storage_of(), parts=2)
    assert (updates.round, updates.replaceable(0)) == (None, False)
    updates.reach(None)
    with pytest.raises(MalformedFrame, match="has no rounds"):
        updates.reach(0)


# --- clipping (what `clip_and_weight` does on one machine, for the sum of the parts) ---


def clipped(gradient: np.ndarray, norm: float) -> np.ndarray:
    return gradient * np.float32(min(1.0, norm / np.linalg.norm(gradient.astype(np.float64))))


@given(st.integers(0, 10**6), st.floats(0.01, 10.0), st.permutations(range(3)))
def test_one_shard_clips_a_batch_as_one_machine_does(seed: int, norm: float, order: list[int]) -> None:
    storage = storage_of()
    updates = BatchUpdates(storage, parts=3, clip_norm=norm)
    parts = np.random.default_rng(seed).standard_normal((3, 3)).astype(np.float32)
    for step in order:
        updates.take(step, parts[step], norm=float(np.linalg.norm(parts[step])))
    np.testing.assert_allclose(storage.weights, clipped(parts[0] + parts[1] + parts[2], norm), rtol=1e-5)


def test_another_shard_s_share_of_the_norm_counts() -> None:
    storage = storage_of()
    updates = BatchUpdates(storage, parts=2, clip_norm=1.0)
    for step in (0, 1):  # 3 of the 5 that the part's gradient has on all shards are here
        updates.take(step, np.array([1.5, 0.0, 0.0], np.float32), norm=2.5)
    np.testing.assert_allclose(storage.weights, [3.0 / 5.0, 0.0, 0.0], rtol=1e-6)


def test_noise_that_cancels_between_parts_is_not_clipped_for() -> None:
    updates = BatchUpdates(storage := storage_of(), parts=2, clip_norm=1.0)
    for step, noise in enumerate((10.0, -10.0)):
        updates.take(step, np.array([0.25, noise, 0.0], np.float32), norm=float(np.hypot(0.25, 10.0)))
    np.testing.assert_allclose(storage.weights, [0.5, 0.0, 0.0], rtol=1e-6)


def test_a_batch_without_gradients_is_not_clipped() -> None:
    updates = BatchUpdates(storage_of(), parts=2, clip_norm=1.0)
    updates.take(0, None)
    assert updates.take(1, None) is PushResult.APPLIED
    assert PartNorms().scale(0.0, 1.0) == 1.0


def test_what_is_forgotten_of_a_batch_does_not_count_in_its_norm() -> None:
    updates = BatchUpdates(storage := storage_of(), parts=2, clip_norm=5.0)
    updates.take(0, np.full(3, 100.0, np.float32), norm=1000.0)
    updates.begin_again()
    for step in (0, 1):
        updates.take(step, np.array([1.0, 0.0, 0.0], np.float32), norm=1.0)
    assert storage.weights.tolist() == [2.0, 0.0, 0.0]


class Moved:
    """Tables that tell by how much their rows are multiplied."""

    scale = 0.0

    def apply(self, rows: object, *, t: int, scale: float, learning_rate: float | None) -> None:
        self.scale = scale


def test_rows_of_tables_are_a_part_of_the_norm() -> None:
    tables = Moved()
    updates = BatchUpdates(storage := storage_of(), parts=2, clip_norm=1.0, tables=tables)  # type: ignore[arg-type]
    rows = {"users": RowGradients(np.array([7], np.uint64), np.array([[2.0]], np.float32))}
    for step in (0, 1):  # together 3 of dense variables, and 4 of a row
        updates.take(step, np.array([1.5, 0.0, 0.0], np.float32), None, rows, norm=2.5)
    np.testing.assert_allclose(storage.weights, [3.0 / 5.0, 0.0, 0.0], rtol=1e-6)
    assert tables.scale == pytest.approx(1.0 / 5.0)
