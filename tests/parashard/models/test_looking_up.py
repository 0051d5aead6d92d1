"""Looking up: a model names keys, in any shape; each has its row's place among those that the batch needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from parashard.data.base import Batch
from parashard.errors import ConfigurationError, ShapeMismatch, WrongModel
from parashard.models.looking_up import (
    check_looks_up,
    keys_of_all,
    looked_up,
    named_rows,
    placed,
    unused_tables,
    uses_tables,
)
from parashard.plan.embedding import EmbeddingTable, mixed
from parashard.plan.optimizers import SGD
from parashard.process.run_files import short_path
from support.loop_cases import Counting

TABLES = {name: EmbeddingTable(name, 2, SGD(0.1), keys_per_step_max=8) for name in ("user", "item")}
BATCH = Batch(3, 1, np.array([4, 2, 4]), np.zeros((3, 1), np.float32), np.zeros(3))


class Naming(Counting):
    """A model whose keys are what it is made with, or what a function of the batch returns."""

    def __init__(self, named: Any) -> None:
        super().__init__()
        self.named = named

    def keys(self, batch: Batch) -> Mapping[str, Any]:
        named: Mapping[str, Any] = self.named(batch) if callable(self.named) else self.named
        return named


PLACE = f"{short_path(__file__)}:{Naming.keys.__code__.co_firstlineno}: "
SHAPES = arrays.array_shapes(min_dims=0, min_side=0, max_side=3)
ANY_KEYS = arrays.arrays(st.sampled_from([np.uint8, np.uint16]), SHAPES) | arrays.arrays(
    np.int64, SHAPES, elements=st.integers(0, 2**63 - 1) | st.integers(1 - 2**63, -(2**16) - 1)
)


@given(ANY_KEYS)
def test_every_key_finds_its_own_among_those_that_are_needed(named: np.ndarray) -> None:
    tables = {"user": EmbeddingTable("user", 2, SGD(0.1))}
    batch = looked_up(Naming({"user": named}), BATCH, tables)
    keys, places = batch.keys["user"], batch.places["user"]
    assert (keys[:-1] < keys[1:]).all(), "ascending, each once"
    assert (str(keys.dtype), str(places.dtype), places.shape) == ("uint64", "int64", named.shape)
    assert keys[places].tolist() == mixed(named).reshape(named.shape).tolist()
    assert set(keys.tolist()) == set(mixed(named).ravel().tolist()), "and no other"


@given(ANY_KEYS, arrays.arrays(np.int64, st.integers(0, 5), elements=st.integers(0, 9)))
def test_a_piece_finds_its_own_among_those_of_all_pieces(named: np.ndarray, others: np.ndarray) -> None:
    needed = np.unique(np.concatenate([mixed(named).ravel(), mixed(others).ravel()]))
    batch = placed(Naming({"user": named}), BATCH, TABLES, {"user": needed})
    assert batch.places["user"].shape == named.shape
    assert batch.keys["user"] is needed
    assert needed[batch.places["user"]].tolist() == mixed(named).reshape(named.shape).tolist()


def test_each_table_has_its_own_keys() -> None:
    named = {"user": np.array([[5, 7], [5, 5]]), "item": np.array([5])}
    batch = looked_up(Naming(named), BATCH, TABLES)
    assert {name: len(keys) for name, keys in batch.keys.items()} == {"user": 2, "item": 1}
    assert batch.keys["user"][batch.places["user"][1, 0]] == batch.keys["item"][batch.places["item"][0]]


def test_a_table_that_the_batch_does_not_need_has_no_keys() -> None:
    assert looked_up(Naming({"item": np.array([1])}), BATCH, TABLES).keys.keys() == {"item"}
    assert looked_up(Naming({}), BATCH, TABLES).keys == {}


def test_a_model_names_keys_by_the_batch_which_is_else_as_it_was() -> None:
    batch = looked_up(Naming(lambda batch: {"user": batch.indices}), BATCH, TABLES)
    assert batch.keys["user"][batch.places["user"]].tolist() == mixed(np.array([4, 2, 4])).tolist()
    assert (batch.step, batch.epoch) == (3, 1)
    assert (batch.indices is BATCH.indices, batch.inputs is BATCH.inputs) == (True, True)
    assert (BATCH.keys, BATCH.places) == ({}, {})


def test_a_step_may_use_as_many_keys_as_its_table_says_each_counted_once() -> None:
    eight = np.repeat(np.arange(8), 3)
    assert len(looked_up(Naming({"user": eight}), BATCH, TABLES).keys["user"]) == 8
    with pytest.raises(WrongModel) as error:
        looked_up(Naming({"user": np.arange(9)}), BATCH, TABLES)
    assert str(error.value) == f"{PLACE}a step needs 9 rows of table 'user'; its keys_per_step_max is 8"


WRONG: dict[str, tuple[Any, str]] = {
    "another table": ({"artist": np.array([1])}, "keys named the table 'artist'; the job has: item, user"),
    "no mapping": ([1, 2], "keys returned a list; due is a mapping of tables to their ids"),
    "nothing": (None, "keys returned a NoneType; due is a mapping"),
    "real numbers": ({"user": np.array([1.0])}, "keys returned for table 'user' are not ids: .* found float64"),
    "truths": ({"user": np.array([True])}, "for table 'user' are not ids: .* found bool"),
    "text": ({"user": ["ann"]}, "for table 'user' are not ids: .* found <U3"),
    "None": ({"user": None}, "for table 'user' are not ids: .* found object"),
    "more than 64 bits": ({"user": [1 << 64]}, "for table 'user' are not ids: .* found object"),
    "padding": (
        {"user": [[7, -1]]},
        "id -1 stands for no id, and has no row: leave it out, or give the layer padding_",
    ),
    "what a loss ignores": ({"user": [7, -100]}, "id -100 stands for no id, and has no row"),
    "NaN as a whole number": ({"user": [-(2**63)]}, "id -9223372036854775808 stands for no id"),
    "no sign": (
        {"user": np.array([5, 2**63 + 5], np.uint64)},
        r"id 9223372036854775813 is above 2\^63 - 1; give hashes as int64: ids\.view\(numpy\.int64\)",
    ),
    "rows of unequal length": ({"user": [[1], [1, 2]]}, "for table 'user' are not ids: setting an array element"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("look_up", [looked_up, lambda model, batch, tables: placed(model, batch, tables, {})])
def test_what_is_no_key_is_the_models_mistake(look_up: Callable[..., Batch], wrong: str) -> None:
    named, says = WRONG[wrong]
    with pytest.raises(WrongModel, match=says) as error:
        look_up(Naming(named), BATCH, TABLES)
    assert str(error.value).startswith(PLACE)


def test_an_error_of_the_model_s_own_is_passed_on() -> None:
    def broken(batch: Batch) -> Any:
        raise ZeroDivisionError("no such column")

    with pytest.raises(ZeroDivisionError, match="no such column"):
        looked_up(Naming(broken), BATCH, TABLES)


def test_a_job_s_tables_and_its_model_s_go_together() -> None:
    check_looks_up(Naming({}), TABLES)
    check_looks_up(Counting(), {})
    with pytest.raises(ConfigurationError, match=r"the job declares the tables item, user, and the model uses none"):
        check_looks_up(Counting(), TABLES)
    with pytest.raises(ConfigurationError, match=r"the job declares none: say \[tables\.NAME\] with its dimension"):
        check_looks_up(Naming({}), {})


def test_a_table_of_which_no_key_is_named_is_told_of() -> None:
    said = "tables.item: the model uses no row of it for the first examples; if it never does, leave it out"
    assert unused_tables(Naming({"user": [1]}), BATCH, TABLES) == [said]
    assert unused_tables(Naming({"user": [1], "item": []}), BATCH, TABLES) == []
    assert unused_tables(Naming({}), BATCH, {}) == []


@pytest.mark.parametrize("named", [lambda batch: 1 // 0, [1], {"users": [1]}])
def test_what_a_model_cannot_name_is_left_to_a_worker(named: Any) -> None:
    assert unused_tables(Naming(named), BATCH, TABLES) == []


def test_the_keys_of_all_batches_are_each_there_once_and_may_be_more_than_a_step_has() -> None:
    model = Naming(lambda batch: {"user": batch.indices + 10 * batch.step, "item": np.zeros((0, 2), np.int64)})
    batches = [Batch(step, 0, np.arange(9), BATCH.inputs, BATCH.targets) for step in range(3)]
    found = keys_of_all(model, batches, TABLES)
    due = {key + 10 * step for key in range(9) for step in range(3)}
    assert found["user"].tolist() == sorted(mixed(np.array(sorted(due))).tolist())
    assert found["item"].tolist() == []


@pytest.mark.parametrize(("tables", "uses"), [((), False), ([], False), (("one",), True)])
def test_a_model_that_names_no_tables_uses_none(tables: Any, uses: bool) -> None:
    model = Naming({})
    assert uses_tables(model), "of a job file"
    model.tables = tables
    assert uses_tables(model) is uses
    assert not uses_tables(Counting())


NAMED = {"users": EmbeddingTable("users", 2, SGD(0.1))}
IDS = np.array([[7, -(3**39), 7], [10**15, 7, 0]])


def test_rows_are_in_the_shape_of_the_ids_and_gradients_are_summed_by_row() -> None:
    named = named_rows({"users": IDS}, NAMED)
    keys = named.keys["users"]
    assert keys.tolist() == np.unique(mixed(IDS.ravel())).tolist()
    rows = {"users": np.arange(2 * len(keys), dtype=np.float32).reshape(-1, 2)}
    by_id = named.by_id(rows)["users"]
    assert by_id.shape == (2, 3, 2)
    assert by_id[0, 0].tolist() == by_id[1, 1].tolist() == rows["users"][np.searchsorted(keys, mixed(7))[0]].tolist()
    by_id[:] = 0
    assert rows["users"].any(), "the program's own"
    gradient = np.random.default_rng(0).normal(size=(2, 3, 2))
    found = named.gradient("users", gradient, NAMED)
    for key, of_key in zip(keys, found, strict=True):
        there = mixed(IDS.ravel()).reshape(IDS.shape) == key
        assert of_key == pytest.approx(gradient[there].sum(0), abs=1e-6)
    assert found.dtype == np.float32


def test_a_single_id_and_none_are_rows_too() -> None:
    named = named_rows({"users": 5}, NAMED)
    assert named.by_id({"users": np.ones((1, 2), np.float32)})["users"].tolist() == [1.0, 1.0]
    empty = named_rows({"users": np.empty((0, 3), np.int64)}, NAMED)
    assert empty.gradient("users", np.empty((0, 3, 2)), NAMED).shape == (0, 2)


@pytest.mark.parametrize("gradient", [np.ones((2, 3)), np.ones((2, 3, 2), int)])
def test_a_gradient_of_another_shape_or_type_is_refused(gradient: np.ndarray) -> None:
    with pytest.raises(ShapeMismatch, match=r"due is floating point \(2, 3, 2\): of each id that keys named"):
        named_rows({"users": IDS}, NAMED).gradient("users", gradient, NAMED)


def test_a_gradient_of_a_table_that_was_not_named_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="of which keys named no id"):
        named_rows({}, NAMED).gradient("users", np.ones((1, 2)), NAMED)
