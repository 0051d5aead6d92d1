"""Lookups: rows and variables of one version of each shard, in a server or a subscriber.

Owns the division of keys over shards, and what a key without a row gets. Pure. Called by the service, by the pages and
by `ps.subscribe`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parashard.checkpoints.catalogue import CheckpointId
from parashard.client.pulled_rows import TableSet
from parashard.errors import UnknownVariable, shortened
from parashard.plan.embedding import Keys, bucket_ranges, buckets_of
from parashard.plan.variables import Float32s, Variable
from parashard.serving.versions import PublishedShard


class LookedUp(NamedTuple):
    """Rows in the order of the keys.

    Parameters
    ----------
    rows : ndarray of float32, shape (keys, row_elements)
        Of a key without a row its first values, as a worker sees them.
    present : ndarray of bool, shape (keys,)
        Whether a key has a row.
    versions : tuple of CheckpointId
        The version of each shard, in their order, that the rows are of.
    """

    rows: Float32s
    present: NDArray[np.bool_]
    versions: tuple[CheckpointId, ...]


def look_up(tables: TableSet, shards: Sequence[PublishedShard], table: str, keys: Keys) -> LookedUp:
    """Return rows of mixed keys, in any order and with repetitions.

    Raises
    ------
    UnknownVariable
        If the job has no such table.
    """
    if table not in tables.by_name:
        known = ", ".join(sorted(tables.by_name)) or "none"
        raise UnknownVariable(f"table {shortened(table)!r} is none of the job's: {known}")
    rows = np.empty((len(keys), tables.by_name[table].row_elements), np.float32)
    present = np.zeros(len(keys), np.bool_)
    stops = np.array([stop for _, stop in bucket_ranges(len(shards))])
    owners = np.searchsorted(stops, buckets_of(keys), side="right")
    for shard, held in enumerate(shards):
        mine = np.flatnonzero(owners == shard)
        rows[mine], present[mine] = held.tables[table].rows.look_up(keys[mine])
    absent = ~present
    if absent.any():
        rows[absent] = tables.first_rows(table, keys[absent])
    return LookedUp(rows, present, tuple(held.version.id for held in shards))


def variable_of(variables: Mapping[str, Variable], shards: Sequence[PublishedShard], name: str) -> Float32s:
    """Return a variable with its shape, a new array.

    Raises
    ------
    UnknownVariable
        If the job has no such variable.
    """
    check_variable(variables, name)
    variable = variables[name]
    return elements_of(variable, shards, 0, variable.elements).reshape(variable.shape)


def check_variable(variables: Mapping[str, Variable], name: str) -> None:
    """Raise UnknownVariable unless the job has such a variable."""
    if name not in variables:
        known = ", ".join(sorted(variables)) or "none"
        raise UnknownVariable(f"variable {shortened(name)!r} is none of the job's: {known}")


def elements_of(variable: Variable, shards: Sequence[PublishedShard], first: int, stop: int) -> Float32s:
    """Return the elements [first, stop) of a variable in row-major order, a new array; reads no others."""
    found = np.empty(stop - first, np.float32)
    for held in shards:
        for partition, values in held.variables.items():
            if partition.variable == variable.name:
                offset = partition.row_start * variable.row_elements
                begin, end = max(first, offset), min(stop, partition.row_stop * variable.row_elements)
                if begin < end:
                    found[begin - first : end - first] = values.reshape(-1)[begin - offset : end - offset]
    return found
