"""Trees: leaves have paths, a function keeps the form."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from parashard.data.tree import leaves, map_leaves, rows_of

TREES = st.recursive(
    st.integers(), lambda below: st.dictionaries(st.text(max_size=2), below) | st.lists(below) | st.tuples(below, below)
)


class Pair(NamedTuple):
    first: object
    second: object


def test_leaves_are_named_by_their_path() -> None:
    tree = {"ids": 1, "more": (2, [3, {"x": 4}])}
    assert leaves(tree) == [("ids", 1), ("more/0", 2), ("more/1/0", 3), ("more/1/1/x", 4)]
    assert leaves(tree, "inputs")[0] == ("inputs/ids", 1)
    assert leaves(7) == [("", 7)]
    assert leaves(()) == []


@given(TREES)
def test_a_function_keeps_the_form_and_the_order(tree: object) -> None:
    assert map_leaves(lambda leaf: leaf, tree) == tree
    doubled = map_leaves(lambda a, b: a + b, tree, tree)
    assert leaves(doubled) == [(name, 2 * leaf) for name, leaf in leaves(tree)]


def test_a_named_tuple_stays_one() -> None:
    assert map_leaves(lambda leaf: -leaf, Pair(1, 2)) == Pair(-1, -2)
    assert isinstance(map_leaves(lambda leaf: leaf, Pair(1, 2)), Pair)


def test_rows_are_those_of_the_first_leaf() -> None:
    assert rows_of({"a": (np.zeros((3, 2)),), "b": np.zeros(3)}) == 3
