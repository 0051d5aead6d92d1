"""RowValues: the values of rows as they are kept: float32, or float16 or bfloat16, two in a word.

Owns the way between a record's words and float32. Pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from parashard.plan.embedding import RowDtype, floats_of, kept_as, kept_dtype
from parashard.plan.variables import Float32s


class RowValues:
    """How values of rows lie in records.

    Parameters
    ----------
    elements : int
        Of a row.
    dtype : {"float32", "float16", "bfloat16"}
        With an odd number of elements of two bytes the last half of a row's words is 0.
    """

    def __init__(self, elements: int, dtype: RowDtype) -> None:
        self.name = dtype
        self.dtype = kept_dtype(dtype)
        self.words = elements if dtype == "float32" else -(-elements // 2)
        self.elements = elements

    def kept(self, words: Float32s, rows: int) -> NDArray[Any]:
        """Return so many rows as they are kept, shape (rows, elements), from their words; a view."""
        wide: NDArray[Any] = words.view(self.dtype).reshape(rows, self.words * 4 // self.dtype.itemsize)
        return wide[:, : self.elements]

    def floats(self, words: Float32s) -> Float32s:
        """Return rows as one vector of float32: the words themselves, where that is what they are."""
        if self.dtype == np.float32:
            return words
        return floats_of(self.kept(words, len(words) // self.words)).reshape(-1)

    def put(self, floats: Float32s, words: Float32s) -> None:
        """Round rows, and put them into words; nothing is to be done where they are these words."""
        if self.dtype != np.float32:
            rows = len(words) // self.words
            self.kept(words, rows)[:] = kept_as(floats, self.name).reshape(rows, self.elements)

    def words_of(self, rows: NDArray[Any]) -> Float32s:
        """Return the words of rows of any of the dtypes, end to end."""
        if self.dtype == np.float32:
            return np.ascontiguousarray(rows, np.float32).reshape(-1)
        words = np.zeros(len(rows) * self.words, np.float32)
        self.kept(words, len(rows))[:] = rows if rows.dtype == self.dtype else kept_as(floats_of(rows), self.name)
        return words
