"""Rows that are looked up while they change: those of a dictionary, and what changed since is enough to catch up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.plan.embedding import buckets_of, mixed
from parashard.plan.row_rules import RowRules
from parashard.serving import published_rows as module
from parashard.serving.published_rows import BucketDigests, PublishedRows, RowChange

Model = dict[int, tuple[float, float]]

changes = st.lists(
    st.tuples(st.dictionaries(st.integers(0, 40), st.integers(0, 3)), st.sets(st.integers(0, 40))), max_size=12
)


def change_of(rows: dict[int, int], gone: set[int]) -> RowChange:
    keys = np.array(sorted(rows), np.uint64)
    values = np.array([(rows[int(key)], key) for key in keys], np.float32).reshape(len(keys), 2)
    return RowChange(keys, values, values[:, 0].astype(np.uint32), np.array(sorted(gone - set(rows)), np.uint64))


def model_after(model: Model, rows: dict[int, int], gone: set[int]) -> Model:
    kept = {key: row for key, row in model.items() if key not in gone}
    return kept | {key: (float(value), float(key)) for key, value in rows.items()}


def as_model(rows: PublishedRows) -> Model:
    found = rows.all_rows()
    return {int(key): tuple(row) for key, row in zip(found.keys, found.values.tolist(), strict=True)}


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the overlay is merged, and gone keys are forgotten, in a few changes."""
    monkeypatch.setattr(module, "OVERLAY_ROWS_MIN", 6)
    monkeypatch.setattr(module, "GONE_KEYS_MIN", 8)


@given(changes)
def test_rows_are_those_of_a_dictionary(made: list) -> None:
    rows, model = PublishedRows.empty(2), {}
    for number, (there, gone) in enumerate(made, 1):
        rows, model = rows.with_change(change_of(there, gone), number), model_after(model, there, gone)
        assert as_model(rows) == model
        assert rows.rows == len(model)
        values, present = rows.look_up(np.arange(41, dtype=np.uint64)[::-1])
        assert [key for key, is_there in zip(range(40, -1, -1), present, strict=True) if is_there] == sorted(model)[
            ::-1
        ]
        assert [tuple(row) for row in values[present].tolist()] == [model[key] for key in sorted(model)[::-1]]
        assert not values[~present].any()


@given(changes, st.data())
def test_what_changed_since_brings_an_earlier_state_to_the_present_one(made: list, data: st.DataObject) -> None:
    states = [PublishedRows.empty(2)]
    for number, (there, gone) in enumerate(made, 1):
        states.append(states[-1].with_change(change_of(there, gone), number))
    since = data.draw(st.integers(0, len(made)))
    lacking = states[-1].since(since)
    if lacking is None:
        assert since < states[-1].floor
        return
    keys, values, gone = lacking
    caught_up = states[since].with_change(RowChange(keys, values, np.zeros(len(keys), np.uint32), gone), 99)
    assert as_model(caught_up) == as_model(states[-1])


@given(changes)
def test_a_change_leaves_the_state_before_it_as_it_was(made: list) -> None:
    rows = PublishedRows.empty(2)
    for number, (there, gone) in enumerate(made, 1):
        before = as_model(rows)
        later = rows.with_change(change_of(there, gone), number)
        assert as_model(rows) == before
        rows = later


@given(changes, changes)
def test_replaced_rows_are_the_others_and_equal_ones_did_not_change(made: list, others: list) -> None:
    def made_of(changed: list) -> PublishedRows:
        rows = PublishedRows.empty(2)
        for number, (there, gone) in enumerate(changed, 1):
            rows = rows.with_change(change_of(there, gone), number)
        return rows

    rows, whole = made_of(made), made_of(others)
    number = len(made) + 1
    replaced = rows.replaced(whole, number)
    assert as_model(replaced) == as_model(whole)
    lacking = replaced.since(len(made))
    if lacking is not None:
        assert set(lacking[0].tolist()) == set(dict(as_model(whole).items() - as_model(rows).items()))


def test_rows_that_the_rules_end_are_gone() -> None:
    rows = PublishedRows.empty(2).with_change(change_of({1: 5, 2: 9, 3: 5}, set()), 1)
    ended = rows.evicted(RowRules(evict_unused_steps=10), 15)
    assert ended.gone.tolist() == [1, 3]
    later = rows.with_change(ended, 2)
    assert set(as_model(later)) == {2}
    assert later.since(1)[2].tolist() == [1, 3]


KEYS = np.sort(mixed(np.arange(9000)))
USES = np.arange(9000, dtype=np.uint32)
VALUES = np.random.default_rng(1).standard_normal((9000, 3)).astype(np.float32)


def digests(keys=KEYS, uses=USES, values=VALUES, piece: int = 9000):  # type: ignore[no-untyped-def]
    found = BucketDigests(0, 4096)
    for begin in range(0, len(keys), piece):
        some = slice(begin, begin + piece)
        found.add(keys[some], uses[some], values[some])
    return found.digests()


@pytest.mark.parametrize("piece", [1, 7, 500])
def test_pieces_do_not_matter(piece: int) -> None:
    assert digests(piece=piece) == digests()


def test_a_bucket_without_rows_is_empty() -> None:
    there = set(buckets_of(KEYS).tolist())
    assert [bucket for bucket, digest in enumerate(digests()) if digest] == sorted(there)
    assert digests(KEYS[:0], USES[:0], VALUES[:0]) == [b""] * 4096


@pytest.mark.parametrize("what", ["key", "use", "value", "row"])
def test_whatever_differs_is_seen_in_its_bucket_alone(what: str) -> None:
    keys, uses, values = KEYS.copy(), USES.copy(), VALUES.copy()
    at = 4000
    bucket = int(buckets_of(keys[at : at + 1])[0])
    if what == "key":
        keys[at] += np.uint64(1)
    elif what == "use":
        uses[at] += 1
    elif what == "value":
        values[at, 2] = np.nextafter(values[at, 2], np.float32(9))
    else:
        keys, uses, values = (np.delete(array, at, axis=0) for array in (keys, uses, values))
    pairs = zip(digests(), digests(keys, uses, values), strict=True)
    assert [number for number, (one, other) in enumerate(pairs) if one != other] == [bucket]
