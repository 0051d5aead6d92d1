"""Keys, buckets and first rows of embedding tables: functions of the key alone, whatever the number of shards (P27).

Rule P28.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import click_ids
from parashard.errors import ConfigurationError
from parashard.plan.embedding import (
    BUCKET_BITS,
    BUCKETS,
    ROWS_MAX,
    ROWS_MAX_DEFAULT,
    EmbeddingTable,
    bucket_ranges,
    buckets_of,
    cut_by_shard,
    first_rows,
    floats_of,
    kept_as,
    mixed,
    unmixed,
)
from parashard.plan.optimizers import SGD
from parashard.plan.variables import Initializer
from support import encoding_reference as reference
from support.encoding_cases import gradients

U64S = st.integers(0, 2**64 - 1)
NORMAL = EmbeddingTable("user", 8, SGD(0.1), Initializer("normal", 0.1))


@given(st.lists(U64S, min_size=1))
def test_mixing_loses_nothing(keys: list[int]) -> None:
    given_keys = np.array(keys, np.uint64)
    assert unmixed(mixed(given_keys)).tolist() == keys
    assert given_keys.tolist() == keys


def test_negative_keys_are_their_bits() -> None:
    assert mixed(np.array([-1], np.int64)).tolist() == mixed(np.array([2**64 - 1], np.uint64)).tolist()
    assert mixed(np.array([-1], np.int8)).tolist() == mixed(np.array([-1], np.int64)).tolist()


def test_keys_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="whole numbers of up to 64 bits, found float64"):
        mixed(np.array([1.0]))


@given(st.lists(U64S, unique=True), st.integers(1, 9))
def test_shards_have_runs_of_ascending_keys(keys: list[int], shards: int) -> None:
    words = np.sort(mixed(np.array(keys, np.uint64)))
    runs = cut_by_shard(words, shards)
    assert [key for run in runs for key in words[run].tolist()] == words.tolist()
    for run, (begin, end) in zip(runs, bucket_ranges(shards), strict=True):
        assert ((begin <= buckets_of(words[run])) & (buckets_of(words[run]) < end)).all()


@pytest.mark.parametrize("shards", [1, 3, 4, 1000, BUCKETS])
def test_ranges_cover_the_buckets_evenly(shards: int) -> None:
    ranges = bucket_ranges(shards)
    assert [ranges[0][0], ranges[-1][1], len(ranges)] == [0, BUCKETS, shards]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert {end - begin for begin, end in ranges} <= {BUCKETS // shards, -(-BUCKETS // shards)}


@pytest.mark.parametrize(("shards", "most"), [(2, 1.02), (4, 1.03), (8, 1.05)])
def test_a_step_asks_shards_for_equal_numbers_of_keys(shards: int, most: float) -> None:
    """Of ids by Zipf(1.2), as a recommender has them: each of a step's keys is asked for once, however hot it is."""
    keys = np.sort(mixed(np.unique(click_ids.batches()[0])))
    counts = [run.stop - run.start for run in cut_by_shard(keys, shards)]
    assert max(counts) <= most * np.mean(counts)


@pytest.mark.parametrize("shards", [0, BUCKETS + 1])
def test_more_shards_than_buckets_are_refused(shards: int) -> None:
    with pytest.raises(ConfigurationError, match="1 to 4,096 shards"):
        bucket_ranges(shards)


def test_buckets_have_equal_shares_of_keys_that_follow_each_other() -> None:
    counts = np.bincount(buckets_of(mixed(np.arange(1 << 20))), minlength=BUCKETS)
    expected = (1 << 20) / BUCKETS
    assert abs(counts - expected).max() < 6 * expected**0.5
    assert BUCKETS == 1 << BUCKET_BITS


def test_a_first_row_does_not_depend_on_its_neighbours() -> None:
    draw, words = first_rows(NORMAL, 7), mixed(np.arange(100))
    together = draw(words)
    assert together.dtype == np.float32
    assert together.shape == (100, 8)
    assert draw(words[::-1])[::-1].tobytes() == together.tobytes()
    assert draw(words[42:43]).tobytes() == together[42:43].tobytes()


def test_first_rows_have_their_bits_for_good() -> None:
    """A worker of another version would train with other rows than its shards have."""
    found = first_rows(EmbeddingTable("user", 3, SGD(0.1), Initializer("uniform", 1.0)), 0)(mixed(np.array([5])))
    assert [value.hex() for value in found[0].tolist()] == BITS


BITS = ["0x1.5836260000000p-3", "-0x1.4a748a0000000p-2", "0x1.765a540000000p-2"]


def test_first_rows_are_of_their_table_and_seed() -> None:
    words = mixed(np.arange(1000))
    ours = first_rows(NORMAL, 7)(words)
    others = [
        first_rows(NORMAL, 8)(words),
        first_rows(EmbeddingTable("item", 8, SGD(0.1), NORMAL.initializer), 7)(words),
    ]
    for other in others:
        assert abs(np.corrcoef(ours.ravel(), other.ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(ours[:, 0], ours[:, 1])[0, 1]) < 0.15
    assert abs(ours.std() - 0.1) < 0.005


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"name": ""}, "a table's name must be text of 1 to 200 characters, without .* found ''"),
    "two lines": (
        {"name": "a\n"},
        r"a table's name must be text .* without line ends and other control characters, found 'a\\n'",
    ),
    "no elements": ({"row_elements": 0}, "table 'user': row_elements must be 1 to 16384, found 0"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_declaration_says_what_is_allowed(wrong: str) -> None:
    changed, says = WRONG[wrong]
    with pytest.raises(ConfigurationError, match=says):
        EmbeddingTable(**({"name": "user", "row_elements": 4, "optimizer": SGD(0.1)} | changed))


@pytest.mark.parametrize("rows_max", [1, ROWS_MAX])
def test_rows_may_be_as_many_as_have_a_reference(rows_max: int) -> None:
    assert EmbeddingTable("user", 4, SGD(0.1), rows_max=rows_max).rows_max == rows_max
    assert EmbeddingTable("user", 4, SGD(0.1)).rows_max == ROWS_MAX_DEFAULT


def test_what_is_a_rows_own_may_be_said_of_its_optimizer() -> None:
    own = SGD(0.1, weight_decay=0.5, clip_value=1.0)
    assert EmbeddingTable("user", 4, own).optimizer == own


# --- what rows are kept as ---


@given(gradients(st.integers(1, 40)))
def test_bfloat16_rows_have_the_bits_of_the_encoding(values):
    codes = np.empty(values.size, np.uint16)
    reference.to_bfloat16(values, codes)
    assert kept_as(values, "bfloat16").tobytes() == codes.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@given(gradients(st.integers(1, 40)))
def test_what_is_kept_is_kept_again_as_it_is(dtype, values):
    once = kept_as(values, dtype)
    assert kept_as(floats_of(once), dtype).tobytes() == once.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_kept_is_never_infinite_and_nan_is_seen(dtype):
    values = floats_of(kept_as(np.array([np.inf, -np.inf, np.nan, 3.4e38], np.float32), dtype))
    assert np.isfinite(values).tolist() == [True, True, False, True]
    assert np.isnan(values[2])


def test_bfloat16_is_taken_for_no_number():
    kept = kept_as(np.ones((2, 3), np.float32), "bfloat16")
    with pytest.raises(ValueError, match=r"."):
        kept.astype(np.float32)
