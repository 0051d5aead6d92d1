"""Partitions and plans: every row exactly once, within the sizes asked for, balanced, and the same for everyone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.plan.partition import (
    ELEMENT_BYTES,
    Partitioner,
    fixed_shards,
    maximum_size,
    minimum_size,
    place,
    split,
    whole,
)
from parashard.plan.variables import Initializer, Variable
from support.in_process import Cluster
from support.tiers import fewer

some_variables = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.integers(1, 5), max_size=2)), min_size=1, max_size=6
).map(
    lambda shapes: {
        f"v{i}": Variable(f"v{i}", (rows, *rest), Initializer("uniform", 1.0)) for i, (rows, rest) in enumerate(shapes)
    }
)
partitioners: st.SearchStrategy[Partitioner] = st.one_of(
    st.just(whole),
    st.integers(1, 7).map(fixed_shards),
    st.builds(minimum_size, st.integers(1, 400), st.integers(1, 7)),
    st.integers(1, 400).map(maximum_size),
)


def row_bytes(variable: Variable) -> int:
    return variable.row_elements * ELEMENT_BYTES


@pytest.mark.parametrize(("min_bytes", "ranges"), [(1, 8), (16, 8), (17, 4), (32, 4), (33, 2), (65, 1), (1000, 1)])
def test_minimum_size_cuts_into_as_many_ranges_as_it_allows(min_bytes, ranges):
    variables = {"v": Variable("v", (8, 4))}  # 16 bytes a row
    assert len(split(variables, minimum_size(min_bytes, shards=8))) == ranges


@given(some_variables, partitioners)
def test_every_partitioner_covers_every_row_once_in_order_with_equal_pieces(variables, partitioner):
    partitions = split(variables, partitioner)
    for name, variable in variables.items():
        pieces = [p for p in partitions if p.variable == name]
        assert [row for p in pieces for row in range(p.row_start, p.row_stop)] == list(range(variable.rows))
        assert max(p.rows for p in pieces) - min(p.rows for p in pieces) <= 1
        assert all(p.rows > 0 for p in pieces)
    assert partitions == split(dict(reversed(variables.items())), partitioner)  # a function of the set alone


@given(some_variables, st.integers(1, 7))
def test_fixed_shards_gives_so_many_pieces_or_one_a_row(variables, shards):
    partitions = split(variables, fixed_shards(shards))
    for name, variable in variables.items():
        assert sum(p.variable == name for p in partitions) == min(shards, variable.rows)


@given(some_variables, st.integers(1, 400), st.integers(1, 7))
def test_minimum_size_is_honoured_unless_the_variable_is_smaller(variables, min_bytes, shards):
    partitions = split(variables, minimum_size(min_bytes, shards))
    for name, variable in variables.items():
        sizes = [p.rows * row_bytes(variable) for p in partitions if p.variable == name]
        assert len(sizes) <= shards
        assert len(sizes) == 1 or min(sizes) >= min_bytes


@given(some_variables, st.integers(1, 400))
def test_maximum_size_is_honoured_but_for_a_single_row_and_with_the_fewest_pieces(variables, max_bytes):
    partitions = split(variables, maximum_size(max_bytes))
    for name, variable in variables.items():
        pieces = [p for p in partitions if p.variable == name]
        assert all(p.rows == 1 or p.rows * row_bytes(variable) <= max_bytes for p in pieces)
        fewer = len(pieces) - 1  # with one piece less, some piece would hold more rows than fit
        assert fewer == 0 or -(-variable.rows // fewer) * row_bytes(variable) > max_bytes


@given(some_variables, partitioners, st.integers(1, 6))
def test_a_plan_places_every_partition_once_end_to_end(variables, partitioner, shards):
    partitions = split(variables, partitioner)
    plan = place(variables, partitions, shards, version=3)
    assert (plan.version, len(plan.shards)) == (3, shards)
    assert sorted(p for placed in plan.shards for p in placed) == sorted(partitions)
    for shard, layout in enumerate(plan.layouts):
        assert [placed.offset for placed in layout] == [0, *(placed.stop for placed in layout)][: len(layout)]
        assert plan.shard_elements(shard) == sum(placed.elements for placed in layout)
    assert plan == place(variables, list(reversed(partitions)), shards, version=3)


@given(some_variables, partitioners, st.integers(1, 6))
def test_placement_is_balanced_by_bytes_within_grahams_bound(variables, partitioner, shards):
    partitions = split(variables, partitioner)
    plan = place(variables, partitions, shards)
    sizes = sorted((p.rows * variables[p.variable].row_elements for p in partitions), reverse=True)
    fullest = max(plan.shard_elements(shard) for shard in range(shards))
    # What was placed last on the fullest shard found it no fuller than the mean of the others.
    assert fullest <= sum(sizes) / shards + (1 - 1 / shards) * sizes[0]
    if len(sizes) <= 10:
        assert fullest <= (4 / 3 - 1 / (3 * shards)) * _optimum(sizes, shards)  # Graham, 1969, theorem 2


def _optimum(sizes: list[int], shards: int) -> int:
    """Return the least possible fullest shard, by trying every placement that differs."""
    best = sum(sizes)

    def place_next(i: int, loads: tuple[int, ...]) -> None:
        nonlocal best
        if max(loads) >= best:
            return
        if i == len(sizes):
            best = max(loads)
            return
        for shard in range(shards):
            if loads[shard] not in loads[:shard]:
                place_next(i + 1, (*loads[:shard], loads[shard] + sizes[i], *loads[shard + 1 :]))

    place_next(0, (0,) * shards)
    return best


@fewer(4)
@given(some_variables, partitioners, st.integers(1, 4))
def test_what_was_split_over_shards_is_joined_again(variables, partitioner, shards):
    plan = place(variables, split(variables, partitioner), shards, version=5)
    values = {name: np.arange(v.elements, dtype=np.float32).reshape(v.shape) for name, v in variables.items()}
    joined = {name: np.full_like(value, np.nan) for name, value in values.items()}
    for layout in plan.layouts:
        vector = np.concatenate(
            [np.empty(0, np.float32)]
            + [values[p.variable][p.row_start : p.row_stop].ravel() for p in (placed.partition for placed in layout)]
        )
        for placed in layout:
            p = placed.partition
            rows = vector[placed.offset : placed.stop].reshape(p.rows, *variables[p.variable].shape[1:])
            joined[p.variable][p.row_start : p.row_stop] = rows
    assert all(joined[name].tobytes() == value.tobytes() for name, value in values.items())


@fewer(4)
@given(some_variables, partitioners, st.integers(1, 4))
def test_a_client_pushes_and_pulls_through_the_plan_what_it_was_given(variables, partitioner, shards):
    cluster = Cluster(place(variables, split(variables, partitioner), shards, version=5))
    client = cluster.client()
    before = client.pull()
    rng = np.random.default_rng(1)
    gradients = {name: rng.integers(-9, 9, v.shape).astype(np.float32) for name, v in variables.items()}
    client.push(0, gradients, before)
    after = client.pull().variables
    assert sorted(after) == sorted(variables)
    for name, value in after.items():
        assert value.shape == variables[name].shape
        assert value.tobytes() == (before.variables[name] + gradients[name]).tobytes()


def test_a_shard_may_hold_nothing():
    variables = {"w": Variable("w", (2,))}
    plan = place(variables, split(variables, whole), 3)
    assert [plan.shard_elements(shard) for shard in range(3)] == [2, 0, 0]
