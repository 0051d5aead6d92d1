"""Conformance of every transport: rows of tables arrive as they were, those that are not there as a bit."""

from __future__ import annotations

import numpy as np
import pytest

from parashard.errors import LimitExceeded, MalformedFrame, UnknownVariable
from parashard.plan.embedding import floats_of, kept_as
from parashard.protocol.messages import MESSAGE_BYTES_MAX, DType, RowSlice, answer_bytes_of
from support.conformance_cases import DEADLINE_S, kept, keys_of, push_of, rows_of
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
    found = talk.transport.pull_rows(rows_of({"user": keys}), kept, DEADLINE_S).result()
    assert found.version == 42
    assert keys[found.rows["user"].present].tolist() == there.tolist()
    assert found.rows["user"].values.tobytes() == values.tobytes()


def test_rows_of_several_tables_come_together(talk):
    keys = {"user": keys_of(1, 2, 3), "item": keys_of(9)}
    values = {name: pushed(talk, name, of_table) for name, of_table in keys.items()}
    found = talk.transport.pull_rows(rows_of(keys), kept, DEADLINE_S).result()
    assert {name: rows.values.tobytes() for name, rows in found.rows.items()} == {
        name: of_table.tobytes() for name, of_table in values.items()
    }


@pytest.mark.parametrize("number", [1, 8, 9])
def test_rows_of_bfloat16_arrive_in_two_bytes_a_number(talk, number):
    keys = keys_of(*range(number))
    values = pushed(talk, "word", keys)
    found = talk.transport.pull_rows(rows_of({"word": keys}), kept, DEADLINE_S).result().rows["word"].values
    assert found.nbytes == 2 * values.size
    assert floats_of(found).tobytes() == floats_of(kept_as(values, "bfloat16")).tobytes()


def test_rows_that_nobody_pushed_are_not_sent(talk):
    found = talk.transport.pull_rows(rows_of({"user": keys_of(1, 2), "item": keys_of()}), kept, DEADLINE_S).result()
    assert found.rows["user"].present.tolist() == [False, False]
    assert [rows.values.shape for rows in found.rows.values()] == [(0, 3), (0, 1024)]


def test_what_was_pulled_is_the_callers(talk):
    keys = keys_of(1, 2)
    values = pushed(talk, "user", keys)
    found = talk.transport.pull_rows(rows_of({"user": keys}), kept, DEADLINE_S).result()
    talk.plane.tables.by_name["user"].push(keys, values, clock=2)
    talk.transport.pull_rows(rows_of({"user": keys}), kept, DEADLINE_S).result()
    assert found.rows["user"].values.tobytes() == values.tobytes()


def test_the_longest_answer_arrives_and_a_longer_one_is_refused(talk):
    item = TABLES[1]
    most = MESSAGE_BYTES_MAX // (4 * item.row_elements)
    while answer_bytes_of(most, item.row_elements) > MESSAGE_BYTES_MAX:
        most -= 1
    keys = keys_of(*range(most))
    values = pushed(talk, "item", keys)
    found = talk.transport.pull_rows(rows_of({"item": keys}), kept, DEADLINE_S).result()
    assert found.rows["item"].values.tobytes() == values.tobytes()
    with pytest.raises(LimitExceeded, match=f"allowed are {MESSAGE_BYTES_MAX}"):
        talk.transport.pull_rows(rows_of({"item": keys_of(*range(most + 1))}), kept, DEADLINE_S).result()
    assert talk.still_talks()


REFUSED = {
    "no such table": ({"film": keys_of(1)}, UnknownVariable, "'film' is none of the job's"),
    "not ascending": ({"user": keys_of(1, 2)[::-1]}, MalformedFrame, "not ascending"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_the_shard_refuses_is_raised_and_the_connection_goes_on(talk, wrong):
    keys, kind, says = REFUSED[wrong]
    with pytest.raises(kind, match=says):
        talk.transport.pull_rows(rows_of(keys), kept, DEADLINE_S).result()
    assert talk.still_talks()


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT8])
def test_a_push_has_its_rows_after_its_slices(talk, dtype):
    rows = (RowSlice("user", 2, 3, dtype), RowSlice("item", 1, 2, dtype))
    content = np.arange(sum(piece.size_bytes for piece in rows), dtype=np.uint8)
    talk.transport.push(push_of(content)._replace(rows=rows), DEADLINE_S).result()
    [taken] = talk.plane.pushes
    assert taken.rows == rows
    assert taken.payload.whole() == content.tobytes()
