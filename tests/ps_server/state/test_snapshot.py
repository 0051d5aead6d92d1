"""A snapshot is the state at one moment, bit by bit, wherever pushes move the weights between its copies (P1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.plan.optimizers import Adam, Momentum, OptimizerSpec
from parashard.plan.partition import fixed_shards
from parashard.plan.variables import Float32s, Initializer, Variable
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import Snapshot, Storage, drawn_from
from support.in_process import SEED, plan_of, variables_of

VARIABLES = variables_of(
    Variable("bias", (3,)),
    Variable("still", (2, 2), Initializer("constant", 1.0), frozen=True),
    Variable("table", (5, 2), Initializer("normal", 1.0)),
    Variable("weight", (4, 3), Initializer("uniform", 0.5)),
)
PLAN = plan_of(VARIABLES, shards=2, partitioner=fixed_shards(2))

Bits = tuple[bytes, dict[str, bytes]]


def storage_of(spec: OptimizerSpec) -> Storage:
    return Storage(PLAN, 0, Optimizer(spec), drawn_from(SEED))


def mover(storage: Storage) -> Callable[[], None]:
    """Return what applies another gradient at each call."""
    random, t = np.random.default_rng(1), iter(range(1, 1000))
    return lambda: storage.apply(random.normal(size=storage.elements).astype(np.float32), t=next(t))


def live(storage: Storage) -> Bits:
    return storage.weights.tobytes(), {name: slot.tobytes() for name, slot in storage.slots.items()}


def copied(snapshot: Snapshot) -> Bits:
    assert not snapshot.missing
    return snapshot.weights.tobytes(), {name: slot.tobytes() for name, slot in snapshot.slots.items()}


def whole(snapshot: Snapshot) -> Snapshot:
    while snapshot.save_next():
        pass
    return snapshot


@given(st.lists(st.sampled_from(["push", "copy"]), max_size=14), st.integers(0, 3))
def test_pushes_and_copies_in_any_order_give_the_state_at_the_cut(events: list[str], before: int) -> None:
    storage = storage_of(Adam(learning_rate=0.1))
    push = mover(storage)
    for _ in range(before):
        push()
    at_the_cut = live(storage)
    snapshot = storage.snapshot()
    for event in events:
        if event == "push":
            push()
        else:
            snapshot.save_next()
    assert copied(whole(snapshot)) == at_the_cut


def test_pushes_wait_for_the_copy_of_one_partition() -> None:
    storage = storage_of(Momentum(learning_rate=0.1))
    snapshot = storage.snapshot()
    left = [len(storage.layout)]
    while snapshot.save_next():
        left.append(len(snapshot.missing))
    assert len(left) > 2
    assert left == list(range(left[0], 0, -1))
    assert not snapshot.save_next(), "nothing is left to copy"


def test_the_copies_are_the_snapshot_s_own() -> None:
    storage = storage_of(Adam(learning_rate=0.1))
    push = mover(storage)
    snapshot = whole(storage.snapshot())
    before = copied(snapshot)
    for _ in range(3):
        push()
    assert copied(snapshot) == before
    assert live(storage) != before


@pytest.mark.parametrize("copies", [0, 1])
def test_a_later_snapshot_leaves_an_earlier_one_at_its_own_moment(copies: int) -> None:
    storage = storage_of(Adam(learning_rate=0.1))
    push = mover(storage)
    push()
    at_first, first = live(storage), storage.snapshot()
    for _ in range(copies):
        first.save_next()
    second = storage.snapshot()
    push()
    at_third, third = live(storage), storage.snapshot()
    push()
    assert copied(whole(first)) == copied(whole(second)) == at_first
    assert copied(whole(third)) == at_third


def test_a_snapshot_that_is_whole_is_let_go_of_by_the_next_push() -> None:
    storage = storage_of(Adam(learning_rate=0.1))
    whole(storage.snapshot())
    mover(storage)()
    assert storage._snapshot is None


def test_a_snapshot_changes_nothing_in_what_is_computed() -> None:  # P15
    plain, saved = storage_of(Adam(learning_rate=0.1)), storage_of(Adam(learning_rate=0.1))
    push_plain, push_saved = mover(plain), mover(saved)
    for step in range(6):
        push_plain()
        if step % 2:
            saved.snapshot().save_next()
        push_saved()
    assert live(saved) == live(plain)


def test_the_layout_is_the_shard_s() -> None:
    storage = storage_of(Adam())
    snapshot = storage.snapshot()
    assert snapshot.layout == storage.layout
    values: Float32s = snapshot.weights
    assert (values.shape, values.dtype, set(snapshot.slots)) == ((storage.elements,), np.float32, {"m", "v"})
