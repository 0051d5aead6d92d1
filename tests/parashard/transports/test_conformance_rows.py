"""Conformance of every transport: rows of tables arrive as they were, those that are not there as a bit."""

from __future__ import annotations

import numpy as np
import pytest

from parashard.errors import LimitExceeded, MalformedFrame, UnknownVariable
from parashard.plan.embedding import floats_of, kept_as
from parashard.protocol.messages import MESSAGE_BYTES, ROWS_BYTES_MAX, DType, RowSlice, answer_bytes_of
from support.conformance_cases import DEADLINE_S, ELEMENTS, keys_of, push_of
from support.fake_plane import TABLES


def pushed(talk, table, keys):
    """Have the peer's table these rows; return their values."""
    elements = talk.plane.tables.by_name[table].table.row_elements
    values = np.random.default_rng(len(keys)).normal(size=(len(keys), elements)).astype(np.float32)
    talk.plane.tables.by_name[table].push(keys, values, clock=1)
    return values  # added to zeros


@pytest.mark.parametrize("number", [1, 7, 8, 9, 1000])
def test_rows_arrive_as_they_were(talk, number):
    keys = keys_of(*range(2 * number))
    there = np.sort(np.random.default_rng(0).permutation(keys)[:number])
    values = pushed(talk, "user", there)
    talk.plane.version = 42
    version, rows = talk.rows({"user": keys})
    assert version == 42
    assert keys[rows["user"].present].tolist() == there.tolist()
    assert rows["user"].values.tobytes() == values.tobytes()


def test_rows_of_several_tables_come_together(talk):
    keys = {"user": keys_of(1, 2, 3), "item": keys_of(9)}
    values = {name: pushed(talk, name, of_table) for name, of_table in keys.items()}
    _, rows = talk.rows(keys)
    assert {name: of_table.values.tobytes() for name, of_table in rows.items()} == {
        name: of_table.tobytes() for name, of_table in values.items()
    }


@pytest.mark.parametrize("known", [None, 0, 1], ids=["whole", "moved", "unmoved"])
@pytest.mark.parametrize("keys", [1, 700])
@pytest.mark.parametrize("row_bytes", [0, 1 << 23], ids=["without", "with"])
def test_rows_come_together_with_a_run(talk, known, keys, row_bytes):
    talk.plane.row_bytes = row_bytes
    talk.plane.move(np.arange(ELEMENTS))
    wanted = keys_of(*range(keys))
    values = pushed(talk, "item", wanted)
    into = np.full(ELEMENTS, -1, np.float32)
    version, rows = talk.rows({"item": wanted}, into.view(np.uint8), known_version=known)
    assert version == 1
    assert rows["item"].values.tobytes() == values.tobytes()
    assert into.tolist() == ([-1] * ELEMENTS if known == 1 else list(range(ELEMENTS)))
    assert len(talk.plane.pulls) == 1


def test_rows_come_with_the_first_part_of_a_long_run(start):
    elements = 3 * MESSAGE_BYTES // 4  # three messages of gRPC, six parts over TCP
    talk = start([0, elements // 2, elements])
    talk.plane.move(np.arange(elements))
    wanted = keys_of(*range(700))
    values = pushed(talk, "item", wanted)
    into = np.empty(elements, np.float32)
    _, rows = talk.rows({"user": keys_of(), "item": wanted}, into.view(np.uint8))
    assert rows["item"].values.tobytes() == values.tobytes()
    assert into.tobytes() == np.arange(elements, dtype=np.float32).tobytes()


def test_tables_without_keys_are_answered_where_nothing_has_moved(start):
    elements = 3 * MESSAGE_BYTES // 4
    talk = start([0, elements // 2, elements])
    talk.plane.move(7)
    talk.plane.move(8, 1)  # the first half is as it was
    into = np.zeros(elements, np.float32)
    version, rows = talk.rows({"user": keys_of()}, into.view(np.uint8), known_version=1)
    assert (version, rows["user"].values.shape) == (2, (0, 3))
    assert into.tolist() == [0.0] * (elements // 2) + [8.0] * (elements - elements // 2)


@pytest.mark.parametrize("number", [1, 8, 9])
def test_rows_of_bfloat16_arrive_in_two_bytes_a_number(talk, number):
    keys = keys_of(*range(number))
    values = pushed(talk, "word", keys)
    found = talk.rows({"word": keys})[1]["word"].values
    assert found.nbytes == 2 * values.size
    assert floats_of(found).tobytes() == floats_of(kept_as(values, "bfloat16")).tobytes()


def test_rows_that_nobody_pushed_are_not_sent(talk):
    _, rows = talk.rows({"user": keys_of(1, 2), "item": keys_of()})
    assert rows["user"].present.tolist() == [False, False]
    assert [of_table.values.shape for of_table in rows.values()] == [(0, 3), (0, 1024)]


def test_what_was_pulled_is_the_callers(talk):
    keys = keys_of(1, 2)
    values = pushed(talk, "user", keys)
    _, rows = talk.rows({"user": keys})
    talk.plane.tables.by_name["user"].push(keys, values, clock=2)
    talk.rows({"user": keys})
    assert rows["user"].values.tobytes() == values.tobytes()


def test_the_longest_answer_arrives_and_a_longer_one_is_refused(talk):
    item = TABLES[1]
    most = ROWS_BYTES_MAX // (4 * item.row_elements)
    while answer_bytes_of(most, item.row_elements) > ROWS_BYTES_MAX:
        most -= 1
    keys = keys_of(*range(most))
    values = pushed(talk, "item", keys)
    assert talk.rows({"item": keys})[1]["item"].values.tobytes() == values.tobytes()
    with pytest.raises(LimitExceeded, match=f"allowed are {ROWS_BYTES_MAX}"):
        talk.rows({"item": keys_of(*range(most + 1))})
    assert talk.still_talks()


REFUSED = {
    "no such table": ({"film": keys_of(1)}, UnknownVariable, "'film' is none of the job's"),
    "not ascending": ({"user": keys_of(1, 2)[::-1]}, MalformedFrame, "not ascending"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_the_shard_refuses_is_raised_and_the_connection_goes_on(talk, wrong):
    keys, kind, says = REFUSED[wrong]
    with pytest.raises(kind, match=says):
        talk.rows(keys)
    assert talk.still_talks()


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT8])
def test_a_push_has_its_rows_after_its_slices(talk, dtype):
    rows = (RowSlice("user", 2, 3, dtype), RowSlice("item", 1, 2, dtype))
    content = np.arange(sum(piece.size_bytes for piece in rows), dtype=np.uint8)
    talk.transport.push(push_of(content)._replace(rows=rows), DEADLINE_S).result()
    [taken] = talk.plane.pushes
    assert taken.rows == rows
    assert taken.payload.whole() == content.tobytes()
