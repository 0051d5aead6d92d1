"""A restored shard that is given the same pushes in the same order ends in the same bits.

The oracle of what no job in `async` shows: the optimizer's slots and its t, the schedule, a step's own learning rate
(P37), and when rows of tables were used last (P29).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.plan.embedding import Keys, mixed
from parashard.protocol.messages import Buffers, Push, PushResult, RowSlice
from parashard_server.core.shard import Shard
from support.in_process import push_for
from support.row_pieces import next_piece
from support.shard_process import ADAM, ShardProcess, bits_of, gradient_of
from support.store_fakes import MemoryStore
from support.tiers import fewer

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": {"kind": "momentum", "learning_rate": 0.1},
    "adam": {**ADAM, "schedule": {"kind": "cosine", "decay_steps": 30, "warmup_steps": 5}},
}
TABLES = {
    "user": {"dimension": 3, "optimizer": {"kind": "adam", "learning_rate": 0.1}, "rows_max": 1000},
    "word": {"dimension": 1, "admit_after": 2, "evict_unused_steps": 4, "rows_max": 1000},
}
OF_SHARD = np.array([key for key in range(120) if mixed(np.array([key]))[0] < 1 << 63])  # the other half is shard 1's
POLICIES = ("async", "ssp:8", "auto:2", "sync:2")
STEPS = 12
OUT_OF_ORDER = (0, 1, 5, 2, 3, 4, 9, 7, 6, 8, 11, 10)

Lives = Sequence[tuple[int, bool]]
"""How many steps each life of a shard applies, and whether it then saves before it dies."""


def process(store: MemoryStore, policy: str, optimizer: dict[str, Any], **of_job: Any) -> ShardProcess:
    return ShardProcess(store, optimizer=optimizer, consistency=policy, checkpoint={"every_s": 3600.0}, **of_job)


def keys_of(step: int, count: int) -> Keys:
    return np.sort(mixed(np.random.default_rng(step).choice(OF_SHARD[:12], count, replace=False)))


def dense(shard: Shard, step: int) -> Push:
    return push_for(shard, step, gradient_of(shard, step))


def rated(shard: Shard, step: int) -> Push:
    """Return a push with a learning rate of its step's own, equal in a round and a batch."""
    return dense(shard, step)._replace(learning_rate=1.0 / (1 + step // 2))


def with_rows(shard: Shard, step: int) -> Push:
    """Return a step's push, for one table, both or none."""
    whole = dense(shard, step)
    pieces, slices = [], []
    for name, count in (("user", step % 3), ("word", step % 2 * 3)):
        if count:
            keys, elements = keys_of(step, count), TABLES[name]["dimension"]
            values = np.random.default_rng(step).normal(size=(count, elements)).astype(np.float32)
            pieces += [keys, values]
            slices.append(RowSlice(name, count, elements))
    return whole._replace(payload=Buffers([*whole.payload.pieces, *pieces]), rows=tuple(slices))


def apply(served: ShardProcess, steps: Iterable[int], made: Callable[[Shard, int], Push]) -> None:
    """Push what the shard does not hold of these steps, in their order."""
    for step in steps:
        if not served.shard.updates.holds(step):
            served.shard.push(made(served.shard, step))


def reach(served: ShardProcess, policy: str, steps: int) -> None:
    """Let whole rounds move the weights."""
    if policy.startswith("sync"):
        served.shard.updates.reach(steps // 2)


def after_deaths(
    policy: str, lives: Lives, order: Sequence[int], start: Callable[[MemoryStore], ShardProcess], made: Any
) -> ShardProcess:
    """Return the last incarnation of a shard that dies and is restored between lives, with all steps."""
    store, done = MemoryStore(), 0
    served = start(store)
    for steps, saves in lives:
        done = min(len(order), done + steps)
        apply(served, order[:done], made)
        if saves:
            served.checkpointer.take(done // 2 if policy.startswith("sync") else None)
        served = start(store)
    apply(served, order, made)
    reach(served, policy, len(order))
    return served


def undisturbed(
    policy: str, order: Sequence[int], start: Callable[[MemoryStore], ShardProcess], made: Any
) -> ShardProcess:
    served = start(MemoryStore())
    apply(served, order, made)
    reach(served, policy, len(order))
    return served


def rows_of(shard: Shard) -> dict[str, bytes]:
    """Return of each table rows, slots, counts and times of last use, candidates among them."""
    assert shard.tables is not None
    rows = {}
    for name, records in shard.tables._saved.items():
        saving = records.cut(shard.updates.version, full=True)
        saving.prepare()
        piece = next_piece(saving)
        rows[name] = b"" if piece is None else piece.tobytes()
    return rows


OTHERS = [
    pytest.param(optimizer, made, marks=pytest.mark.full("each optimizer and each kind of push has a pair before it"))
    for optimizer, made in (("momentum", dense), ("adam", rated))
]
DRAWN_LIVES = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=4)


@pytest.mark.parametrize(("optimizer", "made"), [("momentum", rated), ("adam", dense), *OTHERS])
@pytest.mark.parametrize("policy", POLICIES)
@given(lives=DRAWN_LIVES)
@fewer(4)
def test_variables_and_slots_are_those_of_a_shard_that_never_died(  # P1, P37
    policy: str, optimizer: str, made: Callable[[Shard, int], Push], lives: Lives
) -> None:
    order = range(STEPS) if policy.startswith("sync") else OUT_OF_ORDER

    def start(store: MemoryStore) -> ShardProcess:
        return process(store, policy, OPTIMIZERS[optimizer])

    restored = after_deaths(policy, lives, order, start, made)
    assert bits_of(restored.shard) == bits_of(undisturbed(policy, order, start, made).shard)


@pytest.mark.parametrize("policy", POLICIES)
@given(lives=DRAWN_LIVES)
@fewer(4)
def test_rows_come_and_go_as_in_a_shard_that_never_died(policy: str, lives: Lives) -> None:  # P29
    def start(store: MemoryStore) -> ShardProcess:
        return process(store, policy, ADAM, tables=TABLES)

    restored = after_deaths(policy, lives, range(STEPS), start, with_rows).shard
    other = undisturbed(policy, range(STEPS), start, with_rows).shard
    assert (bits_of(restored), rows_of(restored)) == (bits_of(other), rows_of(other))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_killed_shard_is_given_again_what_its_checkpoint_lacks(policy: str) -> None:  # P1
    store = MemoryStore()
    first = process(store, policy, ADAM)
    apply(first, (0, 1), dense)
    first.checkpointer.take(1 if policy == "sync:2" else None)
    apply(first, (2, 3), dense)
    second = process(store, policy, ADAM)
    assert list(second.shard.updates.held.intervals()) == [(0, 2)]
    results = [second.shard.push(dense(second.shard, step)).result for step in (1, 2)]
    assert results == [
        PushResult.DUPLICATE,
        PushResult.APPLIED if policy in ("async", "ssp:8") else PushResult.BUFFERED,
    ]
