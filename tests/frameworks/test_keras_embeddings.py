"""Rows of tables in Keras models: outputs and gradients of Keras' own Embedding over a dense table of the same rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api.splitting import Accumulated
from parashard.client.pulled_rows import TableSet
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.models.base import HeldTable
from parashard.models.looking_up import placed
from parashard.plan.embedding import mixed
from support.keras_cases import keras, layers
from support.keras_table_cases import (
    ALL,
    IDS,
    INPUTS,
    PADDING,
    USERS,
    Call,
    Y,
    keys,
    model,
    net,
    pooled,
    step,
    subclassed,
    tables,
    two_tables,
)


class DenseTable(layers.Embedding):  # type: ignore[misc]
    """Keras' own over the rows of ALL, and of zeros for the padding key, masked or combined as ours."""

    def __init__(self, combiner: str | None = None, mask: bool = False) -> None:
        super().__init__(7, 3)
        self._combiner, self.supports_masking = combiner, mask
        rows = TableSet((USERS,), 3).first_rows("users", mixed(ALL))
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

    ours, drawn = model(make), TableSet((SMALL,), 3)
    batch, values = step(ours, IDS)
    own = ours.to_user_object({name: values[name] for name in ours.initial_variables()})
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
