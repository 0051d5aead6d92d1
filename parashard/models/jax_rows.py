"""Rows of embedding tables for functions of JAX: gathered before a call, in the shape of the ids; summed after it.

A compiled function sees one row for each id, so that the number of different keys compiles nothing anew. Knows no shard
and no tree. Called by `parashard.jax`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from parashard.data.base import Array, Batch
from parashard.errors import ConfigurationError
from parashard.job.declared_table import Table, checked_tables
from parashard.layers.row_sums import sum_by_place
from parashard.models.jax_arrays import borrowed

MARK = "\0rows of "
"""Before a table's name among trained leaves, whose paths never begin so."""


def tables_and_keys(tables: object, keys: object) -> dict[str, Table]:
    """Return the tables of a model by name, if it says which rows a batch needs exactly where it has tables."""
    found = checked_tables(tables)
    if keys is not None and not callable(keys):
        raise ConfigurationError(f"keys is a function of the inputs, found {type(keys).__name__}")
    if found and keys is None:
        named = ", ".join(f"{name!r}: ..." for name in found)
        raise ConfigurationError(
            f"the model looks up rows of {', '.join(map(repr, found))}, and nothing says which a batch needs: "
            f"ps.jax.Model(..., keys=lambda inputs: {{{named}}})"
        )
    combining = [name for name, table in found.items() if table.combiner is not None]
    if combining:
        raise ConfigurationError(
            f"table {combining[0]!r} has combiner={found[combining[0]].combiner!r}, which has no effect: a function of "
            "JAX is given the row of each id, and says itself what becomes of several"
        )
    if keys is not None and not found:
        raise ConfigurationError("keys= names rows of tables, and there are none: ps.jax.Model(..., tables=[...])")
    return found


def gathered(variables: Mapping[str, Array], batch: Batch) -> dict[str, Any]:
    """Return the row of each id, shape (*ids, dimension), by table."""
    return {name: borrowed(variables[name].take(places, axis=0)) for name, places in batch.places.items()}


def like_gathered(tables: Mapping[str, Table], batch: Batch) -> dict[str, Any]:
    """Return zeros in the shapes of `gathered`."""
    return {
        name: np.zeros((*places.shape, tables[name].dimension), np.float32) for name, places in batch.places.items()
    }


def summed(gradients: Mapping[str, Any], variables: Mapping[str, Array], batch: Batch, xp: Any) -> dict[str, Array]:
    """Return the gradient of the rows from those of ids, which are added in the order of the ids."""
    found = {}
    for name, places in batch.places.items():
        rows, dimension = variables[name].shape
        of_ids = xp.asarray(gradients[name]).reshape(-1, dimension)
        found[name] = sum_by_place(of_ids, places.reshape(-1), rows, xp)
    return found


def marked(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return rows by names that no leaf has."""
    return {MARK + name: array for name, array in rows.items()}


def parted(trained: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return leaves, and rows by their tables, of what has both."""
    leaves = {name: leaf for name, leaf in trained.items() if not name.startswith(MARK)}
    return leaves, {name.removeprefix(MARK): rows for name, rows in trained.items() if name.startswith(MARK)}
