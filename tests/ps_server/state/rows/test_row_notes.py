"""RowNotes: what changed since a position is all there, or it is known that it is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard_server.state.rows import live_rows
from parashard_server.state.rows.live_rows import RowNotes


def items_since(notes: RowNotes, position: int) -> list[tuple[str, int]]:
    return [
        (noted.table, int(item))
        for noted in notes.since(position)
        for item in (*noted.rows.tolist(), *noted.gone.tolist())
    ]


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint32)


def test_nothing_is_noted_before_somebody_reads() -> None:
    notes = RowNotes(lambda: 0)
    notes.moved("user", rows(1))
    assert not notes.has(1)
    assert notes.begin() == notes.end == 1
    assert notes.has(1)
    assert items_since(notes, 1) == []


@given(st.lists(st.tuples(st.sampled_from(["user", "item"]), st.booleans(), st.lists(st.integers(0, 9), max_size=4))))
def test_each_item_is_there_from_its_position_on(made: list) -> None:
    notes, due = RowNotes(lambda: 0), []
    begin = notes.begin()
    for table, is_gone, items in made:
        if is_gone:
            notes.gone(table, np.array(items, np.uint64))
        else:
            notes.moved(table, rows(*items))
        due += [(table, item) for item in items]
    assert notes.end == begin + len(due)
    for skipped in range(len(due) + 1):
        assert items_since(notes, begin + skipped) == due[skipped:]
    assert not notes.has(notes.end + 1)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_rows, "ITEMS_LEAST", 4)
    monkeypatch.setattr(live_rows, "ITEMS_OF_A_NOTE", 0)


def test_a_reader_that_keeps_up_loses_nothing_however_much_changes(little_room: None) -> None:
    notes, read = RowNotes(lambda: 0), []
    position = notes.begin()
    for number in range(50):
        notes.moved("user", rows(number))
        assert notes.has(position)
        read += items_since(notes, position)
        position = notes.end
    assert read == [("user", number) for number in range(50)]


def test_what_there_is_no_room_for_is_known_to_be_lost(little_room: None) -> None:
    notes = RowNotes(lambda: 0)
    begin = notes.begin()
    for number in (1, 2, 3, 4):
        notes.moved("user", rows(number))
    assert notes.has(begin)
    notes.moved("user", rows(5))
    assert not notes.has(begin)
    first = next(position for position in range(begin, notes.end + 1) if notes.has(position))
    assert begin < first < notes.end
    assert items_since(notes, first) == [("user", number) for number in range(first - begin + 1, 6)]


def test_where_nobody_asks_nothing_is_noted_until_somebody_does_and_positions_go_on(little_room: None) -> None:
    notes = RowNotes(lambda: 0)
    begin = notes.begin()
    for number in range(20):
        notes.moved("user", rows(number))
    assert not any(notes.has(position) for position in range(notes.end + 1))
    again = notes.begin()
    assert again > begin
    notes.moved("user", rows(7))
    assert items_since(notes, again) == [("user", 7)]
    assert not notes.has(begin)


def test_a_note_of_more_than_there_is_room_for_leaves_none(little_room: None) -> None:
    notes = RowNotes(lambda: 0)
    notes.begin()
    notes.moved("user", rows(*range(9)))
    assert notes.has(notes.end)
    assert not notes.has(notes.end - 1)


def test_as_many_items_are_kept_as_there_are_rows(little_room: None) -> None:
    notes = RowNotes(lambda: 6)
    begin = notes.begin()
    notes.moved("user", rows(1, 2, 3, 4, 5, 6))
    assert notes.has(begin)
