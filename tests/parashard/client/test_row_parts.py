"""Parts of a pull's rows: every key once, and no answer or request longer than one may be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.client import pulled_rows
from parashard.client.pulled_rows import PulledRows, TableSet
from parashard.errors import MalformedFrame
from parashard.plan.embedding import EmbeddingTable, cut_by_shard, first_rows, mixed
from parashard.plan.variables import Initializer, Variable
from parashard.protocol.messages import MESSAGE_BYTES_MAX, ROWS_BYTES_MAX, FoundRows, answer_bytes_of
from support.conformance_cases import keys_of
from support.in_process import COUNTING, SEED, Cluster, plan_of, variables_of

USER = EmbeddingTable("user", 3, COUNTING, Initializer("normal", 0.1))
SEEN = EmbeddingTable("seen", 1, COUNTING)
WIDTHS = (("deep", 2), ("wide", 1))


@given(
    st.permutations(["user", "seen", "item", "word"]),
    st.lists(st.integers(0, 200), min_size=4, max_size=4),
    st.integers(1, 7),
    st.integers(100, 900),
    st.integers(64, 900),
)
def test_parts_have_every_key_once_of_one_shard(
    names: list[str], counts: list[int], shards: int, rows_bytes: int, keys_bytes: int
) -> None:
    """Rows of one number are shorter than their keys: either may be what fills a part."""
    tables = TableSet((USER, SEEN, replace(SEEN, name="item"), replace(USER, name="word")), SEED)
    keys = {name: keys_of(*range(count)) for name, count in zip(names, counts, strict=True)}
    rows = PulledRows(tables, keys)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pulled_rows, "ROWS_BYTES_MAX", rows_bytes)
        patched.setattr(pulled_rows, "MESSAGE_BYTES_MAX", keys_bytes)
        batches = rows.request_batches(shards)
    parts = [part for batch in batches for part in batch]
    assert [part.shard for part in batches[0]] == list(range(shards))
    assert all(part.keys for part in parts[shards:])
    assert all(len({part.shard for part in batch}) == len(batch) for batch in batches)
    assert max(map(rows.answer_bytes_of, parts)) <= rows_bytes
    assert max(sum(some.nbytes for some in rows.keys_of(part).values()) for part in parts) <= keys_bytes
    for name, wanted in keys.items():
        found = [rows.keys_of(part)[name] for part in parts if name in part.keys]
        assert np.sort(np.concatenate([keys_of(), *found])).tolist() == wanted.tolist()
        runs = cut_by_shard(wanted, shards)
        for part in parts:
            if name in part.keys:
                run, some = runs[part.shard], part.keys[name]
                assert run.start <= some.start < some.stop <= run.stop


@pytest.mark.parametrize("row_elements", [1, 2, 3, 64, 16384])
def test_an_answer_to_the_most_keys_of_a_part_fits_it(row_elements: int) -> None:
    at_once = pulled_rows.keys_within(ROWS_BYTES_MAX, MESSAGE_BYTES_MAX, row_elements)
    assert answer_bytes_of(at_once, row_elements) <= ROWS_BYTES_MAX
    assert 8 * at_once <= MESSAGE_BYTES_MAX
    assert answer_bytes_of(2 * at_once, row_elements) > ROWS_BYTES_MAX or row_elements == 1


@pytest.mark.parametrize("names", [["wide"], ["deep", "wide"], ["wide", "deep"]])
def test_more_keys_than_one_message_asks_for_are_asked_in_several(names: list[str]) -> None:
    """Rows of one number: their keys are longer than their answer."""
    tables = {name: EmbeddingTable(name, elements, COUNTING, Initializer("normal", 0.1)) for name, elements in WIDTHS}
    cluster = Cluster(plan_of(variables_of(Variable("w", (2,)))), tables=tuple(tables.values()))
    keys = np.sort(mixed(np.arange(524_289)))
    rows = cluster.client().pull(keys=dict.fromkeys(names, keys)).rows
    for name in names:
        assert rows[name].tobytes() == first_rows(tables[name], SEED)(keys).tobytes()


def test_rows_of_another_length_are_refused() -> None:
    rows = PulledRows(TableSet((USER,), SEED), {"user": keys_of(1, 2)})
    ((part,),) = rows.request_batches(1)
    for elements in (1, 4):
        found = FoundRows(np.array([True, True]), np.ones((2, elements), np.float32))
        with pytest.raises(MalformedFrame, match=f"table 'user': rows of {elements} elements came; they have 3"):
            rows.fill(part, {"user": found})
