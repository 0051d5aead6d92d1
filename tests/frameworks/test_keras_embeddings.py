"""Rows of tables in Keras models: outputs and gradients of Keras' own Embedding over a dense table of the same rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api.batching import Accumulated
from parashard.client.pulled_rows import TableSet
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.models.base import HeldTable
from parashard.models.framework import WrongModel
from parashard.models.looking_up import looked_up, placed
from parashard.plan.embedding import EmbeddingTable, mixed
from parashard.plan.optimizers import SGD

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="NO TEST OF ps.keras: it is not installed; `make test-frameworks` has it")
layers = keras.layers

USERS, ITEMS = ps.Table("users", 3, scale=0.5), ps.Table("items", 2, scale=0.5)
ALL = np.array([-7, 10**15, 3, 0, -(2**63), 2**63 - 1], np.int64)
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
    return {table.name: table.embedding for table in ours.tables}


def step(ours: Any, inputs: Any, number: int = 0, targets: Any = Y) -> tuple[Batch, dict[str, Any]]:
    """Return a batch of these inputs, and the variables and rows that a worker gives the model, all only to be read."""
    batch = looked_up(ours, Batch(number, 0, np.arange(8), inputs, targets), tables(ours))
    drawn = TableSet(tuple(tables(ours).values()), 3)
    rows = {name: drawn.first_rows(name, keys) for name, keys in batch.keys.items()}
    values = {**ours.initial_variables(), **rows}
    for value in values.values():
        value.flags.writeable = False
    return batch, values


class DenseTable(layers.Embedding):  # type: ignore[misc]
    """Keras' own over the rows of ALL, and of zeros for the padding key, masked or combined as ours."""

    def __init__(self, combiner: str | None = None, mask: bool = False) -> None:
        super().__init__(7, 3)
        self._combiner, self.supports_masking = combiner, mask
        rows = TableSet((USERS.embedding,), 3).first_rows("users", mixed(ALL))
        self.build()
        self.embeddings.assign(np.concatenate([rows, np.zeros((1, 3), np.float32)]))

    def call(self, ids: Any) -> Any:
        rows = super().call(ids)
        if self._combiner is None:
            return rows
        counts = keras.ops.sum(keras.ops.cast(ids != 6, "float32"), -1, keepdims=True)
        return keras.ops.sum(rows, -2) / (keras.ops.maximum(counts, 1) if self._combiner == "mean" else 1)

    def compute_mask(self, ids: Any, previous_mask: Any = None) -> Any:
        return keras.ops.not_equal(ids, 6) if self.supports_masking else None

    def compute_output_spec(self, ids: Any) -> Any:
        shape = ids.shape if self._combiner is None else ids.shape[:-1]
        return keras.KerasTensor((*shape, 3), "float32")


def pooled(layer: Any, ids: Any) -> Any:
    return layers.GlobalAveragePooling1D()(layers.Activation("relu")(layer(ids)))


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], Call]] = {
    "rows, twice": (
        lambda: ps.keras.Embedding(USERS),
        DenseTable,
        lambda layer, ids: layers.Flatten()(layer(ids)) + layers.Flatten()(layer(ids)) ** 2,
    ),
    "rows, masked": (
        lambda: ps.keras.Embedding(USERS, padding_key=PADDING),
        lambda: DenseTable(mask=True),
        pooled,
    ),
    "sum": (lambda: ps.keras.Embedding(USERS, "sum"), lambda: DenseTable("sum"), lambda layer, ids: layer(ids)),
    "mean, padded": (
        lambda: ps.keras.Embedding(USERS, "mean", PADDING),
        lambda: DenseTable("mean"),
        lambda layer, ids: layer(ids),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_a_dense_table(name: str) -> None:
    own, dense, call = CASES[name]
    places = IDS.copy()
    if "padded" in name or "masked" in name:
        places[2:5, 1:3] = 6
    if "padded" in name:
        places[6] = 6  # the whole of one example
    ids = np.append(ALL, PADDING)[places]
    ours, theirs = model(lambda: net(own(), call)), model(lambda: net(dense(), call))
    batch, values = step(ours, ids)
    (weight,) = theirs.initial_variables().keys() - ours.initial_variables().keys()
    due_values = {name: value for name, value in {**theirs.initial_variables(), **values}.items() if name != "users"}
    loss, gradients = ours.loss_and_gradients(values, batch, np)
    due, of_dense = theirs.loss_and_gradients(due_values, Batch(0, 0, np.arange(8), places, Y), np)
    assert float(loss) == pytest.approx(float(due), rel=1e-6)
    used = [place for place in range(5) if (places == place).any()]
    found = gradients["users"][np.searchsorted(batch.keys["users"], mixed(ALL[used]))]
    assert found == pytest.approx(np.asarray(of_dense[weight])[used], abs=1e-6)
    assert len(batch.keys["users"]) == len(used) == len(gradients["users"]), "padding has no row"
    for other in of_dense.keys() - {weight}:
        assert np.asarray(gradients[other]) == pytest.approx(np.asarray(of_dense[other]), abs=1e-6)
    outputs = ours.predict(values, ids, batch.keys)
    assert outputs == pytest.approx(theirs.predict(due_values, places), abs=1e-6)


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


def subclassed() -> Any:
    made = Subclassed()
    made({name: keras.Input(ids.shape[1:], dtype="int64") for name, ids in INPUTS.items()})
    made.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return made


def keys(inputs: Any) -> Any:
    return {"users": np.concatenate([inputs["user"][:, None], inputs["friends"]], 1), "items": inputs["item"]}


INPUTS = {"user": ALL[IDS[:, 0]], "friends": ALL[IDS[:, 1:3]], "item": ALL[IDS[:, 3]]}


def test_a_functional_model_says_which_inputs_it_looks_up_and_a_subclassed_one_is_told() -> None:
    derived, named, other = model(two_tables), model(two_tables, keys=keys), model(subclassed, keys=keys)
    batch, values = step(derived, INPUTS)
    assert {name: found.tolist() for name, found in step(named, INPUTS)[0].keys.items()} == {
        name: found.tolist() for name, found in batch.keys.items()
    }
    own = step(other, INPUTS)[1]
    theirs = {mine: values[name] for mine, name in zip(own, values, strict=True)}
    outputs = derived.predict(values, INPUTS, batch.keys)
    assert outputs == pytest.approx(other.predict(theirs, INPUTS, batch.keys), abs=1e-6)


def test_a_step_again_has_its_bits_and_another_step_draws_anew() -> None:
    ours = model(two_tables)
    batch, values = step(ours, INPUTS)
    first, again, other = (
        ours.loss_and_gradients(values, of_step, np)[1]["users"].tobytes()
        for of_step in (batch, batch, step(ours, INPUTS, 1)[0])
    )
    assert first == again != other


def test_pieces_of_a_step_have_the_gradient_of_the_whole() -> None:
    ours = model(lambda: net(ps.keras.Embedding(USERS), pooled))
    batch, values = step(ours, ALL[IDS])
    due = ours.loss_and_gradients(values, batch, np)[1]
    found = Accumulated(ours, 2).loss_and_gradients(values, batch, np)[1]
    for name, gradient in due.items():
        assert np.asarray(found[name]) == pytest.approx(np.asarray(gradient), abs=1e-6)


def test_an_evaluation_has_the_rows_of_all_of_its_pieces() -> None:
    ours = model(two_tables)
    batch, values = step(ours, INPUTS)
    piece = Batch(-1, -1, np.arange(3), {name: array[:3] for name, array in INPUTS.items()}, Y[:3])
    judged = ours.evaluate(values, placed(ours, piece, tables(ours), batch.keys), np)
    logits = ours.predict(values, piece.inputs, batch.keys)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert float(judged["loss"]) == pytest.approx(-log_p[np.arange(3), Y[:3]].mean(), rel=1e-5)
    assert float(judged["accuracy"]) == pytest.approx((logits.argmax(1) == Y[:3]).mean())


def test_rows_have_the_compute_dtype_and_gradients_are_float32() -> None:
    def half() -> Any:
        return net(ps.keras.Embedding(USERS, dtype="mixed_float16"), pooled)

    ours = model(half)
    batch, values = step(ours, ALL[IDS])
    plain = model(lambda: net(ps.keras.Embedding(USERS), pooled))
    due, found = (one.loss_and_gradients(values, batch, np)[1]["users"] for one in (plain, ours))
    assert found.dtype == np.float32
    assert found == pytest.approx(due, abs=2e-3)
    assert found.tobytes() != due.tobytes()


def test_the_number_of_different_keys_compiles_nothing_anew() -> None:
    called = []

    class Counted(ps.keras.Embedding):  # type: ignore[misc]
        def call(self, ids: Any) -> Any:
            called.append(1)
            return super().call(ids)

    ours = model(lambda: net(Counted(USERS), pooled))
    for few in (5, 1, 3, 2):
        batch, values = step(ours, ALL[IDS % few])
        assert len(batch.keys["users"]) <= few
        ours.loss_and_gradients(values, batch, np)
        called.append(0)
    assert keras.config.backend() == "torch" or called[called.index(0) :] == [0] * 4


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


def test_a_sequential_model_is_derived_checked_and_trained() -> None:
    def make() -> Any:
        made = keras.Sequential([keras.Input((4,), dtype="int64"), ps.keras.Embedding(USERS, "mean"), layers.Dense(2)])
        made.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    ours = model(make)
    batch, values = step(ours, ALL[IDS])
    ours.check(batch)
    assert ours.loss_and_gradients(values, batch, np)[1]["users"].any()


def test_the_model_of_a_trainer_holds_the_rows_draws_others_and_is_saved_with_them(tmp_path: Path) -> None:
    def make() -> Any:
        return net(ps.keras.Embedding(SMALL, padding_key=PADDING), pooled)

    ours, drawn = model(make), TableSet((SMALL.embedding,), 3)
    batch, values = step(ours, IDS)
    own = ours.own({name: values[name] for name in ours.initial_variables()})
    own_keys = batch.keys["small"]
    ours.hold(own, {"small": HeldTable(own_keys, 2 * values["small"], lambda words: drawn.first_rows("small", words))})
    asked = np.array([[0, 1, 77, PADDING]])
    words = mixed(asked[0, :3])
    rows = np.concatenate(
        [2 * values["small"][np.searchsorted(own_keys, words[:2])], drawn.first_rows("small", words[2:])]
    )
    own.save(tmp_path / "net.keras")
    for there in (own, keras.models.load_model(tmp_path / "net.keras")):
        (layer,) = (layer for layer in there.layers if isinstance(layer, ps.keras.Embedding))
        found = keras.ops.convert_to_numpy(layer(keras.ops.convert_to_tensor(asked)))
        assert found[0, :3].tobytes() == rows.tobytes()
        assert not found[0, 3].any(), "padding"
        outputs = there.predict(IDS, verbose=0)
        assert outputs == pytest.approx(
            ours.predict({**values, "small": 2 * values["small"]}, IDS, batch.keys), abs=1e-6
        )
        assert layer.table == SMALL
    with pytest.raises(ConfigurationError, match="holds rows of tables, with which no fit begins"):
        model(own)


SMALL = ps.Table("small", 3, scale=0.5, optimizer=ps.Adam(0.1), evict_unused_steps=5)


def test_a_layer_takes_the_table_that_a_job_file_declares_and_copies_it() -> None:
    layer = ps.keras.Embedding(EmbeddingTable("users", 3, SGD(0.1), dtype="bfloat16", encoding="int8"))
    copied = ps.keras.Embedding.from_config(layer.get_config())
    assert copied.table.embedding == layer.table


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
