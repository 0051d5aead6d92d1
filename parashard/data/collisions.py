"""Collisions of hashed texts: how many distinct texts and keys the columns have, and which texts share a key.

Owns the count, which is exact: it is of the distinct texts of each column, which the sources of tables hold anyway, and
of a key each. Knows no row. Called by `parashard.data.tabular`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from parashard.data.base import HashedTexts
from parashard.data.columns import shown_cell
from parashard.data.key_columns import hashed

_PAIRS_SHOWN = 3


def counted(texts: Mapping[str, Sequence[str]]) -> tuple[HashedTexts, list[str]]:
    """Return how many distinct texts and keys columns have, and a warning for each pair of texts that share a key.

    Parameters
    ----------
    texts : mapping of str to sequence of str
        By column: each text once.
    """
    keys = np.concatenate([np.empty(0, np.int64), *(hashed(found, column) for column, found in texts.items())])
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero(np.diff(keys[order]) == 0)
    ends = np.cumsum([len(found) for found in texts.values()])

    def named(at: int) -> str:
        column = int(np.searchsorted(ends, at, side="right"))
        name, found = list(texts.items())[column]
        return f"{shown_cell(found[at - (int(ends[column]) - len(found))])} of column {shown_cell(name)}"

    warnings = [
        f"{named(int(order[at]))} and {named(int(order[at + 1]))} have the same key, {keys[order[at]]}, and so share a "
        "row of each table; data.vocabularies gives each text of a column a key of its own"
        for at in same[:_PAIRS_SHOWN]
    ]
    more = len(same) - _PAIRS_SHOWN
    if more > 0:
        warnings.append(f"{more:,} more pair{'s of texts have' if more > 1 else ' of texts has'} the same key")
    return HashedTexts(len(keys), len(keys) - len(same)), warnings
