"""UpdatePolicy: pushes applied at once, or folded into rounds in step order; weights and applied set always agree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import MalformedFrame, StaleRound
from parashard.plan.optimizers import SGD, Adam
from parashard.plan.variables import Variable
from parashard.protocol.messages import PushResult
from parashard_server.core.update_policies import ImmediateUpdates, RoundUpdates
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import Storage, drawn_from
from support.in_process import COUNTING, SEED, plan_of, variables_of

PLAN = plan_of(variables_of(Variable("w", (3,))))


def storage_of(spec: SGD | Adam = COUNTING) -> Storage:
    return Storage(PLAN, 0, Optimizer(spec), drawn_from(SEED))


def gradient_of(step: int) -> np.ndarray:
    """Return numbers whose float32 sum depends on the order of adding."""
    return (np.random.default_rng(step).standard_normal(3) * 10.0 ** (step % 7)).astype(np.float32)


def ones(value: float = 1.0) -> np.ndarray:
    return np.full(3, value, np.float32)


def rounds(storage: Storage, n: int = 3, total: int = 100, *, mean: bool = True) -> RoundUpdates:
    return RoundUpdates(storage, round_steps=n, steps_total=total, mean=mean)


# --- ImmediateUpdates ---


def test_immediate_applies_and_records_together() -> None:  # P1
    storage = storage_of()
    updates = ImmediateUpdates(storage)
    for done, step in enumerate((7, 0, 1), start=1):
        updates.admit(step)
        assert not updates.holds(step)
        assert updates.take(step, ones()) is PushResult.APPLIED
        assert updates.holds(step)
        assert (updates.version, storage.weights.tolist()) == (done, [float(done)] * 3)
    assert list(updates.applied.intervals()) == [(0, 2), (7, 8)]
    assert updates.buffered_steps == 0


def test_t_is_the_number_of_steps_in_the_applied_set() -> None:  # P15
    counted: list[int] = []
    storage = storage_of()
    storage.apply = lambda gradient, *, t, **more: counted.append(t)  # type: ignore[method-assign]
    updates = ImmediateUpdates(storage)
    for step in (9, 4, 5):
        updates.take(step, ones())
    restored = ImmediateUpdates(storage)
    restored.applied.add_range(0, 20)
    restored.take(20, ones())
    assert counted == [1, 2, 3, 21]


def test_staleness_changes_nothing() -> None:
    storage = storage_of()
    ImmediateUpdates(storage).take(0, ones())
    assert storage.weights.tolist() == [1.0] * 3


def test_immediate_knows_no_rounds() -> None:
    updates = ImmediateUpdates(storage_of())
    updates.reach(None)
    with pytest.raises(MalformedFrame, match="names round 0; this job's consistency has no rounds"):
        updates.reach(0)


# --- RoundUpdates ---


def in_order(n: int, order: tuple[int, ...], *, mean: bool) -> np.ndarray:
    storage = storage_of(SGD(learning_rate=0.1))
    updates = rounds(storage, n, n, mean=mean)
    for step in order:
        updates.admit(step)
        updates.take(step, gradient_of(step))
    updates.reach(1)
    return storage.weights.view(np.uint32)


@given(order=st.permutations(range(7)), mean=st.booleans())
def test_the_order_of_arrival_changes_no_bit(order: list[int], mean: bool) -> None:  # P10
    assert in_order(7, tuple(order), mean=mean).tolist() == in_order(7, tuple(range(7)), mean=mean).tolist()


def test_the_order_of_adding_would_matter() -> None:
    forwards, backwards = np.zeros(3, np.float32), np.zeros(3, np.float32)
    for step in range(7):
        forwards += gradient_of(step)
        backwards += gradient_of(6 - step)
    assert forwards.tolist() != backwards.tolist()


def test_a_full_round_waits_for_a_request_of_the_next() -> None:  # P10
    storage = storage_of()
    updates = rounds(storage)
    for step in range(3):
        assert updates.take(step, ones()) is PushResult.BUFFERED
    assert (updates.version, updates.buffered_steps, len(updates.applied)) == (0, 3, 0)
    updates.reach(0)  # a request for this round still gets its weights
    assert not storage.weights.any()
    updates.reach(1)
    assert (updates.version, updates.buffered_steps, list(updates.applied.intervals())) == (1, 0, [(0, 3)])
    assert storage.weights.tolist() == [1.0] * 3


def test_a_push_for_the_next_round_commits_as_well() -> None:  # P10
    storage = storage_of()
    updates = rounds(storage)
    for step in range(3):
        updates.take(step, ones())
    updates.admit(4)
    assert (updates.version, storage.weights.tolist()) == (1, [1.0] * 3)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_round_that_lacks_a_step_is_not_committed(missing: int) -> None:  # P10
    storage = storage_of()
    updates = rounds(storage)
    for step in {0, 1, 2} - {missing}:
        updates.take(step, ones())
    for request in (lambda: updates.reach(1), lambda: updates.admit(3)):
        with pytest.raises(StaleRound, match="the request is for round 1; this shard is at round 0"):
            request()
    assert (updates.version, updates.buffered_steps) == (0, 2)
    assert not storage.weights.any()


def test_requests_for_other_rounds_are_refused() -> None:  # P11
    updates = rounds(storage_of())
    for step in range(3):
        updates.take(step, ones())
    updates.reach(1)
    for round_ in (0, 2, 3):
        with pytest.raises(StaleRound, match=f"round {round_}; this shard is at round 1"):
            updates.reach(round_)
    for step in (6, 8, 50):
        with pytest.raises(StaleRound):
            updates.admit(step)
    assert updates.version == 1


def test_every_request_names_a_round() -> None:  # P11
    with pytest.raises(MalformedFrame, match="names no round"):
        rounds(storage_of()).reach(None)


def test_an_empty_round_cannot_be_skipped() -> None:
    updates = rounds(storage_of())
    with pytest.raises(StaleRound):
        updates.reach(1)


def test_steps_are_held_from_their_arrival_for_ever() -> None:  # P1
    updates = rounds(storage_of())
    updates.take(2, ones())  # before its turn
    assert [updates.holds(step) for step in range(4)] == [False, False, True, False]
    assert updates.buffered_steps == 1
    updates.take(0, ones())
    assert [updates.holds(step) for step in range(4)] == [True, False, True, False]
    assert updates.buffered_steps == 2
    updates.take(1, ones())
    updates.reach(1)
    assert [updates.holds(step) for step in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(("mean", "moves"), [(True, [2.0, 8.0]), (False, [6.0, 8.0])])
def test_a_round_is_reduced_over_its_own_steps(mean: bool, moves: list[float]) -> None:  # P13
    storage = storage_of()
    updates = rounds(storage, 3, 4, mean=mean)  # the last round has one step
    for step, value in enumerate((1.0, 2.0, 3.0)):
        updates.take(step, ones(value))
    updates.reach(1)
    assert storage.weights[0] == moves[0]
    updates.take(3, ones(8.0))
    updates.reach(2)
    assert storage.weights[0] == moves[0] + moves[1]
    assert list(updates.applied.intervals()) == [(0, 4)]


def test_the_last_round_is_committed_by_asking_for_the_round_after_it() -> None:
    storage = storage_of()
    updates = rounds(storage, 3, 5)
    for round_, steps in enumerate(((0, 1, 2), (4, 3))):
        for step in steps:
            updates.admit(step)
            updates.take(step, ones())
        updates.reach(round_ + 1)
    updates.reach(2)  # and again: it is the round that stands
    assert (updates.version, storage.weights.tolist(), len(updates.applied)) == (2, [2.0] * 3, 5)
    with pytest.raises(StaleRound):
        updates.reach(3)


def test_t_counts_rounds() -> None:  # P15
    calls: list[tuple[int, float]] = []
    storage = storage_of()
    storage.apply = lambda gradient, *, t, scale, **more: calls.append((t, scale))  # type: ignore[method-assign]
    updates = rounds(storage, 2, 5)
    for step in range(5):
        updates.admit(step)
        updates.take(step, ones())
    updates.reach(3)
    assert calls == [(1, 0.5), (2, 0.5), (3, 1.0)]


def test_folding_keeps_no_gradient_whose_turn_has_come() -> None:  # P19
    updates = rounds(storage_of(), 4)
    for step, waiting in ((3, 1), (1, 2), (0, 1), (2, 0)):
        updates.take(step, ones())
        assert sum(map(updates._sum.waits, range(4))) == waiting


@given(data=st.data(), n=st.integers(1, 5), total=st.integers(1, 17))
def test_weights_and_applied_set_agree_after_every_request(data: st.DataObject, n: int, total: int) -> None:  # P1
    storage = storage_of()
    updates = rounds(storage, n, total, mean=False)
    last = -(-total // n)
    for round_ in range(last):
        for step in data.draw(st.permutations(range(round_ * n, min(total, (round_ + 1) * n)))):
            updates.admit(step)
            updates.take(step, ones(2.0 ** (step % 20)))
            assert storage.weights[0] == sum(
                2.0 ** (s % 20) for a, b in updates.applied.intervals() for s in range(a, b)
            )
            assert len(updates.applied) == round_ * n
    updates.reach(last)
    assert list(updates.applied.intervals()) == [(0, total)]


def test_a_push_with_a_learning_rate_of_its_own_moves_the_weights_by_that_one() -> None:  # P37
    storage = storage_of()
    updates = ImmediateUpdates(storage)
    for step, rate in enumerate([0.5, None, 0.25]):
        updates.take(step, ones(), rate)
    moved = 0.5 + COUNTING.learning_rate + 0.25
    assert storage.weights.tolist() == [-moved] * 3


def test_a_round_has_one_learning_rate_and_the_next_one_its_own() -> None:  # P37
    storage = storage_of()
    updates = rounds(storage, 2)
    updates.admit(0, 0.5)
    updates.take(0, ones(), 0.5)
    for rate in (None, 0.25):
        with pytest.raises(StaleRound, match="learning rate"):
            updates.admit(1, rate)
    updates.admit(1, 0.5)
    updates.take(1, ones(), 0.5)
    updates.admit(2, 0.25)  # commits round 0
    assert storage.weights.tolist() == [-0.5] * 3
    updates.begin_again()
    updates.admit(3, None)
    for step in (2, 3):
        updates.take(step, ones())
    updates.reach(2)
    assert storage.weights.tolist() == [-(0.5 + COUNTING.learning_rate)] * 3
