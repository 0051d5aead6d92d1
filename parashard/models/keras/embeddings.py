"""Embedding: rows of an embedding table in a Keras model, in the place of `keras.layers.Embedding`.

`parashard.keras` supplies the rows of a step, through `parashard.models.keras.rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parashard.data.base import Array
from parashard.data.tree import Tree, leaves
from parashard.errors import ConfigurationError, WrongModel
from parashard.job.embeddings import Table, plain_of
from parashard.layers.base import need_combiner
from parashard.models.base import HeldTable
from parashard.models.keras.rows import CURRENT_ROWS
from parashard.models.keras.variables import keras
from parashard.models.row_places import (
    INT32,
    check_fit_begins,
    check_keys,
    check_layer,
    have_wide,
    rows_held,
    without_padding,
)
from parashard.plan.embedding import EmbeddingTable, first_rows, mixed, unmixed

Named = Callable[[Tree], Mapping[str, Any]]


class _Fed(NamedTuple):
    """A look-up in a table of an input of a functional model."""

    table: str
    path: tuple[Any, ...]  # within the model's inputs
    name: str


def look_ups_in(model: Any) -> list[Embedding]:
    """Return a model's look-up layers."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, Embedding)]


class KeysOf:
    """The ids that a built model looks up: by the user's function, or the inputs that feed its look-ups."""

    def __init__(self, model: Any, function: Named | None) -> None:
        self.layers = look_ups_in(model)
        self._function = function
        check_fit_begins(any(layer._held is not None for layer in self.layers))
        fed = _fed_by_inputs(model, self.layers) if function is None and self.layers else None
        check_keys(
            (layer.table.name for layer in self.layers),
            fed if function is None else function,
            "keras",
            "the model has no ps.keras.Embedding: leave it out, or give it one",
            ", as it would if each look-up of a functional model were of one of its inputs",
        )
        self._fed = fed or []

    def of(self, inputs: Tree) -> dict[str, Array]:
        """Return the ids of NumPy inputs by table, without padding; WrongModel if the inputs do not fit the model."""
        if self._function is None:
            parts: dict[str, list[Any]] = {}
            for fed in self._fed:
                parts.setdefault(fed.table, []).append(_input_of(inputs, fed).reshape(-1))
            named: Any = {table: np.concatenate(ids) for table, ids in parts.items()}
        else:
            named = self._function(inputs)
            if not isinstance(named, Mapping):
                return named  # type: ignore[no-any-return]  # refused by the caller
        return without_padding({name: np.asarray(ids) for name, ids in named.items()}, self.layers)


def _fed_by_inputs(model: Any, layers: Sequence[Any]) -> list[_Fed] | None:
    """Return the inputs that feed a functional model's look-ups; None if that is uncertain."""
    called: Any = type(model).call
    functional = model if called is keras.src.models.Functional.call else getattr(model, "_functional", None)
    if functional is None or called not in (keras.src.models.Functional.call, keras.Sequential.call):
        return None
    struct = keras.tree.flatten_with_path(functional._inputs_struct)
    inputs = {id(tensor): (path, tensor.name) for path, tensor in struct}
    nodes = {id(node) for at_depth in functional._nodes_by_depth.values() for node in at_depth}
    found = []
    for layer in layers:
        own = [node for node in layer._inbound_nodes if id(node) in nodes]
        if not own or any(id(node.input_tensors[0]) not in inputs for node in own):
            return None
        found += [_Fed(layer.table.name, *inputs[id(node.input_tensors[0])]) for node in own]
    return found


def _input_of(inputs: Tree, fed: _Fed) -> Any:
    """Return the data of one input of a functional model, by its path or its name."""
    below = inputs
    for step in fed.path:
        found = isinstance(below, dict) and step in below
        found = found or (isinstance(below, tuple | list) and isinstance(step, int) and step < len(below))
        below = below[step] if found else None
    if isinstance(inputs, dict) and below is None:
        below = inputs.get(fed.name)
    elif not isinstance(inputs, dict | tuple | list) and len(fed.path) < 2:
        below = inputs
    if not hasattr(below, "dtype"):
        given = ", ".join(name or "one array" for name, _ in leaves(inputs))
        raise WrongModel(f"the model looks up its input {fed.name!r}, and the data has: {given}; name it, or say keys=")
    return below


@keras.saving.register_keras_serializable(package="parashard")
class Embedding(keras.layers.Layer):  # type: ignore[misc]  # the type checker has no Keras
    """A row of a table for each id: shape (...) becomes (..., dimension), or the sum or mean of the last axis' rows.

    Parameters
    ----------
    table : Table
        Table of the rows; several layers may share it.
    combiner : {"sum", "mean"}, optional
        Combines the rows of the last axis: shape (..., ids) becomes (..., dimension).
    padding_key : int, optional
        An id that has no row: it becomes zeros, has no gradient and does not count in a mean. Without a combiner it is
        masked, as by `mask_zero` of Keras' layer. It has at most 32 bits.
    **arguments
        Arguments of every Keras layer, such as `name`.

    Notes
    -----
    Ids are whole numbers: `keras.Input(shape, dtype="int64")`. The layer has no variable: rows are on the shards, and
    are returned in the layer's compute dtype.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        combiner: str | None = None,
        padding_key: int | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(autocast=False, **arguments)
        check_layer("ps.keras.Embedding", table, padding_key)
        need_combiner("ps.keras.Embedding", combiner, [table])
        if padding_key is not None and not INT32.min <= padding_key <= INT32.max:
            raise ConfigurationError(f"ps.keras.Embedding: padding_key has at most 32 bits, found {padding_key}")
        self.table = table
        self.combiner = combiner
        self.padding_key = padding_key
        self.supports_masking = padding_key is not None and combiner is None
        self.built = True
        self._seed = 0  # of initial values
        self._held: HeldTable | None = None  # of a model that `Trainer.model` returned, or that Keras has loaded
        self._is_wide = False  # whether a key that is held has more than 32 bits

    @property
    def dimension(self) -> int:
        """Length of a row."""
        return self.table.row_elements

    def call(self, ids: Any) -> Any:
        """Return the rows of ids, or their sums or means."""
        self._check(ids)
        rows = keras.ops.cast(self._looked_up(ids), self.compute_dtype)
        if self.combiner is None:
            return rows
        sums = keras.ops.sum(rows, axis=-2)
        if self.combiner == "sum":
            return sums
        if self.padding_key is None:
            return sums / max(1, ids.shape[-1])
        counts = keras.ops.sum(keras.ops.cast(keras.ops.not_equal(ids, self.padding_key), rows.dtype), axis=-1)
        return sums / keras.ops.maximum(counts, 1)[..., None]

    def _check(self, ids: Any) -> None:
        dtype = keras.backend.standardize_dtype(ids.dtype)
        if dtype not in ("int32", "int64"):
            raise WrongModel(
                f"ids of table {self.table.name!r} are int32 or int64, found {dtype}: keras.Input(shape, dtype='int64')"
            )

    def _looked_up(self, ids: Any) -> Any:
        if (rows := CURRENT_ROWS.get()) is not None:
            return rows.look_up(self.table.name, self.dimension, ids, self.padding_key)
        if keras.src.backend.in_symbolic_scope():  # Keras asks for shapes
            return keras.ops.zeros((*ids.shape, self.dimension), "float32")
        if self._held is None:
            raise WrongModel(
                f"the rows of table {self.table.name!r} are on the shards: trainer.predict looks them up, "
                "trainer.model() returns the model with all of them, and a model is built by calling it on keras.Input"
            )
        try:
            found = keras.ops.convert_to_numpy(ids)
        except Exception as error:
            raise WrongModel(
                f"the rows of table {self.table.name!r} are looked up outside of what Keras compiles: set "
                "model.run_eagerly = True"
            ) from error
        return self._of_held(self._held, found)

    def _of_held(self, held: HeldTable, ids: np.ndarray[Any, Any]) -> Any:
        if self._is_wide and ids.dtype.itemsize < 8:
            raise WrongModel(
                f"table {self.table.name!r} has keys of more than 32 bits, and the ids are {ids.dtype}: "
                "keras.Input(shape, dtype='int64'), on JAX with JAX_ENABLE_X64=1; trainer.predict takes any"
            )
        rows = np.zeros((*ids.shape, self.dimension), np.float32)
        there = np.ones(ids.shape, np.bool_) if self.padding_key is None else ids != self.padding_key
        rows[there] = rows_held(held, ids[there])
        return keras.ops.convert_to_tensor(rows)

    def compute_mask(self, ids: Any, previous_mask: Any = None) -> Any:
        """Return which ids are not the padding key; None: there is no such key, or no axis left."""
        return keras.ops.not_equal(ids, self.padding_key) if self.supports_masking else None

    def compute_output_shape(self, shape: Any) -> tuple[int | None, ...]:
        """Return the shape with one more axis; with a combiner it replaces the last one."""
        if self.combiner is not None and not shape:
            raise ConfigurationError("ps.keras.Embedding: a combiner is of the ids' last axis, and they have none")
        return (*(shape if self.combiner is None else shape[:-1]), self.dimension)

    def compute_output_spec(self, ids: Any) -> Any:
        """Return the symbolic output, for building a model."""
        self._check(ids)
        return keras.KerasTensor(self.compute_output_shape(ids.shape), self.compute_dtype)

    # --- rows of its own ---

    def hold(self, held: HeldTable, seed: int) -> None:
        """Look up in these rows from now on; `seed` is that of the initial values of ids without a row."""
        self._held, self._seed = held, seed
        self._is_wide = have_wide(held.keys)

    def save_own_variables(self, store: Any) -> None:
        """Save keys and rows, if it holds them."""
        if self._held is not None:
            store["keys"] = unmixed(self._held.keys)
            store["rows"] = self._held.rows
            store["seed"] = np.array(self._seed, np.int64)

    def load_own_variables(self, store: Any) -> None:
        """Load the saved keys and rows, if any."""
        if "keys" in store.keys():  # noqa: SIM118  # of a file of Keras, which has no `in`
            seed = int(np.array(store["seed"]))
            held = HeldTable(mixed(np.array(store["keys"])), np.array(store["rows"]), first_rows(self.table, seed))
            self.hold(held, seed)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        config: dict[str, Any] = super().get_config()
        return {
            **config,
            "table": {"name": self.table.name, **plain_of(self.table)},
            "combiner": self.combiner,
            "padding_key": self.padding_key,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Embedding:
        """Return a layer with these arguments."""
        return cls(**{**config, "table": Table(**config["table"])})
