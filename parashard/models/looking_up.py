"""Looking up: which rows of embedding tables a batch needs, by what the model says of it.

Owns the call of a model's `keys` and the check of what it returns; makes of keys, as users have them, mixed ones in
ascending order, each once. Knows no shard. Called by `parashard_worker.computing`, and for prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np

from parashard.data.base import Array, Batch
from parashard.errors import ConfigurationError
from parashard.job.keys import dotted
from parashard.models.base import LooksUp, Model
from parashard.models.distinct_keys import distinct_keys
from parashard.models.framework import WrongModel
from parashard.models.user_errors import place_of
from parashard.plan.embedding import EmbeddingTable, Keys, mixed_ids

Tables = Mapping[str, EmbeddingTable]


def looked_up(model: Model, batch: Batch, tables: Tables, *, bounded: bool = True) -> Batch:
    """Return a batch with the keys of the rows that it needs, and where each has its row among those.

    `bounded`: it is a step's, and has at most the keys that one may have.

    Raises
    ------
    WrongModel
        If the model names a table that the job lacks, values that are no ids, or more than a step may have.
    """
    keys, places = {}, {}
    for name, words in _named(model, batch, tables).items():
        keys[name], places[name] = distinct_keys(words)
        if bounded and len(keys[name]) > tables[name].keys_per_step_max:
            raise WrongModel(
                f"{_place_of_keys(model)}a step needs {len(keys[name]):,} rows of table {name!r}; its "
                f"keys_per_step_max is {tables[name].keys_per_step_max:,}"
            )
    return replace(batch, keys=keys, places=places)


def placed(model: Model, batch: Batch, tables: Collection[str], keys: Mapping[str, Keys]) -> Batch:
    """Return a batch with `keys`, and where each of its own has its row among those of them, which has all of them."""
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
    """Tell whether a model looks rows up: it has a method `keys` and, if it names its tables itself, any."""
    return isinstance(model, LooksUp) and getattr(model, "tables", None) not in ((), [])


def check_looks_up(model: Model, tables: Tables) -> None:
    """Refuse a model that uses no table of a job that declares some, and the reverse.

    Raises
    ------
    ConfigurationError
        If only one of the two knows of tables.
    """
    if tables and not uses_tables(model):
        raise ConfigurationError(
            f"the job declares the tables {', '.join(sorted(tables))}, and the model uses none: it has no method keys"
        )
    if not tables and uses_tables(model):
        raise ConfigurationError(
            "the model looks up rows of tables, and the job declares none: say [tables.NAME] with its dimension"
        )


def unused_tables(model: Model, batch: Batch, tables: Tables) -> list[str]:
    """Return a warning for each table of which a model names no key for a batch, if it tells; errors are a worker's."""
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
    method = _keys_of(model)
    where, named = _place_of_keys(model), method(batch)
    if not isinstance(named, Mapping):
        raise WrongModel(f"{where}keys returned a {type(named).__name__}; due is a mapping of tables to their keys")
    words: dict[str, Keys] = {}
    for name, keys in named.items():
        if name not in tables:
            raise WrongModel(f"{where}keys named the table {name!r}; the job has: {', '.join(sorted(tables))}")
        try:
            found = np.asarray(keys)
            words[name] = mixed_ids(found).reshape(found.shape)
        except (ConfigurationError, ValueError) as error:
            raise WrongModel(f"{where}keys returned for table {name!r} are not ids: {error}") from error
    return words


def _place_of_keys(model: Model) -> str:
    """Return where the user says which keys a batch has: a method, or a function that a framework's model was given."""
    return place_of(getattr(model, "keys_function", None) or _keys_of(model))


def _keys_of(model: Model) -> Callable[[Batch], Mapping[str, Array]]:
    assert isinstance(model, LooksUp), "checked when the task was loaded"
    return model.keys
