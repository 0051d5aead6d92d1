"""RowsDigest: 128 bits that two tables have in common only if their rows are the same, wherever these lie.

The sum over all rows of the XXH64 of their bytes, by two seeds: a sum has no order, so that rows may come from any
number of shards, piece by piece. It tells runs apart that should be equal; it is no defence against an opponent.
Called by the coordinator, for the report.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parashard.checkpoints.row_files import StoredRows
from parashard.data.hashing import keys_of_bytes

_SEEDS = (0, 0x9E3779B97F4A7C15)


class RowsDigest:
    """The digest of a table's rows: keys, t, last use, values and slots, each key once."""

    def __init__(self) -> None:
        self._sums = [np.uint64(0) for _ in _SEEDS]

    def add(self, rows: StoredRows) -> None:
        """Count more rows."""
        slots = [rows.slots[name] for name in sorted(rows.slots)]
        parts: list[Any] = [rows.keys, rows.t, rows.last_use, rows.values, *slots]
        content = np.concatenate([_bytes(part, len(rows.keys)) for part in parts], axis=1)
        offsets = np.arange(len(content) + 1) * content.shape[1]
        with np.errstate(over="ignore"):
            for at, seed in enumerate(_SEEDS):
                self._sums[at] += keys_of_bytes(content.reshape(-1), offsets, seed).sum(dtype=np.uint64)

    def hex(self) -> str:
        """Return it as 32 hex digits."""
        return "".join(f"{int(one):016x}" for one in self._sums)


def _bytes(part: Any, rows: int) -> Any:
    little = np.ascontiguousarray(part, part.dtype.newbyteorder("<"))
    return little.view(np.uint8).reshape(rows, -1)
