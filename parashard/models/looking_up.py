"""Look-ups: the rows of embedding tables that a batch needs, by the keys that the model names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parashard.data.base import Array, Batch
from parashard.errors import ConfigurationError, ShapeMismatch, WrongModel
from parashard.job.keys import dotted
from parashard.layers.row_sums import sum_by_place
from parashard.models.base import LooksUp, Model
from parashard.models.row_places import Places
from parashard.models.user_errors import place_of
from parashard.plan.embedding import EmbeddingTable, Keys, mixed_ids
from parashard.plan.variables import Float32s
from parashard.process.cached_code import Vector, const, loop

Tables = Mapping[str, EmbeddingTable]


def looked_up(model: Model, batch: Batch, tables: Tables, *, bounded: bool = True) -> Batch:
    """Return a batch with its distinct keys, and the index among them of each key that the model names."""
    # `bounded`: refuse more keys than a step may have.
    keys, places = {}, {}
    for name, words in _named(model, batch, tables).items():
        keys[name], places[name] = distinct_keys(words)
        if bounded:
            _check_bound(name, keys[name], tables, WrongModel, _place_of_keys(model))
    return replace(batch, keys=keys, places=places)


def placed(model: Model, batch: Batch, tables: Collection[str], keys: Mapping[str, Keys]) -> Batch:
    """Return a batch with `keys`, a superset of the keys that it uses, and their indices in `keys`."""
    words = _named(model, batch, tables)
    places = {name: np.searchsorted(keys[name], of_table) for name, of_table in words.items()}
    return replace(batch, keys=keys, places=places)


def keys_of_all(model: Model, batches: Iterable[Batch], tables: Tables) -> dict[str, Keys]:
    """Return the keys of the rows that batches need, by table: mixed, ascending, each once."""
    found: dict[str, list[Keys]] = {}
    for batch in batches:
        for name, keys in looked_up(model, batch, tables, bounded=False).keys.items():
            found.setdefault(name, []).append(keys)
    return {name: np.unique(np.concatenate(found[name])) for name in sorted(found)}


def uses_tables(model: object) -> bool:
    """Tell whether a model looks rows up: it has a method `keys`, and its attribute `tables`, if any, is not empty."""
    return isinstance(model, LooksUp) and getattr(model, "tables", None) not in ((), [])


def check_looks_up(model: Model, tables: Tables) -> None:
    """Refuse a model without look-ups in a job with tables, and the reverse."""
    if tables and not uses_tables(model):
        raise ConfigurationError(
            f"the job declares the tables {', '.join(sorted(tables))}, and the model uses none: it has no method keys"
        )
    if not tables and uses_tables(model):
        raise ConfigurationError(
            "the model looks up rows of tables, and the job declares none: say [tables.NAME] with its dimension"
        )


def unused_tables(model: Model, batch: Batch, tables: Tables) -> list[str]:
    """Return a warning for each table of which a model names no key for a batch; none if the model raises."""
    try:
        named = _named(model, batch, tables) if tables else {}
    except Exception:  # noqa: BLE001  # the model's code: a worker says where it failed
        return []
    return [
        f"{dotted('tables', name)}: the model uses no row of it for the first examples; if it never does, leave it out"
        for name in sorted(tables)
        if name not in named
    ]


def _named(model: Model, batch: Batch, tables: Collection[str]) -> dict[str, Keys]:
    """Return the mixed keys that a model names, by table."""
    assert isinstance(model, LooksUp), "checked when the task was loaded"
    return _mixed(model.keys(batch), tables, WrongModel, _place_of_keys(model))


def _mixed(named: Any, tables: Collection[str], failure: type[Exception], where: str = "") -> dict[str, Keys]:
    """Return ids by table as mixed keys, in their shape; raise `failure` for unknown tables and invalid ids."""
    if not isinstance(named, Mapping):
        raise failure(f"{where}keys returned a {type(named).__name__}; due is a mapping of tables to their ids")
    words: dict[str, Keys] = {}
    for name, ids in named.items():
        if name not in tables:
            raise failure(f"{where}keys named the table {name!r}; the job has: {', '.join(sorted(tables))}")
        try:
            found = np.asarray(ids)
            words[name] = mixed_ids(found).reshape(found.shape)
        except (ConfigurationError, ValueError) as error:
            raise failure(f"{where}keys returned for table {name!r} are not ids: {error}") from error
    return words


def _check_bound(name: str, keys: Keys, tables: Tables, failure: type[Exception], where: str = "") -> None:
    if len(keys) > tables[name].keys_per_step_max:
        raise failure(
            f"{where}a step needs {len(keys):,} rows of table {name!r}; its keys_per_step_max is "
            f"{tables[name].keys_per_step_max:,}"
        )


def _place_of_keys(model: Model) -> str:
    """Return the location of the user's code that names keys: a method, or a function given to a framework's model."""
    return place_of(getattr(model, "keys_function", None) or getattr(model, "keys"))  # noqa: B009  # one that looks up


NOT_FLOATING_POINT = "biucOSUmM"
"""Kinds of dtypes whose cast to float32 would lose information or have no meaning."""


class NamedRows(NamedTuple):
    """The rows that a step needs, by table: their keys, and in the ids' shape the index of each id among those."""

    keys: dict[str, Keys]
    places: dict[str, Places]

    def by_id(self, rows: Mapping[str, Array]) -> dict[str, Array]:
        """Return the row of each id, shape (*ids, dimension), by table: new arrays."""
        return {name: rows[name].take(places, axis=0) for name, places in self.places.items()}

    def gradient(self, name: str, by_id: Any, tables: Tables) -> Float32s:
        """Return the gradient of a table's rows from that of its ids, shape (*ids, dimension), added in their order."""
        places = self.places.get(name)
        if places is None:
            raise ShapeMismatch(f"a gradient for table {name!r}, of which keys named no id")
        due = (*places.shape, tables[name].row_elements)
        found = np.asarray(by_id)
        if found.dtype.kind in NOT_FLOATING_POINT or found.shape != due:
            raise ShapeMismatch(
                f"the gradient of table {name!r} is {found.dtype} {found.shape}; due is floating point {due}: of each "
                "id that keys named"
            )
        by_look_up = found.astype(np.float32).reshape(-1, due[-1])
        summed: Float32s = sum_by_place(by_look_up, places.reshape(-1), len(self.keys[name]), np)
        return summed


NO_NAMED_ROWS = NamedRows({}, {})


def named_rows(named: Any, tables: Tables) -> NamedRows:
    """Return the rows that ids by table need."""
    found = NamedRows({}, {})
    for name, words in _mixed(named, tables, ConfigurationError).items():
        found.keys[name], found.places[name] = distinct_keys(words)
        _check_bound(name, found.keys[name], tables, ConfigurationError)
    return found


# --- distinct keys ---

KEY_BITS = 64
PROBES_MAX = 256  # of a search for one key; evenly spread keys need a tenth
PLACES_EACH = 2  # slots of the hash table for each look-up


def distinct_keys(words: Keys) -> tuple[Keys, NDArray[np.int64]]:
    """Return the same as `numpy.unique(words, return_inverse=True)`, by loops that Numba compiles."""
    # Mixed keys are spread evenly, so a hash table indexed by the keys' high bits has them almost sorted. For keys that
    # are not spread, `numpy.unique` is the fallback.
    flat = np.ascontiguousarray(words).reshape(-1)
    bits = max(1, (PLACES_EACH * len(flat)).bit_length())
    numbers = np.zeros((1 << bits) + PROBES_MAX, np.int32)  # a search may go beyond the last slot
    seen, places = np.empty(len(flat), np.uint64), np.empty(len(flat), np.int64)
    count = _number(flat, numbers, np.uint64(KEY_BITS - bits), seen, places)
    if count < 0:
        keys, inverse = np.unique(flat, return_inverse=True)
        return keys, inverse.astype(np.int64, copy=False).reshape(words.shape)
    keys = np.empty(count, np.uint64)
    _order(numbers, seen, keys, places)
    return keys, places.reshape(words.shape)


_WORDS, _NUMBERS, _PLACES = Vector("uint64"), Vector("int32"), Vector("int64")


@loop(const(_WORDS), _NUMBERS, "uint64", _WORDS, _PLACES)
def _number(words: Any, numbers: Any, shift: Any, seen: Any, places: Any) -> Any:
    """Number words by first occurrence, plus 1 in `numbers`; return the distinct count, or -1 after too many probes."""
    count = 0
    for i in range(len(words)):
        at, probes = np.int64(words[i] >> shift), 0
        while numbers[at] != 0 and seen[numbers[at] - 1] != words[i]:
            at, probes = at + 1, probes + 1
            if probes == PROBES_MAX:
                return -1
        if numbers[at] == 0:
            seen[count] = words[i]
            count += 1
            numbers[at] = count
        places[i] = numbers[at] - 1
    return count


@loop(const(_NUMBERS), const(_WORDS), _WORDS, _PLACES)
def _order(numbers: Any, seen: Any, keys: Any, places: Any) -> None:
    """Sort the seen words into `keys`, and set `places` to the index of each word there."""
    by_key, place_of = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
    count = 0
    for at in range(len(numbers)):
        if numbers[at] == 0:
            continue
        number = numbers[at] - 1
        to = count
        while to > 0 and keys[to - 1] > seen[number]:
            keys[to], by_key[to] = keys[to - 1], by_key[to - 1]
            to -= 1
        keys[to], by_key[to] = seen[number], number
        count += 1
    for place in range(count):
        place_of[by_key[place]] = place
    for i in range(len(places)):
        places[i] = place_of[places[i]]
