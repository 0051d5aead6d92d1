"""Ragged arrays: rows of different lengths, handed out as arrays of one width."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from parashard.data.arrays import ArraySource, Split
from parashard.data.tree import NO_KEY, Ragged

ROWS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=8)


def ragged(rows: list[list[int]], width: int = 4) -> Ragged:
    values = np.array([value for row in rows for value in row], np.int64)
    return Ragged(values, np.cumsum([0, *map(len, rows)]), width)


def padded(rows: list[list[int]], width: int = 4) -> list[list[int]]:
    return [[*row, *[NO_KEY] * (width - len(row))] for row in rows]


@given(ROWS, st.data())
def test_rows_are_taken_in_any_order_and_filled_up(rows: list[list[int]], data: st.DataObject) -> None:
    some = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    taken = ragged(rows).take(np.array(some, np.int64))
    assert taken.tolist() == padded([rows[row] for row in some])
    assert (taken.dtype, taken.shape) == (np.int64, (len(some), 4))
    first, last = sorted(data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9))))
    assert ragged(rows)[first:last].tolist() == padded(rows[first:last])


def test_it_is_an_array_of_an_example_in_a_source() -> None:
    rows = [[1, 2, 3], [], [4]]
    numbers = np.zeros((3, 1), np.float32)

    def source(rows: list[list[int]]) -> ArraySource:
        split = Split({"numbers": numbers, "lists": {"tags": ragged(rows)}}, np.array([0, 1, 1]))
        return ArraySource(split, split, 2)

    found = source(rows)
    assert str(found.spec.fields[1]) == "inputs/lists/tags (4) int64"
    assert found.examples(np.array([2, 0]))[0]["lists"]["tags"].tolist() == padded([[4], [1, 2, 3]])
    assert found.held_out(1, 3)[0]["lists"]["tags"].tolist() == padded([[], [4]])
    prints = {source(other).spec.fingerprint for other in (rows, [[1, 2], [3], [4]], [[1, 2, 3], [4], []])}
    assert len(prints) == 3  # where values stand counts, too
    assert found.spec.fingerprint in prints
