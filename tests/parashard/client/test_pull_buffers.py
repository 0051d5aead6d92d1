"""PullBuffers: arrays are used again, and what they hold is believed of one incarnation of each shard only (P16).

Rule P19.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.client.pulled import KEPT_MAX, PullBuffers
from parashard.plan.flat import ALIGNMENT_BYTES
from parashard.plan.partition import fixed_shards, place, split
from parashard.plan.variables import Variable
from parashard.transports import memory
from support.in_process import plan_of, variables_of
from support.tiers import fewer

VARIABLES = variables_of(Variable("a", (5, 2)), Variable("b", (3,)), Variable("c", (1,)))
PLAN = plan_of(VARIABLES, shards=2, partitioner=fixed_shards(2))


@fewer(4)
@given(st.integers(1, 5), st.integers(1, 4))
def test_the_places_of_all_shards_are_the_variables(partitions, shards):
    plan = place(VARIABLES, split(VARIABLES, fixed_shards(partitions)), shards, version=1)
    weights = PullBuffers(plan).take((1,) * shards)
    for shard, places in enumerate(weights.by_shard):
        assert places.nbytes == 4 * plan.shard_elements(shard)
        memory.scatter(np.full(plan.shard_elements(shard), shard + 1, np.float32).view(np.uint8), places, 0)
    for shard, layout in enumerate(plan.layouts):
        for placed in layout:
            p = placed.partition
            assert (weights.variables[p.variable][p.row_start : p.row_stop] == shard + 1).all()
    assert {name: array.shape for name, array in weights.variables.items()} == {"a": (5, 2), "b": (3,), "c": (1,)}


def test_arrays_begin_where_xla_reads_them_in_place():
    buffers = PullBuffers(PLAN)
    sets = [buffers.take((1, 1)) for _ in range(20)]  # by chance, one in four would
    assert all(array.ctypes.data % ALIGNMENT_BYTES == 0 for weights in sets for array in weights.variables.values())


def test_a_set_is_one_run_in_memory_that_is_asked_for_with_zeros_between_variables():
    asked = []

    def memory(elements: int) -> np.ndarray:
        asked.append(np.full(elements, np.nan, np.float32))
        return asked[-1]

    weights = PullBuffers(PLAN, memory).take((1, 1))
    assert weights.variables.run is asked[0]
    for array in weights.variables.values():
        array[...] = 0.0
        assert np.shares_memory(array, asked[0])
    assert not asked[0].any()


def test_a_set_that_was_given_back_is_used_again_with_what_it_holds():
    sets = PullBuffers(PLAN)
    first = sets.take((1, 1))
    assert first.versions == (None, None)
    first.versions = (4, 7)
    sets.give_back(first)
    again = sets.take((1, 1))
    assert again is first
    assert (again.versions, again.incarnations) == ((4, 7), (1, 1))
    assert sets.take((1, 1)) is not first  # which is in use


def test_the_set_given_back_last_is_used_first():  # its content is the newest, and likely still in a cache
    sets = PullBuffers(PLAN)
    older, newer = sets.take((1, 1)), sets.take((1, 1))
    sets.give_back(older)
    sets.give_back(newer)
    assert sets.take((1, 1)) is newer


@pytest.mark.parametrize(
    ("incarnations", "versions"), [((1, 1), (4, 7)), ((2, 1), (None, 7)), ((1, 2), (4, None)), ((2, 2), (None, None))]
)
def test_versions_of_another_incarnation_are_forgotten(incarnations, versions):  # P16
    sets = PullBuffers(PLAN)
    weights = sets.take((1, 1))
    weights.versions = (4, 7)
    sets.give_back(weights)
    assert sets.take(incarnations).versions == versions


def test_an_incarnation_that_comes_back_into_view_is_believed_nothing_it_was_forgotten_for():
    sets = PullBuffers(PLAN)
    weights = sets.take((1, 1))
    weights.versions = (4, 7)
    sets.give_back(weights)
    sets.give_back(
        sets.take((2, 1))
    )  # a pull that wrote half of what incarnation 2 has, and failed, would have lost the set
    assert sets.take((1, 1)).versions == (None, 7)


def test_no_more_sets_are_kept_than_the_bound():
    sets = PullBuffers(PLAN)
    taken = [sets.take((1, 1)) for _ in range(KEPT_MAX + 3)]
    for weights in taken:
        sets.give_back(weights)
    again = [sets.take((1, 1)) for _ in range(KEPT_MAX + 3)]
    assert sum(any(weights is known for known in taken) for weights in again) == KEPT_MAX
