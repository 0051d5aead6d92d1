"""Rows of tables in a list of layers: gradients of dense tables of the same rows, and what a trainer does with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.client.pulled_rows import TableSet
from parashard.data.base import Batch
from parashard.errors import ConfigurationError, WrongModel
from parashard.models.looking_up import looked_up, placed
from parashard.plan.embedding import EmbeddingTable, mixed
from parashard.plan.optimizers import SGD

L = ps.layers
USERS, ITEMS = ps.Table("users", 3, scale=0.5), ps.Table("items", 2, scale=0.5)
RNG = np.random.default_rng(0)
ALL = np.array([-(7**20), 10**15, 3, 0, 2**63 - 1], np.int64)
IDS = RNG.integers(0, 5, (8, 4))
Y = np.arange(8) % 2
NAMED = {
    "user": ALL[IDS[:, 0]],
    "friends": ALL[IDS[:, 1:3]],
    "price": RNG.normal(size=(8, 2)).astype(np.float32),
    "items": ALL[IDS],
}
SHAPES = {name: array.shape[1:] for name, array in NAMED.items()}


def one(combiner: str | None = None, table: Any = USERS) -> Any:
    layers = [L.TableEmbedding(table, combiner), L.Flatten(), L.Dense(2)]
    return ps.Sequential(layers, input_shape=(4,), loss="softmax_cross_entropy", metrics=["accuracy"])


def several(combiner: str | None) -> Any:
    first = L.TableEmbedding({"user": USERS, "friends": USERS, "items": ITEMS}, combiner)
    return ps.Sequential([first, L.Tanh(), L.Dense(2)], input_shape=SHAPES, loss="softmax_cross_entropy")


def tables(model: Any) -> dict[str, EmbeddingTable]:
    return {table.name: table for table in model.tables}


def step(model: Any, inputs: Any, dtype: Any = np.float32) -> tuple[Batch, dict[str, Any]]:
    batch = looked_up(model, Batch(0, 0, np.arange(8), inputs, Y), tables(model))
    drawn = TableSet(tuple(tables(model).values()), 3)
    values = {name: drawn.first_rows(name, keys) for name, keys in batch.keys.items()}
    for name, variable in model.initial_variables().items():
        values[name] = np.linspace(-0.5, 0.6, int(np.prod(variable.shape))).reshape(variable.shape)
    return batch, {name: value.astype(dtype) for name, value in values.items()}


def test_gradients_are_those_of_a_dense_table() -> None:
    ours = one()
    layers = [L.Embedding(5, 3), L.Flatten(), L.Dense(2)]
    dense = ps.Sequential(layers, input_shape=(4,), loss="softmax_cross_entropy", metrics=["accuracy"])
    batch, values = step(ours, ALL[IDS])
    place = np.searchsorted(batch.keys["users"], mixed(ALL))
    due_values = {**values, "embedding_0.weight": values["users"][place]}
    due = dense.loss_and_gradients(due_values, Batch(0, 0, np.arange(8), IDS, Y), np)
    found = ours.loss_and_gradients(values, batch, np)
    assert found[0] == due[0]
    assert found[1]["users"][place] == pytest.approx(due[1]["embedding_0.weight"], abs=1e-7)
    assert found[1]["dense_0.weight"].tobytes() == due[1]["dense_0.weight"].tobytes()
    assert set(found[1]) == {"users", "dense_0.weight", "dense_0.bias"}


@pytest.mark.parametrize("combiner", [None, "sum", "mean"])
@pytest.mark.parametrize("named", [False, True])
def test_gradients_are_finite_differences(combiner: str | None, named: bool) -> None:
    model = several(combiner) if named else one(combiner)
    batch, values = step(model, NAMED if named else ALL[IDS], np.float64)
    gradients = model.loss_and_gradients(values, batch, np)[1]
    assert set(gradients) == set(values)
    for name, value in values.items():
        for at in np.ndindex(value.shape):
            either = []
            for sign in (1, -1):
                moved = {**values, name: value.copy()}
                moved[name][at] += sign * 1e-5
                either.append(float(model.loss_and_gradients(moved, batch, np)[0]))
            assert gradients[name][at] == pytest.approx((either[0] - either[1]) / 2e-5, abs=1e-8)


def test_an_evaluation_has_the_rows_of_all_of_its_pieces() -> None:
    model = several("mean")
    batch, values = step(model, NAMED)
    inputs = {name: array[:3] for name, array in NAMED.items()}
    there = placed(model, Batch(-1, -1, np.arange(3), inputs, Y[:3]), tables(model), batch.keys)
    outputs = model.predict(values, inputs, batch.keys)
    assert outputs == pytest.approx(model.predict(values, NAMED, batch.keys)[:3], abs=1e-6)
    log_p = outputs - np.log(np.exp(outputs).sum(1, keepdims=True))
    assert model.evaluate(values, there, np)["loss"] == pytest.approx(-log_p[np.arange(3), Y[:3]].mean(), rel=1e-5)


THREE = ps.ParameterServerStrategy(2, 3, "sync:2", workers_as="threads")


def test_one_worker_and_three_train_the_same_bits_and_the_copy_holds_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x = {name: np.tile(array, (10,) + (1,) * (array.ndim - 1)) for name, array in NAMED.items()}
    said = []
    for strategy in (ps.MirroredStrategy(2, threads=1), THREE):
        trainer = ps.Trainer(several("sum"), ps.Adam(0.05), strategy)
        report = trainer.fit((x, np.tile(Y, 10)), epochs=2, batch_size=8, verbose=0).report
        said.append((report["weights_sha256"], report["rows_digest"], report["rows"]))
    assert said[0] == said[1]
    assert said[0][2] == {"items": 5, "users": 5}
    own, unknown = trainer.model(), {**NAMED, "user": np.arange(100, 108)}
    for asked in (NAMED, unknown):
        assert own(asked) == pytest.approx(trainer.predict(asked), abs=1e-6)
    with pytest.raises(ConfigurationError, match="holds rows of tables, with which no fit begins"):
        ps.Trainer(own, ps.SGD(0.1), ps.OneDeviceStrategy()).evaluate((NAMED, Y))


def test_a_list_of_layers_takes_the_tables_that_a_job_file_declares() -> None:
    declared = EmbeddingTable("town", 3, SGD(0.1))
    model = one(table=declared)
    batch = looked_up(model, Batch(0, 0, np.arange(8), ALL[IDS], Y), {"town": declared})
    assert (model.tables, list(batch.keys)) == ((declared,), ["town"])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: L.TableEmbedding(10), 'tables is one such as ps.Table("users", 16), or a dict of them by input'),
        (lambda: L.TableEmbedding({}), "TableEmbedding: tables names no input"),
        (lambda: L.TableEmbedding(ps.Table("u", 3, combiner="sum")), "table 'u' has combiner='sum', and Table"),
        (lambda: L.TableEmbedding(USERS, "max"), "combiner is sum or mean, found 'max'"),
        (
            lambda: ps.Sequential([L.Dense(2)], input_shape=SHAPES, loss="mean_squared_error"),
            "input_shape is a dict, which a first layer takes that looks rows up: TableEmbedding",
        ),
        (
            lambda: ps.Sequential([L.TableEmbedding(USERS), L.Dense(2)], input_shape=SHAPES, loss="mean_squared_error"),
            "input_shape is a dict, so tables is one by input",
        ),
        (
            lambda: ps.Sequential(
                [L.TableEmbedding({"x": USERS}), L.Dense(2)], input_shape=SHAPES, loss="mean_squared_error"
            ),
            "it looks up the input 'x', and input_shape has 'user', 'friends'",
        ),
        (
            lambda: ps.Sequential(
                [L.TableEmbedding({"x": USERS}), L.Dense(2)], input_shape=(4,), loss="mean_squared_error"
            ),
            "it looks up inputs by name, and input_shape is no dict of them",
        ),
        (
            lambda: ps.Sequential([L.Dense(2), L.TableEmbedding(USERS)], input_shape=(4,), loss="mean_squared_error"),
            "takes whole numbers: it must be the first",
        ),
        (
            lambda: ps.Sequential([L.TableEmbedding(USERS)], input_shape=(4,), loss="mean_squared_error"),
            "no layer has variables",
        ),
        (lambda: step(one(), IDS.astype(np.float32)), "ids of table 'users' are whole numbers, found float32"),
        (lambda: step(one(), ALL[IDS[:, :2]]), "an example's inputs have shape (2,); the model's input_shape is (4,)"),
    ],
)
def test_what_cannot_be_looked_up_is_refused_in_a_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises((ConfigurationError, WrongModel)) as refused:
        make()
    assert sentence in str(refused.value)
