"""Keras models that look rows up, functional and subclassed, with a batch and the rows that a worker gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import parashard as ps
from parashard.client.pulled_rows import TableSet
from parashard.data.base import Batch
from parashard.models.looking_up import looked_up
from parashard.plan.embedding import EmbeddingTable
from support.keras_cases import keras, layers

USERS, ITEMS = ps.Table("users", 3, scale=0.5), ps.Table("items", 2, scale=0.5)
ALL = np.array([-(7**20), 10**15, 3, 0, 1 - 2**63, 2**63 - 1], np.int64)
"""Keys, by their places in a dense table."""
PADDING = -1
IDS = np.random.default_rng(0).integers(0, 5, (8, 4))
"""Of the dense table; the last key is in none."""
Y = np.arange(8) % 2

Call = Callable[[Any, Any], Any]


def net(layer: Any, call: Call, dtype: str = "int64", dropout: float = 0.0) -> Any:
    ids = keras.Input((4,), dtype=dtype, name="ids")
    made = keras.Model(ids, layers.Dense(2, name="out")(layers.Dropout(dropout)(call(layer, ids))))
    made.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return made


def model(make: Any, **arguments: Any) -> Any:
    found = ps.keras.Model(make, **arguments)
    found.seed(3)
    return found


def tables(ours: Any) -> dict[str, EmbeddingTable]:
    return {table.name: table for table in ours.tables}


def step(ours: Any, inputs: Any, number: int = 0, targets: Any = Y) -> tuple[Batch, dict[str, Any]]:
    """Return a batch of these inputs, and the variables and rows that a worker gives the model, all only to be read."""
    batch = looked_up(ours, Batch(number, 0, np.arange(8), inputs, targets), tables(ours))
    drawn = TableSet(tuple(tables(ours).values()), 3)
    rows = {name: drawn.first_rows(name, keys) for name, keys in batch.keys.items()}
    values = {**ours.initial_variables(), **rows}
    for value in values.values():
        value.flags.writeable = False
    return batch, values


def pooled(layer: Any, ids: Any) -> Any:
    return layers.GlobalAveragePooling1D()(layers.Activation("relu")(layer(ids)))


def two_tables() -> Any:
    """A functional model of three look-ups, of which two share a table."""
    user, item = keras.Input((), dtype="int64", name="user"), keras.Input((), dtype="int64", name="item")
    friends = keras.Input((2,), dtype="int64", name="friends")
    users = ps.keras.Embedding(USERS)
    found = [users(user), layers.Flatten()(users(friends)), ps.keras.Embedding(ITEMS)(item)]
    made = keras.Model(
        {"user": user, "friends": friends, "item": item},
        layers.Dense(2)(layers.Dropout(0.5)(layers.Concatenate()(found))),
    )
    made.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return made


class Subclassed(keras.Model):  # type: ignore[misc]
    """The same sums by a `call` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = ps.keras.Embedding(USERS), ps.keras.Embedding(ITEMS)
        self.join, self.drop, self.out = layers.Concatenate(), layers.Dropout(0.5), layers.Dense(2)
        self.flat = layers.Flatten()

    def call(self, inputs: Any, training: bool = False) -> Any:
        found = [self.user(inputs["user"]), self.flat(self.user(inputs["friends"])), self.item(inputs["item"])]
        return self.out(self.drop(self.join(found), training=training))


INPUTS = {"user": ALL[IDS[:, 0]], "friends": ALL[IDS[:, 1:3]], "item": ALL[IDS[:, 3]]}


def subclassed() -> Any:
    made = Subclassed()
    made({name: keras.Input(ids.shape[1:], dtype="int64") for name, ids in INPUTS.items()})
    made.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return made


def keys(inputs: Any) -> Any:
    return {"users": np.concatenate([inputs["user"][:, None], inputs["friends"]], 1), "items": inputs["item"]}
