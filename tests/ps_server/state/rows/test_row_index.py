"""The index is a mapping of keys, wherever they lie: in one segment or all, with one tag or many, of any shard."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.plan.embedding import BUCKET_BITS, BUCKETS, Keys, bucket_ranges
from parashard_server.state.rows.row_index import ABSENT, SEGMENTS, RowIndex
from parashard_server.state.rows.row_memory import RowMemory
from support.tiers import by_tier

ROWS_MAX = 4000
WORDS = st.builds(
    lambda segment, home, tag, rest: segment << 54 | home << 22 | tag << 14 | rest,
    st.sampled_from([0, 1, SEGMENTS - 1]),
    st.sampled_from([0, 1, 1 << 31, (1 << 32) - 2, (1 << 32) - 1]),
    st.sampled_from([0, 1, 2, 255]),
    st.integers(0, 7).map(lambda at: at << 11),
)
"""Keys that crowd: few segments, their first and last places, few tags."""
SHARDS = st.sampled_from([(1, 0), (2, 1), (3, 0), (3, 2), (5, 4), (BUCKETS, 7)])


def keys_of(words: list[int], buckets: tuple[int, int]) -> Keys:
    """Return the shard's keys that are spread over all bits like these, each once, ascending."""
    first, end = buckets
    shift = BUCKET_BITS - (end - first - 1).bit_length()
    keys = np.unique((np.array(words, np.uint64) >> np.uint64(shift)) + np.uint64(first << (64 - BUCKET_BITS)))
    return keys[keys >> np.uint64(64 - BUCKET_BITS) < np.uint64(end)]


@given(SHARDS, st.lists(st.tuples(st.booleans(), st.lists(WORDS, max_size=40)), max_size=12))
def test_keys_are_found_and_removed(shard: tuple[int, int], changes: list[tuple[bool, list[int]]]) -> None:
    buckets = bucket_ranges(shard[0])[shard[1]]
    memory = RowMemory(1, ROWS_MAX)
    index, due = RowIndex(memory, buckets), dict[int, int]()
    for enters, words in changes:
        keys = keys_of(words, buckets)
        if enters:
            keys = keys[[key not in due for key in keys.tolist()]]
            rows = memory.add(keys)
            index.enter(keys, rows)
            due.update(zip(keys.tolist(), rows.tolist(), strict=True))
        else:
            keys = keys[[key in due for key in keys.tolist()]]
            index.remove(keys)
            memory.give_back(np.array([due.pop(key) for key in keys.tolist()], np.uint32))
        asked = keys_of([word for _, some in changes for word in some], buckets)
        found, absent = index.find(asked)
        assert found.tolist() == [due.get(key, int(ABSENT)) for key in asked.tolist()]
        assert absent == sum(key not in due for key in asked.tolist())
        values = np.empty(len(asked), np.float32)
        memory.words[4 :: memory.stride] = np.arange(ROWS_MAX)
        again, without = index.read(asked, values)
        assert (again.tolist(), without) == (found.tolist(), absent)
        assert values[: len(asked) - absent].tolist() == [due[key] for key in asked.tolist() if key in due]


@pytest.mark.parametrize("shards", [1, 3, 8, 100])
def test_the_keys_of_a_shard_have_at_least_half_of_the_segments(shards: int) -> None:
    for buckets in list(bucket_ranges(shards))[:: by_tier(quick=1 + shards // 10, full=1)]:
        memory = RowMemory(1, 1 << 16)
        index = RowIndex(memory, buckets)
        first, end = (bucket << (64 - BUCKET_BITS) for bucket in buckets)
        keys = np.array([first + (end - first) * at // (1 << 15) for at in range(1 << 15)], np.uint64)
        index.enter(keys, memory.add(keys))
        used = np.count_nonzero(index._counts)
        assert used >= SEGMENTS // 2
        assert index._counts.max() <= 2 * len(keys) // used
