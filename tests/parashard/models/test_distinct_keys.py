"""Distinct keys are those of `numpy.unique`, wherever they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.models import looking_up as module
from parashard.models.looking_up import PROBES_MAX, distinct_keys
from parashard.plan.embedding import mixed

LAST = np.uint64(2**64 - 1)


def assert_those_of_numpy(words: Any) -> None:
    """In order, in the words' shape, in the dtypes that are told."""
    keys, places = distinct_keys(words)
    due_keys, due_places = np.unique(words, return_inverse=True)
    np.testing.assert_array_equal(keys, due_keys)
    np.testing.assert_array_equal(places, due_places.reshape(words.shape))
    assert (keys.dtype, places.dtype) == (np.uint64, np.int64)


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(2**64 - 40, 2**64 - 1), max_size=60))
def test_keys_are_those_of_numpy(found: list[int]) -> None:
    assert_those_of_numpy(np.array(found, np.uint64))


@pytest.mark.parametrize("look_ups", [1, 2, 1000, 50_000])
@pytest.mark.parametrize("different", [1, 7, 100_000])
def test_mixed_keys_are_ordered_without_a_sort(look_ups: int, different: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = mixed(np.random.default_rng(0).integers(0, different, look_ups))
    keys, _ = np.unique(words, return_inverse=True)
    monkeypatch.setattr(module.np, "unique", None)
    np.testing.assert_array_equal(distinct_keys(words)[0], keys)
    monkeypatch.undo()
    assert_those_of_numpy(words)


def test_keys_that_crowd_in_one_place_are_sorted() -> None:
    crowd = np.arange(2 * PROBES_MAX, dtype=np.uint64)[::-1]
    assert_those_of_numpy(np.concatenate([crowd, crowd, LAST - crowd]))


def test_the_last_place_is_not_the_end() -> None:
    assert_those_of_numpy(np.array([LAST, LAST - np.uint64(1), LAST - np.uint64(2), 0, LAST], np.uint64))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 3), (2, 3, 2)])
def test_places_have_the_shape_of_the_look_ups(shape: tuple[int, ...]) -> None:
    assert_those_of_numpy(mixed(np.arange(np.prod(shape)) % 5).reshape(shape))


def test_views_are_read_as_they_are() -> None:
    assert_those_of_numpy(mixed(np.arange(24) % 7).reshape(4, 6).T[::2])
