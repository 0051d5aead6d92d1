"""Indices of ids among the pulled rows of a step, and the sums of their gradients, for look-up layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parashard.data.base import Array
from parashard.data.tree import NO_KEY
from parashard.errors import ConfigurationError, WrongModel
from parashard.layers.row_sums import sum_by_place
from parashard.models.base import HeldTable
from parashard.plan.embedding import EmbeddingTable, Keys, found_among, mixed, mixed_ids, unmixed
from parashard.plan.variables import Float32s

Places = npt.NDArray[np.intp]
NO_KEYS: Keys = np.empty(0, np.uint64)
INT32 = np.iinfo(np.int32)


def check_layer(call: str, table: object, padding_key: object) -> None:
    """Refuse invalid arguments of a look-up layer; `call` names the layer."""
    if not isinstance(table, EmbeddingTable):
        raise ConfigurationError(f'{call}: table is one such as ps.Table("users", 16), found {type(table).__name__}')
    if padding_key is not None and (isinstance(padding_key, bool) or not isinstance(padding_key, Integral)):
        raise ConfigurationError(f"{call}: padding_key is a whole number, found {padding_key!r}")


def check_fit_begins(holds_rows: bool) -> None:
    """Refuse to begin a fit with a model that holds rows."""
    if holds_rows:
        raise ConfigurationError(
            "the model holds rows of tables, with which no fit begins: the trainer that gave it goes on from them"
        )


def check_keys(tables: Iterable[str], keys: object, framework: str, lacking: str, hint: str = "") -> None:
    """Refuse look-ups without `keys`, and `keys` without look-ups; `lacking` ends the latter's message."""
    names = sorted(set(tables))
    if names and keys is None:
        named = ", ".join(f"{name!r}: ..." for name in names)
        raise ConfigurationError(
            f"the model looks up rows of {', '.join(map(repr, names))}, and nothing says which a batch needs{hint}: "
            f"ps.{framework}.Model(..., keys=lambda inputs: {{{named}}})"
        )
    if keys is not None and not names:
        raise ConfigurationError(f"keys= names rows of tables, and {lacking}")


def places_among(ids: npt.NDArray[Any], keys: Keys, table: str) -> Places:
    """Return the index of each id's row among those of ascending mixed keys."""
    places, there = found_among(mixed(ids), keys)
    if not there.all():
        raise WrongModel(
            f"key {ids[int(np.argmin(there))]} of table {table!r} is looked up, and keys= did not name it: rows are "
            "pulled before the model is called, so keys= returns, from the inputs alone, every key that a batch looks "
            "up"
        )
    return places


def have_wide(keys: Keys) -> bool:
    """Tell whether one of some mixed keys has more than 32 bits in the user's form."""
    own = unmixed(keys).view(np.int64)
    return bool(len(own)) and bool(own.min() < INT32.min or own.max() > INT32.max)


def check_width(ids: np.dtype[Any], keys: Keys, table: str) -> None:
    """Refuse ids of 32 bits if keys have more: the ids may have been truncated."""
    if ids.itemsize < 8 and have_wide(keys):
        raise WrongModel(
            f"table {table!r} is asked for keys of more than 32 bits, and the layer has ids of {ids}: "
            "keras.Input(shape, dtype='int64')"
        )


def rows_held(held: HeldTable, ids: npt.NDArray[Any]) -> Float32s:
    """Return the rows of ids, shape (ids, row_elements); an id without a row gets its initial values."""
    words = mixed_ids(ids)
    places, there = found_among(words, held.keys)
    rows = held.rows[places] if len(held.keys) else np.empty((len(places), held.rows.shape[1]), np.float32)
    if not there.all():
        rows[~there] = held.first_rows(words[~there])
    return rows


def without_padding(named: Mapping[str, npt.NDArray[Any]], layers: Iterable[Any]) -> dict[str, Array]:
    """Return ids by table without the padding key that all look-ups of the table share."""
    found: dict[str, Array] = {}
    for name, ids in named.items():
        padding = {layer.padding_key for layer in layers if layer.table.name == name}
        (key,) = padding if len(padding) == 1 else (None,)
        found[name] = ids if key is None else ids[ids != key]
    return found


def summed_by_table(
    look_ups: Iterable[tuple[str, Array, Array]], keys: Mapping[str, Keys], xp: Any
) -> dict[str, Array | None]:
    """Return the gradient of each table's rows; None if none was looked up."""
    # Gradients of a key are added in the order of look-ups, and of the ids in them, so that the sum is bit-identical
    # wherever it is computed (P35).
    parts: dict[str, list[tuple[Array, Array]]] = {}
    for table, gradients, places in look_ups:
        if len(places):
            parts.setdefault(table, []).append((gradients, places))
    found: dict[str, Array | None] = dict.fromkeys(keys)
    for name, of_table in parts.items():
        by_look_ups, places = (xp.concatenate(some) for some in zip(*of_table, strict=True))
        found[name] = sum_by_place(by_look_ups, places, len(keys[name]), xp)
    return found


PullBack = Callable[[Array], Array]


class Bags(NamedTuple):
    """Groups of look-ups that become one vector each: bag i * columns + c is column c of lists of example i."""

    of: Array  # bag of each look-up, by column, then by example
    sizes: Array  # number of look-ups of each bag


def keys_of_lists(keys: Array, lists: Sequence[Array]) -> Array:
    """Return the keys of examples in the order in which rows are combined: columns of one key, then of lists."""
    # `keys` has shape (examples, columns); each of `lists` has shape (examples, values), padded with `NO_KEY`.
    return np.concatenate([keys.reshape(-1), *(column[column != NO_KEY] for column in lists)])


def bags_of(lists: Sequence[Array], xp: Any) -> Bags:
    """Return the bags of one or more columns of lists."""
    there = [column != NO_KEY for column in lists]
    of = [xp.nonzero(one)[0] * len(lists) + place for place, one in enumerate(there)]
    return Bags(xp.concatenate(of), xp.stack([one.sum(axis=1) for one in there], axis=1).reshape(-1))


def combined(rows: Array, bags: Bags, combiner: str, xp: Any) -> tuple[Array, PullBack]:
    """Return a vector for each bag, as `torch.nn.EmbeddingBag` does, and the pullback to the rows of the look-ups."""
    vectors = sum_by_place(rows, bags.of, len(bags.sizes), xp)
    sizes = xp.maximum(bags.sizes, 1).astype(rows.dtype)[:, None]
    if combiner == "mean":
        vectors /= sizes

    def pull_back(gradient: Array) -> Array:
        return (gradient / sizes if combiner == "mean" else gradient)[bags.of]

    return vectors, pull_back
