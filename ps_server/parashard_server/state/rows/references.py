"""References: records that were noted, in arrays of one length, so that no note takes longer as they grow in number.

Knows not what they were noted for.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

ARRAY_ITEMS = 1 << 16


class References:
    """References of records in the order in which they were noted; one may be there several times."""

    def __init__(self) -> None:
        self._full: list[NDArray[np.uint32]] = []
        self._full_items = 0
        self._last = np.empty(ARRAY_ITEMS, np.uint32)
        self._used = 0  # items of the last array

    def __len__(self) -> int:
        return self._full_items + self._used

    def note(self, rows: NDArray[np.uint32]) -> None:
        """Copy references behind those that are there."""
        begin = 0
        while begin < len(rows):
            some = rows[begin : begin + ARRAY_ITEMS - self._used]
            self._last[self._used : self._used + len(some)] = some
            self._used += len(some)
            begin += len(some)
            if self._used == ARRAY_ITEMS:
                self.take_back([self._last])
                self._last, self._used = np.empty(ARRAY_ITEMS, np.uint32), 0

    def take_back(self, arrays: Iterable[NDArray[np.uint32]]) -> None:
        """Take arrays that were noted elsewhere, without a copy."""
        found = list(arrays)
        self._full += found
        self._full_items += sum(map(len, found))

    def arrays(self) -> list[NDArray[np.uint32]]:
        """Return all that was noted; valid for as long as nothing more is."""
        return [*self._full, self._last[: self._used]]
