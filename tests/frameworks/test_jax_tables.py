"""Rows of tables in functions of JAX: gradients of a dense table of the same rows, compiled once for their shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api.splitting import Accumulated
from parashard.client.pulled_rows import TableSet
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.models.looking_up import looked_up, placed
from parashard.plan.embedding import EmbeddingTable, mixed

jax = pytest.importorskip(
    "jax", reason="NO TEST OF ps.jax with tables: JAX is not installed; `make test-frameworks` has it"
)
jnp: Any = jax.numpy

USERS, ITEMS = ps.Table("users", 3, scale=0.5), ps.Table("items", 2, scale=0.5)
ALL = np.array([-(7**20), 10**15, 3, 0, 1 - 2**63, 2**63 - 1], np.int64)
"""Keys, by their places in a dense table."""
IDS = np.random.default_rng(0).integers(0, 5, (8, 3))
INPUTS = {"user": ALL[IDS[:, 0]], "items": ALL[IDS[:, 1:]]}
Y = (np.arange(8) % 3).astype(np.float32)


def init(key: Any) -> Any:
    return {"w": jax.random.normal(key, (5,)), "b": jnp.zeros(())}


def apply(p: Any, inputs: Any, rows: Any) -> Any:
    return jnp.concatenate([rows["users"], rows["items"].sum(1)], 1) @ p["w"] + p["b"]


def loss(p: Any, inputs: Any, targets: Any, key: Any, rows: Any) -> Any:
    kept = rows if key is None else {**rows, "users": rows["users"] * jax.random.bernoulli(key, 0.7, (3,))}
    return ((apply(p, inputs, kept) - targets) ** 2).mean()


def keys(inputs: Any) -> Any:
    return {"users": inputs["user"], "items": inputs["items"]}


def made(loss: Any = loss, init: Any = init, **arguments: Any) -> Any:
    model = ps.jax.Model(init, loss, apply=apply, tables=[USERS, ITEMS], keys=keys, **arguments)
    model.seed(3)
    return model


def tables(model: Any) -> dict[str, EmbeddingTable]:
    return {table.name: table for table in model.tables}


def step(model: Any, inputs: Any = INPUTS, number: int = 0) -> tuple[Batch, dict[str, Any]]:
    batch = looked_up(model, Batch(number, 0, np.arange(8), inputs, Y), tables(model))
    drawn = TableSet(tuple(tables(model).values()), 3)
    rows = {name: drawn.first_rows(name, of_table) for name, of_table in batch.keys.items()}
    return batch, {**model.initial_variables(), **rows}


def dense(values: dict[str, Any], batch: Batch) -> Callable[[Any, Any, Any], Any]:
    """Return the loss as a function of parameters and dense tables."""

    def of_tables(p: Any, users: Any, items: Any) -> Any:
        rows = {"users": users[batch.places["users"]], "items": items[batch.places["items"]]}
        return loss(p, None, Y, None, rows)

    return of_tables


def undropped(p: Any, inputs: Any, targets: Any, key: Any, rows: Any) -> Any:
    return loss(p, inputs, targets, None, rows)


@pytest.mark.parametrize("pieces", [1, 3])
def test_gradients_are_those_of_dense_tables(pieces: int) -> None:
    model = made(undropped)
    batch, values = step(model)
    found = (model if pieces == 1 else Accumulated(model, pieces)).loss_and_gradients(values, batch, np)
    parameters = {name: jnp.asarray(values[name]).reshape(()) if name == "b" else values[name] for name in ("w", "b")}
    due, by_all = jax.value_and_grad(dense(values, batch), (0, 1, 2))(parameters, values["users"], values["items"])
    assert float(found[0]) == pytest.approx(float(due), rel=1e-6)
    assert np.asarray(found[1]["w"]) == pytest.approx(np.asarray(by_all[0]["w"]), abs=1e-6)
    for name, gradient in zip(("users", "items"), by_all[1:], strict=True):
        assert np.asarray(found[1][name]) == pytest.approx(np.asarray(gradient), abs=1e-6)
        assert found[1][name].shape == values[name].shape


def test_a_step_again_has_its_bits_and_another_step_draws_anew() -> None:
    model = made()
    batch, values = step(model)
    first, again, other = (
        model.loss_and_gradients(values, one, np)[1]["users"] for one in (batch, batch, step(model, number=1)[0])
    )
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()


def test_the_number_of_different_keys_compiles_nothing_anew() -> None:
    traced = []

    def counted(*arguments: Any, **named: Any) -> Any:
        traced.append(1)
        return loss(*arguments, **named)

    model = made(counted)
    for few in (5, 1, 3, 2):
        inputs = {"user": ALL[IDS[:, 0] % few], "items": ALL[IDS[:, 1:] % few]}
        batch, values = step(model, inputs)
        assert len(batch.keys["users"]) <= few
        model.loss_and_gradients(values, batch, np)
    assert len(traced) == 1


def test_half_precision_scales_the_gradients_of_rows_with_the_others() -> None:
    def half(key: Any) -> Any:
        return jax.tree_util.tree_map(lambda leaf: leaf.astype(jnp.float16), init(key))

    batch, values = step(made(undropped))
    due = made(undropped).loss_and_gradients(values, batch, np)[1]
    found = made(undropped, half).loss_and_gradients(values, batch, np)[1]
    assert found["users"] == pytest.approx(due["users"], abs=1e-2)


def test_evaluations_and_predictions_look_up_among_the_rows_of_all_pieces() -> None:
    model = made(metrics=["mse"])
    batch, values = step(model)
    inputs = {name: array[:3] for name, array in INPUTS.items()}
    piece = placed(model, Batch(-1, -1, np.arange(3), inputs, Y[:3]), tables(model), batch.keys)
    judged = model.evaluate(values, piece, np)
    outputs = model.predict(values, inputs, batch.keys)
    rows = {
        name: values[name][np.searchsorted(batch.keys[name], mixed(ids).reshape(ids.shape))]
        for name, ids in keys(inputs).items()
    }
    due = np.concatenate([rows["users"], rows["items"].sum(1)], 1) @ values["w"] + values["b"]
    assert outputs == pytest.approx(due, abs=1e-5)
    assert judged["loss"] == pytest.approx(((due - Y[:3]) ** 2).mean(), rel=1e-5)
    assert float(judged["mse"]) == pytest.approx(judged["loss"], rel=1e-5)
    assert set(model.to_user_object(values)) == {"w", "b"}, "rows are no part of the pytree"


def test_a_step_is_traced_before_a_run_with_rows_in_the_shape_of_the_ids() -> None:
    model = made()
    model.check(step(model)[0])
    with pytest.raises(TypeError, match="rows"):
        made(lambda p, inputs, targets, key: p["b"]).check(step(model)[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"tables": [USERS]}, "looks up rows of 'users', and nothing says which a batch needs"),
        ({"keys": keys}, r"keys= names rows of tables, and there are none: ps.jax.Model\(..., tables="),
        ({"tables": [USERS], "keys": 3}, "keys is a function of the inputs, found int"),
        (
            {"tables": [ps.Table("users", 4, combiner="sum")], "keys": keys},
            "table 'users' has combiner='sum', which has no effect: a function of JAX is given the row of each id",
        ),
        ({"tables": USERS, "keys": keys}, r"tables is a list such as \[ps.Table"),
    ],
)
def test_what_makes_no_model_is_refused_in_a_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        ps.jax.Model(init, loss, **arguments)
