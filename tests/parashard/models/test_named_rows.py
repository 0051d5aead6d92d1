"""Rows of a program's own loop: in the shape of its ids, and their gradients added in the ids' order."""

from __future__ import annotations

import numpy as np
import pytest

from parashard.errors import ShapeMismatch
from parashard.models.looking_up import named_rows
from parashard.plan.embedding import EmbeddingTable, mixed
from parashard.plan.optimizers import SGD

TABLES = {"users": EmbeddingTable("users", 2, SGD(0.1))}
IDS = np.array([[7, -(3**39), 7], [10**15, 7, 0]])


def test_rows_are_in_the_shape_of_the_ids_and_gradients_are_summed_by_row() -> None:
    named = named_rows({"users": IDS}, TABLES)
    keys = named.keys["users"]
    assert keys.tolist() == np.unique(mixed(IDS.ravel())).tolist()
    rows = {"users": np.arange(2 * len(keys), dtype=np.float32).reshape(-1, 2)}
    by_id = named.by_id(rows)["users"]
    assert by_id.shape == (2, 3, 2)
    assert by_id[0, 0].tolist() == by_id[1, 1].tolist() == rows["users"][np.searchsorted(keys, mixed(7))[0]].tolist()
    by_id[:] = 0
    assert rows["users"].any(), "the program's own"
    gradient = np.random.default_rng(0).normal(size=(2, 3, 2))
    found = named.gradient("users", gradient, TABLES)
    for key, of_key in zip(keys, found, strict=True):
        there = mixed(IDS.ravel()).reshape(IDS.shape) == key
        assert of_key == pytest.approx(gradient[there].sum(0), abs=1e-6)
    assert found.dtype == np.float32


def test_a_single_id_and_none_are_rows_too() -> None:
    named = named_rows({"users": 5}, TABLES)
    assert named.by_id({"users": np.ones((1, 2), np.float32)})["users"].tolist() == [1.0, 1.0]
    empty = named_rows({"users": np.empty((0, 3), np.int64)}, TABLES)
    assert empty.gradient("users", np.empty((0, 3, 2)), TABLES).shape == (0, 2)


@pytest.mark.parametrize("gradient", [np.ones((2, 3)), np.ones((2, 3, 2), int)])
def test_a_gradient_of_another_shape_or_type_is_refused(gradient: np.ndarray) -> None:
    with pytest.raises(ShapeMismatch, match=r"due is floating point \(2, 3, 2\): of each id that keys named"):
        named_rows({"users": IDS}, TABLES).gradient("users", gradient, TABLES)


def test_a_gradient_of_a_table_that_was_not_named_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="of which keys named no id"):
        named_rows({}, TABLES).gradient("users", np.ones((1, 2)), TABLES)
