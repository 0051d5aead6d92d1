"""Ids of look-ups in Keras models: what stands for them, and those that are refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.errors import ConfigurationError, WrongModel
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.optimizers import SGD
from support.keras_cases import keras, layers
from support.keras_table_cases import (
    ALL,
    IDS,
    INPUTS,
    USERS,
    keys,
    model,
    net,
    pooled,
    step,
    subclassed,
    two_tables,
)


def test_ids_keep_what_is_equal_and_what_is_small() -> None:
    """Whatever stands for an id of 64 bits where the framework has none."""

    class Same(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.user, self.out = ps.keras.Embedding(USERS), layers.Dense(2)

        def call(self, inputs: Any) -> Any:
            same = keras.ops.cast(inputs["user"] == inputs["item"], "float32")[:, None]
            small = keras.ops.cast(inputs["user"] == 3, "float32")[:, None]
            return self.out(self.user(inputs["user"])) * 0 + keras.ops.concatenate([same, small], 1)

    def make() -> Any:
        made = Same()
        made({name: keras.Input((), dtype="int64") for name in ("user", "item")})
        made.compile(loss="mse")
        return made

    ours = model(make, keys=lambda inputs: {"users": inputs["user"]})
    inputs = {"user": INPUTS["user"], "item": np.where(np.arange(8) % 2, INPUTS["user"], 10**16 + np.arange(8))}
    inputs["item"][0] = -(2**31)
    batch, values = step(ours, inputs, targets=np.zeros((8, 2), np.float32))
    outputs = ours.predict(values, inputs, batch.keys)
    assert outputs.tolist() == np.stack([np.arange(8) % 2, inputs["user"] == 3], 1).tolist()
    assert (inputs["user"] == 3).any()


def test_a_layer_takes_the_table_that_a_job_file_declares_and_copies_it() -> None:
    layer = ps.keras.Embedding(EmbeddingTable("users", 3, SGD(0.1), dtype="bfloat16", encoding="int8"))
    copied = ps.keras.Embedding.from_config(layer.get_config())
    assert copied.table == layer.table


def test_a_key_that_was_not_named_is_refused_with_the_key() -> None:
    ours = model(lambda: net(ps.keras.Embedding(USERS), pooled), keys=lambda ids: {"users": ids[:, :1]})
    batch, values = step(ours, np.broadcast_to(ALL[[0, 0, 1, 2]], (8, 4)))
    with pytest.raises(WrongModel, match=f"key {10**15} of table 'users' is looked up, and keys= did not name it"):
        ours.loss_and_gradients(values, batch, np)


def test_ids_that_were_cut_to_32_bits_are_refused() -> None:
    ours = model(lambda: net(ps.keras.Embedding(USERS), pooled, "int32"))
    batch, values = step(ours, np.array([5, 2**32 + 5] * 16).reshape(8, 4))
    if keras.config.backend() == "jax":  # whose tensors have no others: ids are named anew
        assert ours.loss_and_gradients(values, batch, np)[1]["users"].any()
        return
    with pytest.raises(WrongModel, match=r"keys of more than 32 bits, and the layer has ids of int32: keras.Input"):
        ours.loss_and_gradients(values, batch, np)


def test_ids_that_depend_on_rows_are_refused() -> None:
    class Chained(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.user, self.out = ps.keras.Embedding(USERS), layers.Dense(2)

        def call(self, ids: Any) -> Any:
            first = self.user(ids[:, 0])
            return self.out(first + self.user(keras.ops.cast(keras.ops.abs(first[:, 0]) * 1e6, "int32")))

    def make() -> Any:
        made = Chained()
        made(keras.Input((4,), dtype="int64"))
        made.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    ours = model(make, keys=lambda ids: {"users": np.concatenate([ids[:, :1], np.zeros_like(ids[:, :1])])})
    batch, values = step(ours, IDS)
    with pytest.raises(WrongModel, match=r"depend on rows that were looked up|and keys= did not name it"):
        ours.loss_and_gradients(values, batch, np)


def inner() -> Any:
    within = net(ps.keras.Embedding(USERS), pooled)
    ids = keras.Input((4,), dtype="int64")
    made = keras.Model(ids, within(ids))
    made.compile(loss="mse")
    return made


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ps.keras.Embedding(10), "ps.keras.Embedding: table is one such as ps.Table"),
        (lambda: ps.keras.Embedding(USERS, "max"), "combiner is sum or mean, found 'max'"),
        (lambda: ps.keras.Embedding(ps.Table("u", 3, combiner="sum")), "table 'u' has combiner='sum', and ps.keras.E"),
        (lambda: ps.keras.Embedding(USERS, padding_key=1.5), "padding_key is a whole number, found 1.5"),
        (lambda: ps.keras.Embedding(USERS, padding_key=2**40), "padding_key has at most 32 bits, found 1099511627776"),
        (
            lambda: net(ps.keras.Embedding(USERS), pooled, "float32"),
            "ids of table 'users' are int32 or int64, found float32: keras.Input",
        ),
        (lambda: model(subclassed), "rows of 'items', 'users', and nothing says which a batch needs"),
        (lambda: model(inner), "rows of 'users', and nothing says which a batch needs"),
        (lambda: ps.keras.Model(dict, keys=3), "keys is a function of the inputs, found int"),
        (
            lambda: model(lambda: net(layers.Embedding(7, 3), pooled), keys=keys),
            "keys= names rows of tables, and the model has no ps.keras.Embedding",
        ),
        (lambda: step(model(two_tables), {"user": ALL}), "looks up its input 'friends', and the data has: user"),
        (
            lambda: ps.keras.Embedding(USERS)(keras.ops.convert_to_tensor([1])),
            "the rows of table 'users' are on the shards: trainer",
        ),
    ],
)
def test_what_cannot_be_looked_up_is_refused_in_a_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises((ConfigurationError, WrongModel)) as refused:
        make()
    assert sentence in str(refused.value)
