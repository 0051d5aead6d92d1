"""Rows of a table against the readable reference, bit for bit, and what they take of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parashard.checkpoints.row_files import TableChange, as_bytes, parsed
from parashard.errors import DamagedCheckpoint, JobFailed
from parashard.plan.embedding import (
    BFLOAT16,
    EmbeddingTable,
    KeyedRows,
    Keys,
    RowDtype,
    dtype_name,
    first_rows,
    floats_of,
    mixed,
)
from parashard.plan.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Momentum,
    Nesterov,
    OptimizerSpec,
    RMSProp,
    RowwiseAdagrad,
)
from parashard.plan.row_rules import RowRules
from parashard.plan.variables import Float32s, Initializer
from parashard_server.state.rows import table_rows
from parashard_server.state.rows.row_index import SEGMENTS
from parashard_server.state.rows.table_rows import TableRows
from support.reference_rows import ReferenceRows
from support.row_pieces import next_piece

RULES: dict[str, OptimizerSpec] = {
    "sgd": SGD(0.1, weight_decay=0.01),
    "momentum": Momentum(0.1),
    "nesterov": Nesterov(0.1),
    "adagrad": Adagrad(0.1, initial_accumulator=0.1, clip_value=0.5),
    "rmsprop": RMSProp(0.1),
    "rmsprop_centered": RMSProp(0.1, centered=True, momentum=0.5, weight_decay=0.1, decoupled_weight_decay=True),
    "ftrl": FTRL(0.1, l1=0.01),
    "rowwise_adagrad": RowwiseAdagrad(0.1, initial_accumulator=0.1, weight_decay=0.01),
    "adam": Adam(0.1, weight_decay=0.01),
    "adamw": AdamW(0.1),
}
DIM = 5


def table_of(rule: OptimizerSpec, row_elements: int = DIM, rows_max: int = 1 << 17) -> EmbeddingTable:
    initializer = Initializer() if isinstance(rule, FTRL) else Initializer("normal", 0.1)
    return EmbeddingTable("user", row_elements, rule, initializer, rows_max=rows_max)


def keys_of(*ids: int) -> Keys:
    return np.sort(mixed(np.array(ids, np.int64)))


def gradients_of(seed: int, keys: int, row_elements: int = DIM) -> Float32s:
    return np.random.default_rng(seed).normal(size=(keys, row_elements)).astype(np.float32)


def same(rows: TableRows, reference: ReferenceRows, keys: Keys, now: int) -> None:
    """Assert that both have the same rows, with the same bits, t and last use."""
    present, expected = reference.pull(keys, now)
    found = rows.pull(keys, now)
    assert found.present.tolist() == present
    assert dtype_name(found.values.dtype) == rows.table.dtype
    assert floats_of(found.values).tobytes() == b"".join(row.tobytes() for row in expected)
    assert rows.rows == len(reference.rows)
    references, _, _ = rows.records.find(keys[found.present], now)
    of_reference = [reference.rows[key] for key in keys[found.present].tolist()]
    assert rows.records.memory.t_of(references).tolist() == [row.t for row in of_reference]
    assert rows.records.memory.last_use_of(references).tolist() == [row.last_use for row in of_reference]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_a_push_has_the_bits_of_the_reference(rule: str, dtype: RowDtype) -> None:
    table = replace(table_of(RULES[rule]), dtype=dtype)
    rows, reference = TableRows(table, 3), ReferenceRows(table, 3)
    pushes: list[tuple[Keys, dict[str, Any]]] = [
        (keys_of(1, 2, 3), {}),
        (keys_of(2, 3, 4), {"scale": 0.25}),
        (keys_of(3), {}),
        (keys_of(5, 1), {"learning_rate": 0.7}),
    ]
    for clock, (keys, options) in enumerate(pushes, 1):
        for each in (rows, reference):
            each.push(keys, gradients_of(clock, len(keys)), clock=clock, **options)
    same(rows, reference, keys_of(*range(8)), 99)


@settings(max_examples=25)
@given(st.lists(st.sets(st.integers(-40, 40), min_size=1), min_size=1, max_size=12), st.integers(1, 7))
def test_any_pushes_have_the_bits_of_the_reference(pushes: list[set[int]], row_elements: int) -> None:
    table = table_of(RULES["adagrad"], row_elements)
    rows, reference = TableRows(table, 0), ReferenceRows(table, 0)
    for clock, ids in enumerate(pushes, 1):
        keys = keys_of(*ids)
        gradients = gradients_of(clock, len(keys), row_elements)
        before = gradients.copy()
        rows.push(keys, gradients, clock=clock)
        reference.push(keys, gradients, clock=clock)
        assert gradients.tobytes() == before.tobytes()
    same(rows, reference, keys_of(*range(-50, 50)), 99)


def test_pieces_of_a_long_push_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "SCRATCH_ROWS", 7)
    table = table_of(RULES["ftrl"])
    rows, reference = TableRows(table, 0), ReferenceRows(table, 0)
    for clock in (1, 2):
        for each in (rows, reference):
            each.push(keys_of(*range(40)), gradients_of(clock, 40), clock=clock)
    same(rows, reference, keys_of(*range(40)), 99)


def test_a_row_that_was_never_pushed_takes_no_memory() -> None:
    rows = TableRows(table_of(RULES["sgd"]), 0)
    keys = keys_of(*range(1000))
    before = rows.memory_bytes
    found = rows.pull(keys, 1)
    assert not found.present.any()
    assert found.values.shape == (0, DIM)
    assert (rows.rows, rows.memory_bytes) == (0, before)


def test_a_first_push_moves_the_initial_row() -> None:
    table = EmbeddingTable("user", DIM, SGD(1.0), Initializer("normal", 0.1))
    rows, keys, gradient = TableRows(table, 9), keys_of(1), gradients_of(0, 1)
    rows.push(keys, gradient, clock=1)
    assert rows.pull(keys, 1).values.tobytes() == (first_rows(table, 9)(keys) - gradient).tobytes()


@pytest.mark.parametrize("rule", [name for name in RULES if name != "ftrl"])
def test_rows_that_are_there_from_the_start_move_as_first_rows_do(rule: str) -> None:
    table, keys = table_of(RULES[rule]), keys_of(3, 5, 9)
    rows, drawn = TableRows(table, 1), TableRows(table, 2)
    rows.begin_with(KeyedRows(keys, first_rows(table, 2)(keys)))
    assert rows.rows == 3
    assert rows.pull(keys, 0).present.all()
    for clock in (1, 2):
        for one in (rows, drawn):
            one.push(keys[:2], gradients_of(clock, 2), clock=clock)
    assert rows.pull(keys[:2], 2).values.tobytes() == drawn.pull(keys[:2], 2).values.tobytes()
    assert rows.pull(keys[2:], 2).values.tobytes() == first_rows(table, 2)(keys[2:]).tobytes()


def test_rows_that_are_there_from_the_start_and_unused_end_as_others_do() -> None:
    table, keys = replace(table_of(SGD(0.1)), rules=RowRules(evict_unused_steps=2)), keys_of(3, 5)
    rows = TableRows(table, 1)
    rows.begin_with(KeyedRows(keys, np.ones((2, DIM), np.float32)))
    rows.push(keys[:1], gradients_of(1, 1), clock=1)
    assert [rows.pull(keys, now).present.tolist() for now in (1, 2)] == [[True, True], [True, False]]


def test_rows_that_cannot_be_there_from_the_start_are_refused() -> None:
    table = table_of(SGD(0.1), rows_max=2)
    with pytest.raises(DamagedCheckpoint, match="begins with rows of 4 elements; due: 5"):
        TableRows(table, 1).begin_with(KeyedRows(keys_of(1), np.zeros((1, 4), np.float32)))
    with pytest.raises(JobFailed, match="no room for 3 more"):
        TableRows(table, 1).begin_with(KeyedRows(keys_of(1, 2, 3), np.zeros((3, 5), np.float32)))


def test_segments_of_the_index_grow_and_lose_nothing() -> None:
    table = EmbeddingTable("user", 1, SGD(1.0))
    rows = TableRows(table, 0)
    keys = np.random.default_rng(0).permutation(mixed(np.arange(200_000)))
    for begin in range(0, len(keys), 20_000):
        piece = keys[begin : begin + 20_000]
        rows.push(piece, -(begin + np.arange(len(piece), dtype=np.float32))[:, None], clock=1)
    found = rows.pull(keys, 1)
    assert found.present.all()
    assert found.values.ravel().tolist() == list(range(200_000))
    assert not rows.pull(mixed(np.arange(200_000, 210_000)), 1).present.any()


def test_keys_of_one_segment_find_room() -> None:
    """The worst that keys can do: all of one segment, whose places are then searched one after the other."""
    table = EmbeddingTable("user", 1, SGD(1.0))
    rows = TableRows(table, 0)
    keys = (np.arange(1000, dtype=np.uint64) << np.uint64(54)) + np.uint64(SEGMENTS - 1)  # one home, one tag, too
    rows.push(keys, np.zeros((1000, 1), np.float32), clock=1)
    assert rows.pull(keys, 1).present.all()
    assert not rows.pull(keys + np.uint64(SEGMENTS), 1).present.any()


@pytest.mark.parametrize(("rule", "row_elements"), [("sgd", 8), ("adagrad", 8), ("ftrl", 16), ("rowwise_adagrad", 8)])
def test_memory_of_a_row_is_bounded_between_growths(rule: str, row_elements: int) -> None:
    """At most 1.25 of what row, slots and 16 bytes take, from some thousand rows on."""
    table = table_of(RULES[rule], row_elements)
    rows = TableRows(table, 0)
    keys, own = mixed(np.arange(1 << 17)), 4 * (row_elements + table.slots * table.slot_elements) + 16
    for begin in range(0, len(keys), 1 << 13):
        rows.push(keys[begin : begin + (1 << 13)], np.zeros((1 << 13, row_elements), np.float32), clock=1)
        if rows.rows >= 1 << 15:
            assert rows.memory_bytes <= 1.25 * own * rows.rows


def test_a_full_table_is_told_before_anything_changes() -> None:
    rows = TableRows(table_of(RULES["sgd"], rows_max=3), 0)
    rows.push(keys_of(1, 2), gradients_of(0, 2), clock=1)
    rows.check_room([keys_of(3)], 1)
    rows.check_room([keys_of(1, 2, 3), keys_of(2, 3)], 1)
    with pytest.raises(JobFailed, match=r"table 'user' has 2 rows on this shard, of at most 3: no room for 2 more"):
        rows.check_room([keys_of(3), keys_of(4)], 1)
    assert rows.rows == 2


def test_rows_of_float16_take_half_and_never_leave_its_range() -> None:
    table = EmbeddingTable("user", 8, SGD(1.0), dtype="float16")
    rows, keys = TableRows(table, 0), keys_of(1, 2)
    assert rows.records.memory.record_bytes == 16 + 2 * 8
    rows.push(keys, np.array([[1e6] * 8, [2.0**-12 + 1] * 8], np.float32), clock=1)
    found = rows.pull(keys, 1).values
    assert found.dtype == np.float16
    assert found.tolist() == [[-65504.0] * 8, [-1.0] * 8], "the nearest that float16 has"
    assert np.isfinite(found).all()


def test_rows_of_bfloat16_take_half_and_have_the_range_of_float32() -> None:
    table = EmbeddingTable("user", 8, SGD(1.0), dtype="bfloat16")
    rows, keys = TableRows(table, 0), keys_of(1, 2, 3)
    assert rows.records.memory.record_bytes == 16 + 2 * 8
    rows.push(keys, np.array([[1e30] * 8, [2.0**-9 + 1] * 8, [3.4e38] * 8], np.float32), clock=1)
    found = rows.pull(keys, 1).values
    assert found.dtype == BFLOAT16
    assert sorted(floats_of(found)[:, 0].tolist()) == [-3.3895313892515355e38, -1.0002555517425873e30, -1.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("row_elements", [1, 2, 3])
def test_rows_of_two_bytes_come_back_from_a_checkpoint(row_elements: int, dtype: RowDtype) -> None:
    table = EmbeddingTable("user", row_elements, Adagrad(0.1), Initializer("normal", 0.1), dtype=dtype)
    rows, again, keys = TableRows(table, 0), TableRows(table, 0), keys_of(*range(9))
    rows.push(keys, gradients_of(0, 9, row_elements), clock=1)
    saving = rows.records.cut(1, full=True)
    saving.prepare()
    records = next_piece(saving)
    assert records is not None
    content = bytes(as_bytes(TableChange("user", saving.stored(records), keys_of())))
    stored = parsed(content, "it").rows
    assert dtype_name(stored.values.dtype) == dtype
    again.restore("user", stored, 1)
    assert again.pull(keys, 1).values.tobytes() == rows.pull(keys, 1).values.tobytes()
    for each in (rows, again):
        each.push(keys, gradients_of(1, 9, row_elements), clock=2)
    assert again.pull(keys, 2).values.tobytes() == rows.pull(keys, 2).values.tobytes()
    with pytest.raises(DamagedCheckpoint, match=f"in {dtype} with the slots"):
        TableRows(replace(table, dtype="float32"), 0).restore("user", stored, 1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_of_records_are_new_arrays_of_float32_whatever_is_kept(dtype: RowDtype) -> None:
    rows, keys = TableRows(replace(table_of(RULES["adagrad"]), dtype=dtype), 0), keys_of(1, 2)
    rows.push(keys, gradients_of(0, 2), clock=1)
    expected = floats_of(rows.pull(keys, 1).values).tobytes()
    found = rows.values_of(rows.records.find(keys, 1)[0])
    rows.push(keys, gradients_of(1, 2), clock=2)
    assert (found.dtype, found.tobytes()) == (np.float32, expected)
