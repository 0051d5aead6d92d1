"""Rows of tables for what a Keras model computes: lent to its layers while it is called, and their gradients after it.

On PyTorch a look-up is made as the layer is called. What JAX compiles cannot look up: its layers are called twice,
first for the ids alone, then with their rows; so the rows are in the ids' shape, and the number of different keys
compiles nothing anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parashard.data.base import Array
from parashard.data.tree import Tree, leaves, map_leaves
from parashard.errors import WrongModel
from parashard.models.framework import host_array
from parashard.models.row_places import INT32, NO_KEYS, check_width, places_among, summed_by_table
from parashard.plan.embedding import Keys

Asked = list[dict[tuple[str, int, int | None], Any]]
"""The ids of each look-up, by its table, dimension and padding key: a tree whose names JAX keeps as they are."""


LENT: ContextVar[Any] = ContextVar("rows of a Keras model", default=None)
"""What the layers that this thread calls look up in; None: nothing is lent to them."""


@contextmanager
def lent(rows: Any) -> Iterator[None]:
    """Lend rows for a while: `look_up` returns those of ids, shape (*ids, dimension), zeros of the padding key."""
    token = LENT.set(rows)
    try:
        yield
    finally:
        LENT.reset(token)


class KerasStep(NamedTuple):
    """A number with its gradients."""

    value: Any
    more: Any  # what else the function returns
    gradients: list[Any]  # by what is trained; None is a gradient of zeros
    of_rows: Mapping[str, Array | None]  # by the rows of each table


class KerasRows(NamedTuple):
    """The rows that a step or an evaluation has pulled, by table, only read."""

    values: Mapping[str, Array]
    keys: Mapping[str, Keys]  # mixed, ascending
    xp: Any  # the values' `numpy` or `cupy`
    renamed: Renamed  # what the model's inputs have in place of ids


class Recorded:
    """Rows in the order of their look-ups, zeros where there are none yet, and the ids that they were asked for."""

    def __init__(self, zeros: Any, rows: Sequence[Any] = ()) -> None:
        self._zeros, self._rows = zeros, rows
        self.asked: Asked = []

    def look_up(self, table: str, dimension: int, ids: Any, padding_key: int | None) -> Any:
        self.asked.append({(table, dimension, padding_key): ids})
        if self._rows:
            return self._rows[len(self.asked) - 1]
        return self._zeros((*ids.shape, dimension), "float32")


class Gathered:
    """The rows of look-ups whose ids are known."""

    def __init__(self, pulled: KerasRows, asked: Asked) -> None:
        self._keys, self._xp = pulled.keys, pulled.xp
        self._ids = [np.asarray(ids) for look_up in asked for ids in look_up.values()]
        self._look_ups: list[tuple[str, Any, Any]] = []  # table, which ids have a row, and its place
        self.rows: list[Any] = []
        for ((table, dimension, padding_key),), ids in zip(asked, self._ids, strict=True):
            own = pulled.renamed.ids(ids).reshape(-1)
            there = np.flatnonzero(own != padding_key) if padding_key is not None else np.arange(len(own))
            keys = pulled.keys.get(table, NO_KEYS)
            if not pulled.renamed:
                check_width(ids.dtype, keys, table)
            places = places_among(own[there], keys, table)
            self._look_ups.append((table, self._xp.asarray(there), self._xp.asarray(places)))
            rows = self._xp.zeros((len(own), dimension), np.float32)
            if len(there):
                rows[self._look_ups[-1][1]] = pulled.values[table][self._look_ups[-1][2]]
            self.rows.append(rows.reshape(*ids.shape, dimension))

    def check(self, asked: Asked) -> None:
        """Raise WrongModel if the model, when it had the rows, asked for others: it looked up by what rows are."""
        again = [np.asarray(ids) for look_up in asked for ids in look_up.values()]
        for look_up, first, then in zip(self._look_ups, self._ids, again, strict=True):
            if not np.array_equal(first, then):
                raise WrongModel(
                    f"ids of table {look_up[0]!r} depend on rows that were looked up, which are pulled before the "
                    "model is called: ids are a function of the inputs alone"
                )

    def gradients(self, by_rows: Sequence[Any]) -> dict[str, Array | None]:
        """Return the gradient of each table's rows, from that by `rows`; None: no look-up counts."""
        look_ups = []
        for (table, there, places), gradient in zip(self._look_ups, by_rows, strict=True):
            found = self._xp.asarray(gradient)
            look_ups.append((table, found.reshape(-1, found.shape[-1])[there], places))
        return summed_by_table(look_ups, self._keys, self._xp)


class Renamed:
    """What a model's inputs have in place of ids of more than 32 bits, which JAX has none of: numbers of the batch.

    Each has one that no input has, the same in all inputs, so that ids are equal where they were. Others stay.
    """

    def __init__(self, inputs: Tree, others: Sequence[int] = ()) -> None:
        whole = [_signed(array).ravel() for _, array in leaves(inputs) if array.dtype.kind in "iu"]
        numbers = np.concatenate([_NONE, *whole])
        self._ids: npt.NDArray[np.int64] = np.unique(numbers[_is_beyond(numbers)])
        self._numbers: npt.NDArray[np.int64] = _NONE
        self.inputs = inputs
        if len(self._ids):
            used = np.unique(np.append(numbers, np.asarray(others, np.int64)))
            free = np.arange(len(self._ids) + len(used)) + INT32.min
            self._numbers = np.setdiff1d(free, used, assume_unique=True)[: len(self._ids)]
            self.inputs = map_leaves(self._renamed, inputs)

    def _renamed(self, array: Any) -> Any:
        if array.dtype.kind not in "iu":
            return array
        ids = _signed(array).copy()
        beyond = _is_beyond(ids)
        ids[beyond] = self._numbers[np.searchsorted(self._ids, ids[beyond])]
        return ids.astype(np.int32)

    def __bool__(self) -> bool:
        return len(self._ids) > 0

    def ids(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the ids of numbers that the model has asked for."""
        if not self:
            return numbers
        found = numbers.astype(np.int64)
        places = np.minimum(np.searchsorted(self._numbers, found), len(self._numbers) - 1)
        return np.where(self._numbers[places] == found, self._ids[places], found)


def _signed(array: Any) -> npt.NDArray[Any]:
    """Return whole numbers on the host, unsigned ones of 64 bits by the signed ones with their bits: the same keys."""
    found = np.ascontiguousarray(host_array(array))
    return found.view(np.int64) if found.dtype == np.uint64 else found.astype(np.int64, copy=False)


def _is_beyond(ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return (ids < INT32.min) | (ids > INT32.max)


_NONE: npt.NDArray[np.int64] = np.empty(0, np.int64)
NOT_RENAMED = Renamed(())
NO_ROWS = KerasRows({}, {}, np, NOT_RENAMED)
