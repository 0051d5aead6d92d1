"""RowCopy: records of a table as they were at a cut, and rows in the form of a checkpoint.

The copy itself is one run of memory, so that pushes wait for nothing else; sorting and division are for later, without
the shard's lock. Pure. Called by `parashard_server.state.rows.table_rows` and the writer of checkpoints.
"""

from __future__ import annotations

import numpy as np

from parashard.checkpoints.tables import StoredRows
from parashard.plan.variables import Float32s
from parashard_server.state.rows.row_memory import HEADER_BYTES


class RowCopy:
    """The records of a table at one moment.

    Parameters
    ----------
    words : ndarray of float32, shape (rows * stride,)
        A copy of the records; owned here.
    stride : int
        Words of a record.
    row_elements : int
        Of the table.
    slots : tuple of str
        The optimizer's, in the order of the records.
    """

    def __init__(self, words: Float32s, stride: int, row_elements: int, slots: tuple[str, ...]) -> None:
        self._words = words.reshape(-1, stride)
        self._row_elements = row_elements
        self._slots = slots

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._words)

    def stored(self) -> StoredRows:
        """Return the rows in ascending order of their mixed keys."""
        keys = self._words[:, :2].view(np.uint64)[:, 0]
        order = np.argsort(keys)
        header = self._words[:, 2:4].view(np.uint32)
        begin = HEADER_BYTES // 4

        def part(number: int) -> Float32s:
            first = begin + number * self._row_elements
            found: Float32s = self._words[order, first : first + self._row_elements]
            return found

        slots = {slot: part(number) for number, slot in enumerate(self._slots, 1)}
        return StoredRows(keys[order], header[order, 0], header[order, 1], part(0), slots)
