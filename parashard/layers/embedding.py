"""Embedding layers: rows of a weight, or of embedding tables, for whole numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from parashard.data.base import Array
from parashard.errors import ConfigurationError, WrongModel, shortened
from parashard.layers.base import (
    Layer,
    LooksUpLayer,
    Pass,
    Pullback,
    Shape,
    Shapes,
    Start,
    need_combiner,
    need_start,
    start_of,
)
from parashard.layers.row_sums import sum_by_place, summed_by_row
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.variables import Initializer, Variable
from parashard.process.arguments import checked_whole


@dataclass(frozen=True)
class Embedding(Layer):
    """Row i of W for each whole number i of the input: shape (...) becomes (..., units). Must be the first layer.

    Variables: "weight", shape (values, units). Its gradient is dense: it is zero for rows that a batch does not use,
    and an optimizer with momentum or decay updates these rows too.

    Parameters
    ----------
    values : int
        Number of different inputs, 0 to values - 1. Others are refused with NumPy; on a GPU they are not detected, and
        the result is undefined.
    units : int
        Length of a row.
    initializer : Initializer or {"glorot_uniform", "he_normal"}
        Default: normal with a standard deviation of 1, as in PyTorch.
    """

    name: ClassVar[str] = "embedding"
    of_indices: ClassVar[bool] = True

    values: int
    units: int
    initializer: Start = Initializer("normal", 1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", checked_whole("Embedding: values", self.values))
        object.__setattr__(self, "units", checked_whole("Embedding: units", self.units))
        need_start("Embedding", self.initializer)

    def output_shape(self, shape: Shape) -> Shape:
        return (*shape, self.units)

    def variables(self, shape: Shape) -> dict[str, Variable]:
        start = start_of(self.initializer, self.values, self.units)
        return {"weight": Variable("weight", (self.values, self.units), start)}

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        indices = x.astype(np.int64).reshape(-1)
        if isinstance(x, np.ndarray) and x.size and not 0 <= x.min() <= x.max() < self.values:
            raise WrongModel(
                f"Embedding: inputs are {x.min()} to {x.max()}; allowed: whole numbers of 0 to {self.values - 1}"
            )

        def pull_back(gradient: Array, to_input: bool) -> tuple[Array | None, dict[str, Array]]:
            return None, {"weight": summed_by_row(gradient.reshape(-1, self.units), indices, self.values, at.xp)}

        return weights["weight"].take(indices, axis=0).reshape(*x.shape, self.units), pull_back


_WHOLE = ""
"""Name of the input if inputs are not a dict."""


@dataclass(frozen=True)
class TableEmbedding(LooksUpLayer):
    """A row of an embedding table for each id of the input: shape (...) becomes (..., dimension). Must be first.

    A dict of inputs becomes one vector: the concatenated or combined rows of each input in `tables`, and the values of
    every other input, in the order of the input shapes.

    Variables: none. The rows are on the shards; the gradient covers only rows of the batch.

    Parameters
    ----------
    tables : Table, or mapping of str to Table
        The table to look up; for a dict of inputs, tables by the name of the input with ids. Several inputs may share a
        table.
    combiner : {"sum", "mean"}, optional
        Combines the rows along the last axis of ids, if there is one: shape (..., ids) becomes (..., dimension).

    Notes
    -----
    Ids are whole numbers of up to 64 bits.
    """

    name: ClassVar[str] = "table_embedding"
    of_indices: ClassVar[bool] = True

    tables: EmbeddingTable | Mapping[str, EmbeddingTable]
    combiner: str | None = None
    _by_input: dict[str, EmbeddingTable] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_input = self.tables if isinstance(self.tables, Mapping) else {_WHOLE: self.tables}
        for table in by_input.values():
            if not isinstance(table, EmbeddingTable):
                raise ConfigurationError(
                    'TableEmbedding: tables is one such as ps.Table("users", 16), or a dict of them by input, found '
                    f"{shortened(repr(table))}"
                )
        if not by_input:
            raise ConfigurationError("TableEmbedding: tables names no input")
        need_combiner("TableEmbedding", self.combiner, by_input.values())
        object.__setattr__(self, "_by_input", dict(by_input))

    def own_tables(self) -> tuple[EmbeddingTable, ...]:
        """Return the tables, each once."""
        return tuple(dict.fromkeys(self._by_input.values()))

    def output_shape(self, shape: Shapes) -> Shape:
        if not isinstance(shape, dict):
            if _WHOLE not in self._by_input:
                raise ConfigurationError("it looks up inputs by name, and input_shape is no dict of them")
            return self._shape_of(_WHOLE, shape)
        lacking = [name for name in self._by_input if name not in shape]
        if lacking:
            raise ConfigurationError(
                f"it looks up the input {lacking[0]!r}, and input_shape has {', '.join(map(repr, shape))}"
                if lacking[0] != _WHOLE
                else 'input_shape is a dict, so tables is one by input, such as {"user": ps.Table("users", 16)}'
            )
        return (sum(math.prod(self._shape_of(name, of_input)) for name, of_input in shape.items()),)

    def _shape_of(self, name: str, shape: Shape) -> Shape:
        table = self._by_input.get(name)
        if table is None:
            return shape
        return (*(shape if self.combiner is None else shape[:-1]), table.row_elements)

    def keys(self, inputs: Any) -> dict[str, Array]:
        """Return the ids of a batch by table; ids of several inputs are concatenated."""
        found: dict[str, list[Array]] = {}
        for name, table in self._by_input.items():
            ids = inputs[name] if name else inputs
            if ids.dtype.kind not in "iu":
                raise WrongModel(f"ids of table {table.name!r} are whole numbers, found {ids.dtype}")
            found.setdefault(table.name, []).append(ids.reshape(-1))
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def placed(self, inputs: Any, places: Mapping[str, Array]) -> Any:
        """Return the inputs with ids replaced by the places of their rows, in the order of `keys`."""
        begin = dict.fromkeys(places, 0)
        found = {}
        for name, table in self._by_input.items():
            ids = inputs[name] if name else inputs
            start = begin[table.name]
            begin[table.name] = start + math.prod(ids.shape)
            found[name] = places[table.name][start : begin[table.name]].reshape(ids.shape)
        return {**inputs, **found} if isinstance(inputs, dict) else found[_WHOLE]

    def apply(self, weights: Mapping[str, Array], x: Any, at: Pass) -> tuple[Array, Pullback]:
        shapes = {name: tuple(array.shape) for name, array in x.items()} if isinstance(x, dict) else {_WHOLE: x.shape}
        parts = {name: self._embedded(weights, name, x[name] if name else x) for name in shapes}
        dtype = next(iter(weights.values())).dtype
        if not isinstance(x, dict):
            outputs = parts[_WHOLE]
        else:
            outputs = at.xp.concatenate(
                [part.reshape(len(part), -1).astype(dtype, copy=False) for part in parts.values()], axis=1
            )

        def pull_back(gradient: Array, to_input: bool) -> tuple[Array | None, dict[str, Array]]:
            by_table: dict[str, list[tuple[Array, Array]]] = {name: [] for name in weights}
            start = 0
            for name, part in parts.items():
                width = math.prod(part.shape[1:])
                own = gradient[:, start : start + width] if isinstance(x, dict) else gradient
                start += width
                table = self._by_input.get(name)
                if table is not None:
                    places = x[name] if name else x
                    spread = self._spread(own, places, table.row_elements, at.xp)
                    by_table[table.name].append((spread, places.reshape(-1)))
            found = {}
            for name, pairs in by_table.items():
                by_look_ups, places = (at.xp.concatenate(some) for some in zip(*pairs, strict=True))
                found[name] = sum_by_place(by_look_ups, places, len(weights[name]), at.xp)
            return None, found

        return outputs, pull_back

    def _embedded(self, weights: Mapping[str, Array], name: str, x: Array) -> Array:
        table = self._by_input.get(name)
        if table is None:
            return x
        rows = weights[table.name].take(x.reshape(-1), axis=0).reshape(*x.shape, table.row_elements)
        if self.combiner is None or x.ndim == 1:
            return rows
        return rows.sum(axis=-2) / (max(1, x.shape[-1]) if self.combiner == "mean" else 1)

    def _spread(self, gradient: Array, places: Array, dimension: int, xp: Any) -> Array:
        """Return the gradient of each look-up, shape (look-ups, dimension), from that of the combined rows."""
        if self.combiner is not None and places.ndim > 1:
            share = gradient / max(1, places.shape[-1]) if self.combiner == "mean" else gradient
            gradient = xp.broadcast_to(share.reshape(*places.shape[:-1], 1, dimension), (*places.shape, dimension))
        return gradient.reshape(math.prod(places.shape), dimension)
