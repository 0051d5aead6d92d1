"""Rows of tables for a program's own loop: ids that it names, rows in their shape, and gradients in that shape.

Owns the check of what a program names, and the sums of its gradients by row. Knows no step. Called by
`parashard_worker.session` and `parashard.api.scheduled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from parashard.data.base import Array
from parashard.errors import ConfigurationError, ShapeMismatch
from parashard.layers.row_sums import sum_by_place
from parashard.models.distinct_keys import distinct_keys
from parashard.models.row_places import Places
from parashard.plan.embedding import EmbeddingTable, Keys, mixed_ids
from parashard.plan.variables import Float32s

Tables = Mapping[str, EmbeddingTable]
NOT_FLOATING_POINT = "biucOSUmM"
"""Kinds of dtypes: a cast to float32 would lose what they say, or have no meaning."""


class NamedRows(NamedTuple):
    """The rows that a step asks for.

    Parameters
    ----------
    keys : dict of str to ndarray of uint64
        By table: mixed, ascending, each once.
    places : dict of str to ndarray of int64
        By table: where each id's row is among those, in the shape of the ids.
    """

    keys: dict[str, Keys]
    places: dict[str, Places]

    def by_id(self, rows: Mapping[str, Array]) -> dict[str, Array]:
        """Return the row of each id, shape (*ids, dimension), by table: new arrays."""
        return {name: rows[name].take(places, axis=0) for name, places in self.places.items()}

    def gradient(self, name: str, by_id: Any, tables: Tables) -> Float32s:
        """Return the gradient of a table's rows: those of its ids, added in their order.

        Parameters
        ----------
        by_id : array of floating point, shape (*ids, dimension)

        Raises
        ------
        ShapeMismatch
            If it is none, or of another shape.
        """
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
    """Return the rows that ids by table ask for.

    Raises
    ------
    ConfigurationError
        If they name no table of the job, what is no id, or more than a step may have.
    """
    if not isinstance(named, Mapping):
        raise ConfigurationError(f"keys returned a {type(named).__name__}; due is a mapping of tables to their ids")
    found = NamedRows({}, {})
    for name, ids in named.items():
        if name not in tables:
            raise ConfigurationError(f"keys named the table {name!r}; the job has: {', '.join(sorted(tables))}")
        array = np.asarray(ids)
        try:
            words = mixed_ids(array).reshape(array.shape)
        except ConfigurationError as error:
            raise ConfigurationError(f"keys returned for table {name!r} are not ids: {error.message}") from None
        keys, places = distinct_keys(words)
        if len(keys) > tables[name].keys_per_step_max:
            raise ConfigurationError(
                f"a step needs {len(keys):,} rows of table {name!r}; its keys_per_step_max is "
                f"{tables[name].keys_per_step_max:,}"
            )
        found.keys[name], found.places[name] = keys, places
    return found
