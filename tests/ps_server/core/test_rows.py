"""Rows of tables in a shard: in with their step's dense gradient or not at all, and each occurrence counted once.

Rules P28 and P34.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parashard.checkpoints.catalogue import CheckpointId
from parashard.checkpoints.state import ShardState, load
from parashard.errors import (
    DamagedCheckpoint,
    JobFailed,
    LimitExceeded,
    MalformedFrame,
    NonFiniteGradient,
    ShapeMismatch,
    StaleRound,
    UnknownVariable,
)
from parashard.plan.embedding import EmbeddingTable, Keys, cut_by_shard, first_rows, mixed
from parashard.plan.optimizers import SGD, Adagrad
from parashard.plan.variables import Float32s, Initializer, Variable
from parashard.protocol.messages import Buffers, DType, PullRun, Push, PushResult, RowSlice
from parashard_server.core.shard import Shard
from parashard_server.core.update_policies import ImmediateUpdates, RoundUpdates
from parashard_server.durability.checkpoint_writer import write_cut
from parashard_server.state.rows.embedding_tables import EmbeddingTables
from support.in_process import COUNTING, SEED, plan_of, push_for, shard_of, state_of, variables_of
from support.row_pieces import next_piece
from support.store_fakes import MemoryStore

PLAN = plan_of(variables_of(Variable("bias", (2,))))
LEDGER = EmbeddingTable("seen", 1, COUNTING)
"""Its rows begin at 0 and add up what is pushed: the number of a key's occurrences."""
USER = EmbeddingTable("user", 3, Adagrad(0.1), Initializer("normal", 0.1))
ROWS_MAX = 1000


def shard_with(
    *tables: EmbeddingTable, index: int = 0, shards: int = 1, rows_max: int = ROWS_MAX, **more: Any
) -> Shard:
    bounded = [replace(table, rows_max=rows_max) for table in tables]
    return shard_of(PLAN, tables=EmbeddingTables(bounded, SEED, index, shards), **more)


def keys_of(*ids: int) -> Keys:
    return np.sort(mixed(np.array(ids, np.int64)))


def gradients_of(step: int, keys: Keys, row_elements: int = 3) -> Float32s:
    """Return numbers whose float32 sum depends on the order of adding."""
    drawn = np.random.default_rng(step).standard_normal((len(keys), row_elements)) * 10.0 ** (step % 5)
    return drawn.astype(np.float32)


def rows_push(shard: Shard, step: int, pushed: Mapping[str, tuple[Keys, Float32s]], **changed: Any) -> Push:
    """Return a step's push: ones for the dense variable, and gradients of rows."""
    whole = push_for(shard, step, [1.0, 1.0])
    pieces = [piece for keys, values in pushed.values() for piece in (keys, np.asarray(values, np.float32))]
    return whole._replace(
        **{
            "payload": Buffers([*whole.payload.pieces, *pieces]),
            "rows": tuple(RowSlice(name, len(keys), values.shape[-1]) for name, (keys, values) in pushed.items()),
        }
        | changed
    )


def pulled(shard: Shard, table: str, keys: Keys, round_: int | None = None) -> tuple[list[bool], Float32s]:
    rows = shard.pull(PullRun(shard.identity, round_, None, 0, 0, keys={table: keys})).rows[table]
    return rows.present.tolist(), rows.values.copy()


def everything(shard: Shard) -> tuple[Any, ...]:
    """Return all that a refusal must not change, rows among it."""
    assert shard.tables is not None
    found = {name: table.pull(keys_of(*range(60)), 0) for name, table in shard.tables.by_name.items()}
    rows = {name: (present.tobytes(), values.tobytes()) for name, (present, values) in found.items()}
    return state_of(shard), rows, shard.tables.rows, [dict(one) for one in shard.updates.waiting_rows]


def test_a_step_moves_variables_and_rows_together() -> None:  # P1
    shard, keys = shard_with(USER), keys_of(1, 2)
    ack = shard.push(rows_push(shard, 3, {"user": (keys, gradients_of(3, keys))}))
    assert ack.result is PushResult.APPLIED
    assert shard.storage.weights.tolist() == [1.0, 1.0]
    present, _ = pulled(shard, "user", keys_of(1, 2, 3))
    assert sorted(present) == [False, True, True]


def test_a_row_that_nobody_pushed_is_its_initial_row() -> None:  # P27
    shard, keys = shard_with(EmbeddingTable("user", 3, SGD(1.0), USER.initializer)), keys_of(1)
    gradient = gradients_of(0, keys)
    assert pulled(shard, "user", keys)[0] == [False]
    shard.push(rows_push(shard, 0, {"user": (keys, gradient)}))
    expected = first_rows(USER, SEED)(keys) - gradient
    assert pulled(shard, "user", keys)[1].tobytes() == expected.tobytes()


def test_a_push_that_comes_again_moves_no_row_again() -> None:  # P4
    shard, keys = shard_with(LEDGER), keys_of(7)
    for _ in range(3):
        ack = shard.push(rows_push(shard, 0, {"seen": (keys, np.ones((1, 1), np.float32))}))
    assert ack.result is PushResult.DUPLICATE
    assert pulled(shard, "seen", keys)[1].tolist() == [[1.0]]


STEPS = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=1, max_size=8)


def occurrences(shard_steps: Sequence[Sequence[int]], scale: float = 1.0) -> dict[int, float]:
    counted = Counter(key for ids in shard_steps for key in ids)
    return {key: scale * times for key, times in counted.items()}


def ledger_rows(ids: Sequence[int]) -> tuple[Keys, Float32s]:
    """Return a step's push for the ledger: how often each of its keys occurs."""
    keys, counts = np.unique(mixed(np.array(ids, np.int64)), return_counts=True)
    return keys, counts.astype(np.float32)[:, None]


@settings(max_examples=40)
@given(STEPS, st.randoms(use_true_random=False), st.integers(1, 3), st.sampled_from([None, 2, 4]))
def test_every_occurrence_counts_once(
    steps: list[list[int]], random: Any, shards: int, round_steps: int | None
) -> None:
    """Whatever comes twice, in whatever order within a round, on however many shards."""
    parts = [
        shard_with(LEDGER, index=index, shards=shards, round_steps=round_steps, steps=len(steps), mean=False)
        for index in range(shards)
    ]
    size = round_steps or len(steps)
    for first in range(0, len(steps), size):
        order = [step for step in range(first, min(first + size, len(steps))) for _ in range(2)]
        random.shuffle(order)
        for step in order:
            keys, values = ledger_rows(steps[step])
            for shard, run in zip(parts, cut_by_shard(keys, shards), strict=True):
                shard.push(rows_push(shard, step, {"seen": (keys[run], values[run])}))
    expected = occurrences(steps)
    words = keys_of(*range(31))
    found: dict[int, float] = {}
    for shard, run in zip(parts, cut_by_shard(words, shards), strict=True):
        if round_steps is not None:
            shard.updates.reach(-(-len(steps) // round_steps))
        mine = words[run]
        present, values = pulled(shard, "seen", mine, shard.updates.round)
        found |= dict(zip(mine[present].tolist(), values[:, 0].tolist(), strict=True))
    assert found == {int(mixed(np.array([key]))[0]): times for key, times in expected.items()}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_a_round_has_the_bits_of_its_steps_in_order(order: tuple[int, ...]) -> None:  # P35
    digests = []
    for arrival in ((0, 1, 2, 3), order):
        shard = shard_with(EmbeddingTable("user", 3, SGD(1.0)), round_steps=4, steps=4)
        for step in arrival:
            keys = keys_of(*range(step, step + 5))
            shard.push(rows_push(shard, step, {"user": (keys, gradients_of(step, keys))}))
        present, values = pulled(shard, "user", keys_of(*range(8)), 1)
        assert present == [True] * 8
        digests.append(values.tobytes())
    assert digests[0] == digests[1]


def test_a_rounds_rows_are_divided_by_its_steps() -> None:
    shard = shard_with(LEDGER, round_steps=4, steps=4)
    for step in range(4):
        shard.push(rows_push(shard, step, {"seen": ledger_rows([5] if step < 2 else [6])}))
    assert pulled(shard, "seen", keys_of(5, 6), 1)[1].tolist() == [[0.5], [0.5]]


def test_an_empty_push_touches_no_table() -> None:
    shard = shard_with(USER)
    keys = keys_of(1)
    shard.push(rows_push(shard, 0, {"user": (keys, gradients_of(0, keys))}))
    before = pulled(shard, "user", keys)[1]
    shard.push(Push(shard.identity, "", 1, (), True, None, Buffers()))
    assert pulled(shard, "user", keys)[1].tobytes() == before.tobytes()


def test_a_step_that_is_given_up_takes_its_rows_with_it() -> None:
    shard = shard_with(LEDGER, round_steps=2, steps=2, mean=False)
    shard.push(rows_push(shard, 1, {"seen": ledger_rows([5])}))  # waits for step 0
    shard.push(Push(shard.identity, "", 1, (), True, None, Buffers()))
    shard.push(rows_push(shard, 0, {"seen": ledger_rows([6])}))
    assert pulled(shard, "seen", keys_of(5, 6), 1)[1].tolist() == [[1.0]]


def test_a_round_that_begins_again_has_no_rows() -> None:
    shard = shard_with(LEDGER, round_steps=2, steps=2, mean=False)
    shard.push(rows_push(shard, 0, {"seen": ledger_rows([5])}))
    shard.begin_round_again(2)
    assert not list(shard.updates.waiting_rows), "no room is kept for them"
    for step in (0, 1):
        shard.push(rows_push(shard, step, {"seen": ledger_rows([5])}))
    assert pulled(shard, "seen", keys_of(5), 1)[1].tolist() == [[2.0]]


def test_a_payload_is_borrowed_for_its_push_alone() -> None:
    shard = shard_with(LEDGER, round_steps=2, steps=2, mean=False)
    for step in (0, 1):
        push = rows_push(shard, step, {"seen": ledger_rows([5])})
        memory = bytearray(push.payload.whole())
        shard.push(push._replace(payload=Buffers([memory])))
        memory[:] = bytes(len(memory))
    assert pulled(shard, "seen", keys_of(5), 1)[1].tolist() == [[2.0]]


def test_a_pull_is_of_its_round() -> None:
    shard = shard_with(LEDGER, round_steps=1, steps=2)
    with pytest.raises(StaleRound):
        pulled(shard, "seen", keys_of(5), 1)
    shard.push(rows_push(shard, 0, {"seen": ledger_rows([5])}))
    assert pulled(shard, "seen", keys_of(5), 0)[0] == [False]
    assert pulled(shard, "seen", keys_of(5), 1)[0] == [True]


def not_finite(shard: Shard) -> Push:
    values = np.array([[1.0, np.nan, 1.0]], np.float32)
    return rows_push(shard, 9, {"user": (keys_of(1), values)})


def in_int8(shard: Shard, table: str = "thrifty", *, scale: float = 1.0, more: bytes = b"") -> Push:
    """Return a push of a row of three numbers with a scale."""
    content = keys_of(1).tobytes() + np.float32(scale).tobytes() + bytes(3) + more
    whole = push_for(shard, 9, [1.0, 1.0])
    payload = Buffers([*whole.payload.pieces, content])
    return whole._replace(payload=payload, rows=(RowSlice(table, 1, 3, DType.INT8),))


THRIFTY = replace(USER, name="thrifty", encoding="int8", keys_per_step_max=1)
ONE = keys_of(1)
VALUES = np.ones((1, 3), np.float32)
TWO = (np.sort(keys_of(1, 2))[::-1].copy(), np.ones((2, 3), np.float32))
REFUSED: dict[str, tuple[Callable[[Shard], Push], type[Exception], str]] = {
    "no such table": (
        lambda s: rows_push(s, 9, {"item": (ONE, VALUES)}),
        UnknownVariable,
        "'item' is none of the job's",
    ),
    "another dimension": (
        lambda s: rows_push(s, 9, {"user": (ONE, np.ones((1, 2), np.float32))}),
        ShapeMismatch,
        "rows have 3 elements, found 2",
    ),
    "NaN": (not_finite, NonFiniteGradient, "a row has a value that is not finite"),
    "keys not in order": (lambda s: rows_push(s, 9, {"user": TWO}), MalformedFrame, "not ascending"),
    "a key twice": (
        lambda s: rows_push(s, 9, {"user": (np.repeat(ONE, 2), np.ones((2, 3), np.float32))}),
        MalformedFrame,
        "not ascending, each once",
    ),
    "more keys than bytes": (
        lambda s: rows_push(s, 9, {"user": (ONE, VALUES)}, rows=(RowSlice("user", 2**40, 3),)),
        ShapeMismatch,
        "the slices need .* bytes",
    ),
    "a table twice": (
        lambda s: rows_push(
            s,
            9,
            {"user": (keys_of(1, 2), np.ones((2, 3), np.float32))},
            rows=(RowSlice("user", 1, 3), RowSlice("user", 1, 3)),
        ),
        MalformedFrame,
        "named twice",
    ),
    "too many": (
        lambda s: rows_push(s, 9, {"user": (keys_of(*range(24)), np.ones((24, 3), np.float32))}),
        JobFailed,
        "no room for 2[24] more",
    ),
    "another encoding": (lambda s: in_int8(s, "user"), ShapeMismatch, "rows travel as FLOAT32, found INT8"),
    "not encoded": (
        lambda s: rows_push(s, 9, {"thrifty": (ONE, VALUES)}),
        ShapeMismatch,
        "rows travel as INT8, found FLOAT32",
    ),
    "a scale that is NaN": (lambda s: in_int8(s, scale=np.nan), MalformedFrame, "has a scale that is not in"),
    "an infinite scale": (lambda s: in_int8(s, scale=np.inf), MalformedFrame, "has a scale that is not in"),
    "more keys than a step may use": (
        lambda s: in_int8(s, more=bytes(8 + 4 + 3))._replace(rows=(RowSlice("thrifty", 2, 3, DType.INT8),)),
        LimitExceeded,
        "'thrifty': a push of 2 keys; its keys_per_step_max is 1",
    ),
    "longer than its rows": (lambda s: in_int8(s, more=b"1"), ShapeMismatch, "need 23 bytes, the push has 24"),
    "rows in an empty push": (
        lambda s: rows_push(s, 9, {"user": (ONE, VALUES)}, skipped=True),
        MalformedFrame,
        "an empty push has no rows",
    ),
}


@pytest.mark.parametrize("round_steps", [None, 10])
@pytest.mark.parametrize("wrong", REFUSED)
def test_what_cannot_be_right_is_refused_before_any_write(wrong: str, round_steps: int | None) -> None:  # P14
    make, kind, says = REFUSED[wrong]
    shard = shard_with(USER, THRIFTY, rows_max=22, round_steps=round_steps, steps=10)
    keys = keys_of(1, 2)
    shard.push(rows_push(shard, 0, {"user": (keys, gradients_of(0, keys))}))
    before = everything(shard)
    with pytest.raises(kind, match=says):
        shard.push(make(shard))
    assert everything(shard) == before


def test_rows_behind_codes_of_an_odd_number_of_bytes_are_taken_as_they_are() -> None:
    shard, keys = shard_with(replace(THRIFTY, name="a"), LEDGER), keys_of(5, 6)
    whole, ones = in_int8(shard, "a"), np.ones((2, 1), np.float32)
    pieces = Buffers([*whole.payload.pieces, keys, ones])
    shard.push(whole._replace(payload=pieces, rows=(*whole.rows, RowSlice("seen", 2, 1))))
    assert pulled(shard, "seen", keys)[1].tolist() == [[1.0], [1.0]]


def test_what_an_encoding_saves_is_counted() -> None:
    shard = shard_with(THRIFTY)
    shard.push(in_int8(shard))
    assert shard.record.push_bytes == 8 + 8 + 4 + 3
    assert shard.record.push_float32_bytes == 8 + 8 + 4 * 3


def test_bytes_of_rows_are_counted_by_table_as_they_travel() -> None:
    shard = shard_with(THRIFTY, USER)
    for _ in range(2):
        shard.push(in_int8(shard))  # the second one is a duplicate
    with pytest.raises(MalformedFrame):
        shard.push(in_int8(shard, scale=-1.0)._replace(step=10))
    pulled(shard, "thrifty", keys_of(*range(9)))
    assert shard.tables is not None
    counted = {name: (table.pulled_bytes, table.pushed_bytes) for name, table in shard.tables.by_name.items()}
    assert counted == {"thrifty": (9 * 8 + 2 + 1 * 12, 8 + 4 + 3), "user": (0, 0)}


def test_a_key_of_another_shard_is_refused() -> None:
    words = keys_of(*range(100))
    mine, others = (words[run] for run in cut_by_shard(words, 2))
    shard = shard_with(USER, index=0, shards=2)
    pulled(shard, "user", mine)
    with pytest.raises(UnknownVariable, match=r"this shard has \[0, 2048\)"):
        pulled(shard, "user", others)
    with pytest.raises(UnknownVariable, match=r"this shard has"):
        shard.push(rows_push(shard, 0, {"user": (words, gradients_of(0, words))}))


def test_a_job_without_tables_takes_no_rows() -> None:
    shard = shard_of(PLAN)
    with pytest.raises(MalformedFrame, match="this job has no tables"):
        shard.push(rows_push(shard, 0, {"user": (ONE, VALUES)}))
    with pytest.raises(MalformedFrame, match="this job has no tables"):
        pulled(shard, "user", ONE)


# --- checkpoints ---


def saved(shard: Shard, store: MemoryStore) -> ShardState:
    """Cut, store and read a shard's state."""
    cut = shard.cut()
    while cut.snapshot.save_next():
        pass
    host: Any = SimpleNamespace(shard=shard, run_exclusive=lambda call: call(shard))
    claims: Any = SimpleNamespace(check=lambda: None)
    manifest = write_cut(store, CheckpointId(PLAN.version, 0, 1, 1), cut, host, claims)
    return load(store, manifest)


@pytest.mark.parametrize("round_steps", [None, 2])
def test_a_restored_shard_goes_on_with_the_same_bits(store: MemoryStore, round_steps: int | None) -> None:  # P1
    """At a cut, whatever has been pushed since; rows, slots, t and last use are all in it."""

    def pushed(shard: Shard, steps: Sequence[int]) -> None:
        for step in steps:
            keys = keys_of(*range(step, step + 4))
            shard.push(rows_push(shard, step, {"user": (keys, gradients_of(step, keys))}))

    quiet = shard_with(USER, round_steps=round_steps, steps=6)
    pushed(quiet, range(6))
    killed = shard_with(USER, round_steps=round_steps, steps=6)
    pushed(killed, range(4))
    killed.updates.reach(None if round_steps is None else 2)
    state = saved(killed, store)
    pushed(killed, (4,))
    again = shard_with(USER, round_steps=round_steps, steps=6)
    assert again.tables is not None
    again.tables.restore(state.rows)
    saving = again.tables.cut(state.version).savings["user"]
    saving.prepare()
    records = next_piece(saving)
    assert records is not None
    for (_, stored), copy in zip(state.rows, [saving.stored(records)], strict=True):
        assert [array.tobytes() for array in copy[:4]] == [array.tobytes() for array in stored[:4]]
    restored = going_on_from(again, state, round_steps)
    pushed(restored, (4, 5))
    keys = keys_of(*range(9))
    rounds = None if round_steps is None else 3
    assert pulled(restored, "user", keys, rounds)[1].tobytes() == pulled(quiet, "user", keys, rounds)[1].tobytes()


def going_on_from(shard: Shard, state: ShardState, round_steps: int | None) -> Shard:
    """Return a shard with the same tables whose steps are those of the state."""
    storage, tables = shard.storage, shard.tables
    updates = (
        ImmediateUpdates(storage, applied=state.applied.copy(), tables=tables)
        if round_steps is None
        else RoundUpdates(
            storage, round_steps=round_steps, steps_total=6, mean=True, round_=state.round or 0, tables=tables
        )
    )
    return Shard(shard.identity, 6, storage, updates, tables=tables)


def test_what_is_restored_is_of_the_jobs_tables(store: MemoryStore) -> None:
    shard, keys = shard_with(USER), keys_of(1)
    shard.push(rows_push(shard, 0, {"user": (keys, gradients_of(0, keys))}))
    state = saved(shard, store)
    for other, says in ((LEDGER, "none of the job's"), (EmbeddingTable("user", 2, Adagrad(0.1)), "rows of 3 elements")):
        tables = shard_with(other).tables
        assert tables is not None
        with pytest.raises(DamagedCheckpoint, match=says):
            tables.restore(state.rows)
