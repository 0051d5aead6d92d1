"""IntervalSet against Python's own set: same members, same answers, and the invariant after every change."""

import doctest
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.plan import intervals
from parashard.plan.intervals import IntervalSet

BOUND = 40
ranges = st.tuples(st.integers(0, BOUND), st.integers(0, BOUND)).map(sorted).map(tuple)
range_lists = st.lists(ranges, max_size=12)


def members(steps: IntervalSet) -> set[int]:
    return {value for start, stop in steps.intervals() for value in range(start, stop)}


def model_of(pieces: list[tuple[int, int]]) -> set[int]:
    return {value for start, stop in pieces for value in range(start, stop)}


def assert_sound(steps: IntervalSet) -> None:
    """Non-empty, ascending, never touching; and the size is the sum."""
    flat = [bound for interval in steps.intervals() for bound in interval]
    assert all(a < b for a, b in itertools.pairwise(flat)), steps
    assert len(steps) == len(members(steps))


def test_the_docstring_is_true():
    assert doctest.testmod(intervals).failed == 0


@given(st.lists(st.one_of(st.integers(0, BOUND), ranges), max_size=20))
def test_adding_in_any_order_is_a_set(changes):
    steps, model = IntervalSet(), set()
    for change in changes:
        if isinstance(change, tuple):
            steps.add_range(*change)
            model.update(range(*change))
        else:
            assert steps.add(change) == (change not in model)  # P1: told apart in the act of adding
            model.add(change)
        assert_sound(steps)
        assert members(steps) == model
    assert [value in steps for value in range(-2, BOUND + 2)] == [value in model for value in range(-2, BOUND + 2)]
    assert steps.lowest_missing() == next(value for value in range(BOUND + 2) if value not in model)
    assert steps.stop() == max(model, default=-1) + 1


@given(range_lists, st.lists(st.integers(0, BOUND), max_size=20))
def test_discarding_in_any_order_is_a_set(pieces, discarded):
    steps, model = IntervalSet(pieces), model_of(pieces)
    for value in discarded:
        steps.discard(value)
        model.discard(value)
        assert_sound(steps)
        assert members(steps) == model


@given(range_lists, st.integers(0, BOUND + 5), st.integers(0, BOUND + 5))
def test_missing_is_the_complement_within_a_window(pieces, start, stop):
    gaps = list(IntervalSet(pieces).missing(start, stop))
    assert model_of(gaps) == set(range(start, stop)) - model_of(pieces)
    flat = [bound for gap in gaps for bound in gap]
    assert all(a < b for a, b in itertools.pairwise(flat))


@given(range_lists, st.integers(0, BOUND), st.integers(0, BOUND))
def test_the_parts_within_a_window_are_its_members_ascending(pieces, start, stop):
    found = list(IntervalSet(pieces).within(start, stop))
    assert model_of(found) == model_of(pieces) & set(range(start, stop))
    assert all(start <= first < last <= stop for first, last in found)
    assert found == sorted(found)


@given(range_lists, range_lists)
def test_intersection_is_that_of_sets_and_leaves_both_alone(left, right):
    a, b = IntervalSet(left), IntervalSet(right)
    both = a.intersection(b)
    assert_sound(both)
    assert members(both) == model_of(left) & model_of(right)
    assert both == b.intersection(a)
    assert (a, b) == (IntervalSet(left), IntervalSet(right))


@given(range_lists, st.randoms(use_true_random=False))
def test_equal_sets_are_equal_however_they_came_to_be(pieces, random):
    shuffled = list(pieces)
    random.shuffle(shuffled)
    steps = IntervalSet(pieces)
    assert steps == IntervalSet(shuffled + pieces)  # any order, and twice is once
    assert steps == IntervalSet(steps.intervals())  # what a checkpoint or a message holds gives it back


def test_a_copy_goes_its_own_way():
    steps = IntervalSet([(0, 3)])
    twin = steps.copy()
    twin.add(7)
    assert (len(steps), len(twin), 7 in steps) == (3, 4, False)


def test_a_nearly_contiguous_set_stays_small():
    steps = IntervalSet()
    for value in [*range(0, 10_000, 2), *range(1, 10_000, 2)]:
        steps.add(value)
    assert list(steps.intervals()) == [(0, 10_000)]


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2), (-2, -1)])
def test_an_impossible_interval_is_refused_and_changes_nothing(bounds):
    steps = IntervalSet([(0, 3)])
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        steps.add_range(*bounds)
    assert list(steps.intervals()) == [(0, 3)]


def test_it_is_not_hashable_and_no_other_type_equals_it():
    with pytest.raises(TypeError):
        hash(IntervalSet())
    assert IntervalSet([(0, 1)]) != {0}
    assert (IntervalSet() == set()) is False
    assert IntervalSet([(0, 2)]) != IntervalSet([(0, 3)])
    assert IntervalSet([(0, 2)]) != IntervalSet([(1, 2)])
    assert repr(IntervalSet([(0, 1), (4, 6)])) == "IntervalSet([(0, 1), (4, 6)])"
