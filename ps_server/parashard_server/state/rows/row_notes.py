"""RowNotes: which rows of a shard's tables changed since a reader last looked.

A bounded log of references and keys, kept from a first reader's request on. When it is full its older half is dropped,
or all of it where nobody has asked since: nothing is noted then until a reader asks again. Each item has a position,
which never repeats. Knows no row's values.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parashard.plan.embedding import Keys

ITEMS_LEAST = 1 << 22
"""So many items are kept, or as many as there are rows if that is more: four bytes for a row that changed."""
ITEMS_OF_A_NOTE = 64
"""What a note takes besides its items counts as so many."""


class Noted(NamedTuple):
    """Records of a table that changed, or keys whose record was ended."""

    position: int
    table: str
    rows: NDArray[np.uint32]
    gone: Keys

    @property
    def items(self) -> int:
        """How many there are."""
        return len(self.rows) + len(self.gone)


NO_ROWS: NDArray[np.uint32] = np.empty(0, np.uint32)
NO_KEYS: Keys = np.empty(0, np.uint64)


class RowNotes:
    """What changed.

    Parameters
    ----------
    most : callable
        Returns how many items may be kept now.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._noted: list[Noted] | None = None  # None: nothing is noted
        self._first = 1
        self._used = 0
        self._asked = False
        self.end = 1

    def begin(self) -> int:
        """Note changes from now on, if they are not noted already; return the position of the next one."""
        self._asked = True
        if self._noted is None:
            self._noted, self._first, self._used = [], self.end, 0
        return self.end

    def moved(self, table: str, rows: NDArray[np.uint32]) -> None:
        """Note records that a push moved; the array is kept."""
        if self._noted is not None:
            self._note(Noted(self.end, table, rows, NO_KEYS))

    def gone(self, table: str, keys: Keys) -> None:
        """Note keys whose records were ended; the array is kept."""
        if self._noted is not None:
            self._note(Noted(self.end, table, NO_ROWS, keys))

    def has(self, position: int) -> bool:
        """Return whether all that changed since a position is noted."""
        self._asked = True
        return self._noted is not None and self._first <= position <= self.end

    def since(self, position: int) -> Iterator[Noted]:
        """Yield what was noted from a position on, of which `has` holds; the first item is cut where it is due."""
        assert self._noted is not None
        begin = max(0, bisect_right(self._noted, position, key=lambda noted: noted.position) - 1)
        for noted in itertools.islice(self._noted, begin, None):
            cut = max(0, position - noted.position)
            yield Noted(noted.position + cut, noted.table, noted.rows[cut:], noted.gone[cut:])

    def _note(self, noted: Noted) -> None:
        assert self._noted is not None
        if not noted.items:
            return
        self.end += noted.items
        self._noted.append(noted)
        self._used += ITEMS_OF_A_NOTE + noted.items
        if self._used <= max(ITEMS_LEAST, self._most()):
            return
        if not self._asked:
            self._noted = None
            return
        self._asked = False
        while self._used > max(ITEMS_LEAST, self._most()) // 2:
            half = len(self._noted) // 2 + 1
            self._used -= sum(ITEMS_OF_A_NOTE + old.items for old in self._noted[:half])
            del self._noted[:half]
        self._first = self._noted[0].position if self._noted else self.end
