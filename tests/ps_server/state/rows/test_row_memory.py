"""Regions that give memory back, page by page, and references that are noted in arrays of one length."""

from __future__ import annotations

import itertools
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard_server.state.rows import row_memory
from parashard_server.state.rows.row_memory import HUGE_BYTES, References, Region

PAGE, LARGE = mmap.PAGESIZE, 4 * mmap.PAGESIZE


@given(st.permutations(range(32)), st.lists(st.integers(1, 32 * PAGE - 1), max_size=6), st.booleans())
def test_only_pages_of_which_nothing_is_in_use_go_back(order: list[int], cuts: list[int], small: bool) -> None:
    """Whatever the order of the parts: what is in use keeps its content, and little is left when all is given back."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(row_memory, "HUGE_BYTES", LARGE)
        region = Region(8 * LARGE, small_bytes=2 * LARGE if small else 0)
        memory = region.view(np.uint8)
        memory[:] = 1
        edges = [0, *sorted(set(cuts)), 8 * LARGE]
        parts = list(itertools.pairwise(edges))
        in_use = np.ones(8 * LARGE, np.bool_)
        for at in order:
            if at < len(parts):
                begin, end = parts[at]
                region.give_back(begin, end)
                in_use[begin:end] = False
                assert memory[in_use].all()
        left = np.count_nonzero(memory[::PAGE])
        assert left <= (len(cuts) if small else 0) + (LARGE // PAGE)  # small pages that were cut; the region's end


def test_a_large_page_goes_back_with_the_last_of_it() -> None:
    region = Region(6 * HUGE_BYTES)
    region.view(np.uint8)[:] = 1
    first = region._first
    region.give_back(first, first + 100)
    region.give_back(first + 200, first + HUGE_BYTES)
    assert region.unused_bytes == HUGE_BYTES - 100
    assert region.view(np.uint8)[first : first + HUGE_BYTES].all()
    region.give_back(first + 100, first + 200)
    assert region.unused_bytes == 0
    assert not region.view(np.uint8)[first : first + HUGE_BYTES].any()
    assert region.view(np.uint8)[first + HUGE_BYTES :].all()


def test_small_pages_go_back_one_by_one() -> None:
    region = Region(6 * HUGE_BYTES, small_bytes=2 * HUGE_BYTES)
    region.view(np.uint8)[:] = 1
    region.give_back(mmap.PAGESIZE - 1, 3 * mmap.PAGESIZE + 1)
    assert region.unused_bytes == 0
    assert not region.view(np.uint8)[mmap.PAGESIZE : 3 * mmap.PAGESIZE].any()
    assert region.view(np.uint8)[3 * mmap.PAGESIZE :].all()


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=8))
def test_references_come_back_in_the_order_in_which_they_were_noted(lists: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(row_memory, "ARRAY_ITEMS", 5)
        noted = References()
        for some in lists:
            noted.note(np.array(some, np.uint32))
        due = [one for some in lists for one in some]
        assert len(noted) == len(due)
        assert [one for array in noted.arrays() for one in array.tolist()] == due
        noted.take_back([np.array([7, 8], np.uint32)])
        assert len(noted) == len(due) + 2
        assert sorted(one for array in noted.arrays() for one in array.tolist()) == sorted([*due, 7, 8])
