"""The keys that were pushed the most often: those whose rows say so, whatever ended or was restored meanwhile."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.plan.embedding import EmbeddingTable, mixed
from parashard.plan.optimizers import SGD
from parashard.plan.row_rules import NO_RULES, RowRules
from parashard_server.state.rows import records, row_memory
from parashard_server.state.rows.row_memory import HottestKeys
from parashard_server.state.rows.table_rows import HOTTEST_MAX, TableRows
from support.row_pieces import next_piece


def table_of(rules: RowRules = NO_RULES) -> TableRows:
    return TableRows(EmbeddingTable("user", 1, SGD(0.1), rows_max=1000, rules=rules), 0)


def pushed(table: TableRows, ids: set[int], clock: int) -> None:
    keys = np.sort(mixed(np.array(sorted(ids), np.int64)))
    table.push(keys, np.zeros((len(keys), 1), np.float32), clock=clock)


@given(st.lists(st.sets(st.integers(0, 30), min_size=1, max_size=20), max_size=12))
def test_they_are_those_that_a_count_of_all_finds(pushes: list[set[int]]) -> None:
    patched = pytest.MonkeyPatch()
    patched.setattr(records, "KEPT", 12)
    table, counts = table_of(), Counter[int]()
    for clock, ids in enumerate(pushes, 1):
        pushed(table, ids, clock)
        counts.update(ids)
        found = table.hottest_keys(clock)
        assert [times for _, times in found] == sorted(counts.values(), reverse=True)[:HOTTEST_MAX]
        assert all(counts[key] == times for key, times in found)
        assert len(dict(found)) == len(found)
    patched.undo()


def test_keys_are_those_of_the_model_and_negative_ones_numbers_of_64_bits() -> None:
    table = table_of()
    pushed(table, {-1, 5}, 1)
    pushed(table, {5}, 2)
    assert table.hottest_keys(2) == [(5, 2), ((1 << 64) - 1, 1)]


def test_a_row_that_is_gone_is_none_of_them_and_one_that_came_back_counts_anew() -> None:
    table = table_of(RowRules(evict_unused_steps=3))
    for clock in (1, 2, 3):
        pushed(table, {1, 2}, clock)
    for clock in (4, 5):
        pushed(table, {2}, clock)
    assert table.hottest_keys(5) == [(2, 5), (1, 3)]
    assert table.hottest_keys(6) == [(2, 5)], "1 is gone, freed or not"
    pushed(table, {1, 3}, 7)
    assert dict(table.hottest_keys(7)) == {2: 5, 1: 1, 3: 1}


def test_a_key_that_waits_for_its_row_is_none_of_them_and_one_that_had_to_wait_counts_from_there() -> None:
    table = table_of(RowRules(admit_after=3))
    for clock in (1, 2):
        pushed(table, {1}, clock)
    assert table.hottest_keys(2) == []
    pushed(table, {1}, 3)
    assert table.hottest_keys(3) == [(1, 1)]


def test_a_restored_shard_knows_as_much() -> None:
    table = table_of()
    for clock in range(1, 101):
        pushed(table, {number for number in range(100) if number < clock}, clock)
    saving = table.records.cut(100, full=True)
    saving.prepare()
    pieces = []
    while (piece := next_piece(saving)) is not None:
        pieces.append(piece)
    again = table_of()
    stored = saving.stored(np.concatenate(pieces))
    for begin in range(0, 100, 30):
        again.restore("user", stored.taken(slice(begin, begin + 30)), 100)
    assert again.hottest_keys(100) == table.hottest_keys(100) == [(key, 100 - key) for key in range(HOTTEST_MAX)]


def test_what_takes_the_place_of_the_least_is_above_it() -> None:
    hottest = HottestKeys(2)
    hottest.of_checkpoint(np.array([7, 8, 9], np.uint64), np.array([3, 1, 2], np.uint32))
    assert sorted(hottest.noted().tolist()) == [7, 9]
    hottest.of_checkpoint(np.array([4], np.uint64), np.array([1], np.uint32))
    assert sorted(hottest.noted().tolist()) == [7, 9]
    hottest.of_checkpoint(np.array([5], np.uint64), np.array([9], np.uint32))
    assert hottest.update(hottest.noted(), np.array([9, 3], np.uint32)) == [(5, 9), (7, 3)]


def test_none_are_noted_where_there_is_no_room() -> None:
    none = HottestKeys(0)
    none.of_checkpoint(np.array([7], np.uint64), np.array([3], np.uint32))
    assert len(none.noted()) == 0
    assert row_memory.KEPT > HOTTEST_MAX
