"""Rows saved beside pushes: each piece has the rows as they were at the cut, and an increment all that moved (P33)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import Unavailable
from parashard.plan.embedding import EmbeddingTable, KeyedRows, mixed
from parashard.plan.optimizers import Adagrad
from parashard_server.state.rows import row_saving
from parashard_server.state.rows.row_saving import RowSaving
from parashard_server.state.rows.table_rows import TableRows
from support.row_pieces import next_piece

TABLE = EmbeddingTable("user", 3, Adagrad(0.1), rows_max=1000)
KEPT = ("_cut", "_moved", "_gone", "_gone_keys", "_saving", "_saved_until", "_removed", "full_due")
KEPT += ("_waiting", "_waiting_gone", "_waiting_full")
State = dict[int, tuple[bytes, ...]]


def pushed(table: TableRows, keys: set[int], clock: int) -> None:
    words = np.sort(mixed(np.array(sorted(keys))))
    gradients = np.random.default_rng(clock).normal(size=(len(words), 3)).astype(np.float32)
    table.push(words, gradients, clock=clock)


def as_state(saving: RowSaving, pieces: list[np.ndarray]) -> State:
    """Return what pieces say, by key: t, last use, values and slots."""
    found: State = {}
    for piece in pieces:
        rows = saving.stored(piece)
        for at, key in enumerate(rows.keys.tolist()):
            parts = (rows.t[at], rows.last_use[at], rows.values[at], *(slot[at] for slot in rows.slots.values()))
            found[key] = tuple(bytes(part) for part in parts)
    return found


def all_of(saving: RowSaving) -> State:
    saving.prepare()
    pieces = []
    while (piece := next_piece(saving)) is not None:
        pieces.append(piece)
    return as_state(saving, pieces)


def now(table: TableRows, clock: int) -> State:
    """Return all rows, by a cut of a copy: the table's own cuts stay as they are."""
    kept = {name: getattr(table.records, name) for name in KEPT}
    found = all_of(table.records.cut(clock, full=True))
    vars(table.records).update(kept)
    return found


keys = st.sets(st.integers(0, 40), min_size=1, max_size=12)
pushes = st.lists(keys, max_size=4)
saves = st.tuples(pushes, st.lists(keys, max_size=6), st.booleans(), st.booleans())


@given(st.lists(saves, min_size=1, max_size=5))
def test_a_checkpoint_and_its_increments_are_the_rows_at_their_cuts(rounds: list) -> None:
    """Pushes come between the pieces; some saves fail, and what they had is in the next one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(row_saving, "PIECE_BYTES", 100)  # two rows
        table, clock, stored = TableRows(TABLE, 0), 0, {}
        any_stored = False
        for before, meanwhile, asked, succeeds in rounds:
            for some in before:
                clock += 1
                pushed(table, some, clock)
            due = now(table, clock)
            full = asked or not any_stored or table.records.full_due
            saving = table.records.cut(clock, full=full)
            cut = clock
            early, later = meanwhile[:1], iter(meanwhile[1:])
            for some in early:
                clock += 1
                pushed(table, some, clock)
            saving.prepare()
            pieces = []
            while (piece := next_piece(saving, room_rows=1 + len(pieces) % 3)) is not None:
                pieces.append(piece)
                for some in (next(later, None),):
                    if some is not None:
                        clock += 1
                        pushed(table, some, clock)
            found = as_state(saving, pieces)
            table.records.end_save(saving, cut, stored=succeeds)
            assert found.items() <= due.items()
            if succeeds:
                stored = found if full else stored | found
                any_stored = True
                assert stored == due


def test_rows_that_nobody_pushed_again_are_not_in_an_increment() -> None:
    table = TableRows(TABLE, 0)
    pushed(table, set(range(20)), 1)
    table.records.end_save(table.records.cut(1, full=True), 1, stored=True)
    pushed(table, {3, 4}, 2)
    saving = table.records.cut(2, full=False)
    assert sorted(all_of(saving)) == sorted(mixed(np.array([3, 4])).tolist())


def test_a_save_is_given_up_where_images_find_no_room_and_the_push_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_saving, "IMAGES_BYTES_LEAST", 0)
    table = TableRows(TABLE, 0)
    pushed(table, set(range(100)), 1)
    saving = table.records.cut(1, full=True)
    pushed(table, set(range(20)), 2)
    assert saving.images == 20
    pushed(table, set(range(20, 60)), 3)
    with pytest.raises(Unavailable, match="while a checkpoint was saved pushes moved more rows than"):
        next_piece(saving)
    table.records.end_save(saving, 1, stored=False)
    assert len(all_of(table.records.cut(3, full=True))) == 100


def test_a_row_that_is_saved_needs_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_saving, "PIECE_BYTES", 1)
    table = TableRows(TABLE, 0)
    pushed(table, {1, 2, 3}, 1)
    saving = table.records.cut(1, full=True)
    saving.prepare()
    next_piece(saving)
    pushed(table, {1, 2, 3, 4}, 2)
    assert saving.images == 2


def test_rows_that_are_there_from_the_start_are_saved_as_they_were_at_the_first_cut() -> None:
    table, keys = TableRows(TABLE, 0), np.sort(mixed(np.arange(3)))
    table.begin_with(KeyedRows(keys, np.full((3, 3), 7.0, np.float32)))
    saving = table.records.cut(0, full=True)
    pushed(table, {0, 1, 2}, 1)
    assert {parts[2] for parts in all_of(saving).values()} == {np.full(3, 7.0, np.float32).tobytes()}
