"""Rows of tables for a Keras model: supplied to its layers while it is called, and their gradients afterwards.

On PyTorch a layer looks rows up when it is called. Functions that JAX compiles cannot: their layers are called twice,
first to collect ids, then with the rows. The rows have the ids' shape, so that the number of distinct keys causes no
recompilation.
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
"""The ids of each look-up, by its table, dimension and padding key: a tree whose keys JAX leaves unchanged."""


CURRENT_ROWS: ContextVar[Any] = ContextVar("rows of a Keras model", default=None)
"""The rows that layers called by this thread look up in; None: there are none."""


@contextmanager
def use_rows(rows: Any) -> Iterator[None]:
    """Supply rows within the `with` block: `rows.look_up` returns (*ids, dimension), zeros for the padding key."""
    token = CURRENT_ROWS.set(rows)
    try:
        yield
    finally:
        CURRENT_ROWS.reset(token)


class KerasStep(NamedTuple):
    """A number with its gradients."""

    value: Any
    more: Any  # the function's other results
    gradients: list[Any]  # by trained variable; None is a gradient of zeros
    of_rows: Mapping[str, Array | None]  # by the rows of each table


class KerasRows(NamedTuple):
    """The pulled rows of a step or an evaluation, by table, read-only."""

    values: Mapping[str, Array]
    keys: Mapping[str, Keys]  # mixed, ascending
    xp: Any  # the values' `numpy` or `cupy`
    narrow_ids: NarrowIds  # the stand-ins of ids in the model's inputs


class Recorded:
    """Supplies rows in the order of look-ups, or zeros if there are none yet, and records the ids of the look-ups."""

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
            own = pulled.narrow_ids.ids(ids).reshape(-1)
            there = np.flatnonzero(own != padding_key) if padding_key is not None else np.arange(len(own))
            keys = pulled.keys.get(table, NO_KEYS)
            if not pulled.narrow_ids:
                check_width(ids.dtype, keys, table)
            places = places_among(own[there], keys, table)
            self._look_ups.append((table, self._xp.asarray(there), self._xp.asarray(places)))
            rows = self._xp.zeros((len(own), dimension), np.float32)
            if len(there):
                rows[self._look_ups[-1][1]] = pulled.values[table][self._look_ups[-1][2]]
            self.rows.append(rows.reshape(*ids.shape, dimension))

    def check(self, asked: Asked) -> None:
        """Raise WrongModel if the call with rows asked for other ids: they depended on the rows."""
        again = [np.asarray(ids) for look_up in asked for ids in look_up.values()]
        for look_up, first, then in zip(self._look_ups, self._ids, again, strict=True):
            if not np.array_equal(first, then):
                raise WrongModel(
                    f"ids of table {look_up[0]!r} depend on rows that were looked up, which are pulled before the "
                    "model is called: ids are a function of the inputs alone"
                )

    def gradients(self, by_rows: Sequence[Any]) -> dict[str, Array | None]:
        """Return the gradient of each table's rows, from that by `rows`; None if no row was looked up."""
        look_ups = []
        for (table, there, places), gradient in zip(self._look_ups, by_rows, strict=True):
            found = self._xp.asarray(gradient)
            look_ups.append((table, found.reshape(-1, found.shape[-1])[there], places))
        return summed_by_table(look_ups, self._keys, self._xp)


class NarrowIds:
    """Stand-ins of 32 bits for wider ids in a model's inputs, if JAX has no whole numbers of 64 bits.

    Each wide id gets a number that occurs in no input, the same in all inputs, so that equal ids stay equal. Others are
    unchanged.
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
            self.inputs = map_leaves(self._narrowed, inputs)

    def _narrowed(self, array: Any) -> Any:
        if array.dtype.kind not in "iu":
            return array
        ids = _signed(array).copy()
        beyond = _is_beyond(ids)
        ids[beyond] = self._numbers[np.searchsorted(self._ids, ids[beyond])]
        return ids.astype(np.int32)

    def __bool__(self) -> bool:
        return len(self._ids) > 0

    def ids(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the original ids of numbers that the model asked for."""
        if not self:
            return numbers
        found = numbers.astype(np.int64)
        places = np.minimum(np.searchsorted(self._numbers, found), len(self._numbers) - 1)
        return np.where(self._numbers[places] == found, self._ids[places], found)


def _signed(array: Any) -> npt.NDArray[Any]:
    """Return whole numbers on the host as int64; uint64 keeps its bits, and so its keys."""
    found = np.ascontiguousarray(host_array(array))
    return found.view(np.int64) if found.dtype == np.uint64 else found.astype(np.int64, copy=False)


def _is_beyond(ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return (ids < INT32.min) | (ids > INT32.max)


_NONE: npt.NDArray[np.int64] = np.empty(0, np.int64)
NO_NARROW_IDS = NarrowIds(())
NO_ROWS = KerasRows({}, {}, np, NO_NARROW_IDS)
