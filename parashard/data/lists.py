"""Columns of several values a row: cells of text with a delimiter between the values, and Parquet's lists.

Owns the splitting, which is done once for each distinct cell, and the bound of a row's values. Knows no key. Called by
the sources of tables, and by `parashard.data.preprocessing` for rows to predict for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from parashard.data.columns import NO_MARKS, Column, Lists, as_words, words
from parashard.data.ragged import run_lengths
from parashard.data.texts import Marks
from parashard.errors import BadData

VALUES_MAX = 4096
"""Most values of a cell: a step's examples are arrays as wide as the longest list of the data."""


def as_lists(column: Column, delimiter: str, marks: Marks = NO_MARKS) -> Lists:
    """Return a column as lists of texts, without values that stand for a missing one.

    Parameters
    ----------
    column : Column
        Of text, with a delimiter between the values of a cell, which may have spaces around them; of numbers, one
        each; or of lists.
    delimiter : str
    marks : Marks
        What stands for a missing value.
    """
    if isinstance(column, Lists):
        return _without_missing(column, marks)
    cells = as_words(column)
    split = _lists([values_of(cell, delimiter, marks) for cell in cells.vocabulary] + [[]])  # code -1: the last
    return split.take(np.where(cells.codes < 0, len(cells.vocabulary), cells.codes))


def values_of(cell: str, delimiter: str, marks: Marks = NO_MARKS) -> list[str]:
    """Return the values of one cell."""
    values = (value.strip() for value in cell.split(delimiter))
    return [value for value in values if not marks.is_missing(value)]


def lists_of(rows: Iterable[Sequence[str]]) -> Lists:
    """Return a column of these lists."""
    return _lists(list(rows))


def check_lengths(lists: Lists, cell: Callable[[int], str]) -> None:
    """Refuse more values in a cell than are allowed.

    Parameters
    ----------
    lists : Lists
    cell : callable
        Returns the place of a row's cell, for the error.

    Raises
    ------
    BadData
    """
    lengths = run_lengths(lists.offsets)
    row = int(lengths.argmax())
    if lengths[row] > VALUES_MAX:
        raise BadData(f"{cell(row)}: found {lengths[row]:,} values; allowed: at most {VALUES_MAX:,}")


def _lists(rows: Sequence[Sequence[str]]) -> Lists:
    texts = words(text for row in rows for text in row)
    return Lists(texts.codes, np.cumsum([0, *map(len, rows)]), texts.vocabulary)


def _without_missing(lists: Lists, marks: Marks) -> Lists:
    gone = np.array([marks.is_missing(text) for text in lists.vocabulary] + [True])
    there = ~gone[lists.codes]
    before = np.concatenate(([0], np.cumsum(there)))
    return Lists(lists.codes[there], before[lists.offsets], lists.vocabulary)
