"""Columns of a table, and which text cells are numbers, names or missing: one set of rules for every format."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parashard.data.base import Indices
from parashard.data.tree import places_of_rows, run_lengths
from parashard.errors import SHOWN_CHARACTERS, BadData, shortened

MISSING = ("", "na", "n/a", "nan", "null")
"""Texts of missing values in every column, in lower case and without surrounding spaces."""

_WHOLE = re.compile(r"(-?)0*([0-9]+?)(?:\.0+)?")
_BEGINS_NUMBER = tuple("-0123456789")
_LEADING_ZERO = re.compile(r"\s*[+-]?0[0-9]+\s*")


class MissingTexts(NamedTuple):
    """Texts of missing values besides `MISSING` (`also`), and texts of `MISSING` that are names in text (`never`)."""

    also: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    def is_missing(self, text: str, *, in_text: bool = True) -> bool:
        """Return whether a cell stands for a missing value, in a column of text or of numbers."""
        text = text.strip()
        return (text.lower() in MISSING and not (in_text and text in self.never)) or text in self.also


def missing_texts_of(missing: str | Sequence[str], not_missing: Sequence[str] = ()) -> MissingTexts:
    """Return the marks for a job file's `missing` and `not_missing`; empty texts of `missing` are ignored."""
    also = (missing,) if isinstance(missing, str) else missing
    return MissingTexts(
        tuple(text.strip() for text in also if text.strip()), tuple(text.strip() for text in not_missing)
    )


def canonical(text: str) -> str:
    """Return the normal form in which texts are compared: "2" for " 2.0" and "02", "true" for "TRUE"."""
    # Fractions, exponents and the case of other texts are kept: 1.10 and 1.1 may be versions.
    text = text.strip()
    if text[:1] in _BEGINS_NUMBER:
        whole = _WHOLE.fullmatch(text)
        if whole is not None:
            sign, digits = whole.groups()
            return digits if digits == "0" else sign + digits
        return text
    return text.lower() if len(text) in (4, 5) and text.lower() in ("true", "false") else text


def has_leading_zero(text: str) -> bool:
    """Return whether a text is a whole number with a leading zero, as in codes but not in amounts."""
    return "0" in text and _LEADING_ZERO.fullmatch(text) is not None


def number_of(text: str) -> float | None:
    """Return the finite number that a cell holds; None if it holds none."""
    try:
        value = math.nan if "_" in text else float(text)  # Python accepts 1_000, which no table means
    except ValueError:
        return None
    return value if math.isfinite(value) else None


Float64s = npt.NDArray[np.float64]

NO_MISSING_TEXTS = MissingTexts()
_DIGITS_KEPT = 15
"""float64 has every whole number of this many digits."""


class Numbers(NamedTuple):
    """A numeric column: float64 values, finite, or NaN for missing ones; 0 and 1 if it is boolean."""

    values: Float64s
    boolean: bool = False

    def take(self, rows: Indices) -> Numbers:
        """Return these rows."""
        return Numbers(self.values[rows], self.boolean)

    def present(self) -> Float64s:
        """Return the values that are not missing."""
        return self.values[~np.isnan(self.values)]


class Words(NamedTuple):
    """A text column: row r holds vocabulary[codes[r]], or is missing where codes[r] is -1."""

    codes: npt.NDArray[np.int64]
    vocabulary: tuple[str, ...]

    def take(self, rows: Indices) -> Words:
        """Return these rows (with the whole vocabulary)."""
        return Words(self.codes[rows], self.vocabulary)

    def counts(self) -> npt.NDArray[np.int64]:
        """Return how many rows have each word of the vocabulary."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.vocabulary))

    def used(self) -> list[str]:
        """Return the words that occur, sorted."""
        return sorted(self.vocabulary[code] for code in np.flatnonzero(self.counts()))

    def places(self, of: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the index in `of` of every row's word; -1 if it is absent or missing."""
        # Without a literal match, the first word with the same canonical form counts.
        exact = {word: i for i, word in enumerate(of)}
        found = [exact.get(word, -1) for word in self.vocabulary]
        if -1 in found:
            same = {canonical(word): i for i, word in reversed(list(enumerate(of)))}
            found = [
                place if place >= 0 else same.get(canonical(word), -1)
                for word, place in zip(self.vocabulary, found, strict=True)
            ]
        return np.array([*found, -1])[self.codes]  # code -1: the last


class Lists(NamedTuple):
    """A column of lists: row r holds the texts of codes[offsets[r]:offsets[r + 1]]; no code is -1."""

    codes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    vocabulary: tuple[str, ...]

    def take(self, rows: Indices) -> Lists:
        """Return these rows (with the whole vocabulary)."""
        places, offsets = places_of_rows(self.offsets, rows)
        return Lists(self.codes[places], offsets, self.vocabulary)


Cells = Numbers | Words
"""A column of one value a row."""
Column = Cells | Lists


class ColumnTable(NamedTuple):
    """Columns of equal length, at least 1, as read from a file: numbers in text are not parsed yet."""

    path: Path  # the file
    columns: Mapping[str, Column]  # by name, in the file's order
    # The line of the file that each row ends on, for messages; None: the file has no lines.
    lines: Sequence[int] | None = None
    pandas_index: Sequence[str] = ()  # columns that the file declares as a pandas index
    warnings: Sequence[str] = ()  # likely mistakes in how the file is read
    categories: Sequence[str] = ()  # columns that the file declares as categorical, numeric ones included

    def cell(self, name: str, row: int) -> str:
        """Return the location of a cell, for a message."""
        line = "" if self.lines is None else f" (line {self.lines[row]})"
        return f"{self.path}: column {shown_cell(name)}, row {row + 1}{line}"


def words(texts: Iterable[str | None]) -> Words:
    """Return a text column of these values; None is missing."""
    place: dict[str, int] = {}
    codes = [-1 if text is None else place.setdefault(text, len(place)) for text in texts]
    return Words(np.array(codes, np.int64), tuple(place))


def as_words(column: Column) -> Words:
    """Return a column as text: numbers in their shortest form, whole ones without a decimal point."""
    assert not isinstance(column, Lists), "a column of lists becomes keys"
    if isinstance(column, Words):
        return column
    return words(None if math.isnan(value) else number_text(value, column.boolean) for value in column.values.tolist())


def texts_of(column: Column) -> Words:
    """Return a column as text; for lists, the texts of all rows concatenated."""
    return Words(column.codes, column.vocabulary) if isinstance(column, Lists) else as_words(column)


def number_text(number: float, boolean: bool = False) -> str:
    """Return a number as the name of a category."""
    if boolean:
        return "true" if number else "false"
    return str(int(number)) if number.is_integer() else repr(number)


def digits_lost(where: str, number: object) -> BadData:
    """Return the error for a whole number in a numeric column that float64 would round."""
    return BadData(
        f"{where}: found {number}, which as a number would lose its last digits; data.ignore leaves the column out, "
        "data.key_columns or data.categorical takes its values as names"
    )


def without_missing(column: Words, marks: MissingTexts, *, in_text: bool = True) -> Words:
    """Return the column with texts of missing values replaced by missing cells."""
    gone = np.array([marks.is_missing(word, in_text=in_text) for word in column.vocabulary] + [True])
    return Words(np.where(gone[column.codes], -1, column.codes), column.vocabulary)


def merged(column: Words) -> Words:
    """Return the column with texts of one canonical form merged into the first of them, without surrounding spaces."""
    first: dict[str, int] = {}
    names: list[str] = []
    places = []
    order = sorted(range(len(column.vocabulary)), key=lambda code: column.vocabulary[code].strip())
    for code in order:
        place = first.setdefault(canonical(column.vocabulary[code]), len(names))
        if place == len(names):
            names.append(column.vocabulary[code].strip())
        places.append(place)
    of_code = np.full(len(order) + 1, -1, np.int64)  # the last: code -1
    of_code[order] = places
    return Words(of_code[column.codes], tuple(names))


def typed(
    table: ColumnTable,
    name: str,
    *,
    marks: MissingTexts = NO_MISSING_TEXTS,
    as_text: bool = False,
    zeros_are_text: bool = True,
    mixed: bool = False,
    is_label: bool = False,
    may_be_class: bool = False,
) -> Cells:
    """Return a column of a training table, which has no lists, as numbers or as text.

    A text column is numeric if it holds numbers and otherwise only missing cells, except with `as_text`, or with
    `zeros_are_text` if a whole number has a leading zero. If half or more of the cells, or of the distinct cells, are
    numbers but not all, the column is refused, or is text with `mixed`. Every other column is text.
    """
    column = table.columns[name]
    assert not isinstance(column, Lists)
    if isinstance(column, Numbers):
        return column
    raw, column = column, without_missing(column, marks, in_text=False)
    text = without_missing(raw, marks) if marks.never else column
    if as_text or (zeros_are_text and any(map(has_leading_zero, column.vocabulary))):
        return text
    values, is_number = _numbers(column)
    present = column.codes >= 0
    numeric, distinct = is_number[column.codes], np.flatnonzero(column.counts())
    if not numeric.any():
        return text
    wrong = np.flatnonzero(present & ~numeric)
    if not len(wrong):
        _check_whole(column, values, functools.partial(table.cell, name))
        return Numbers(values[column.codes])
    if mixed or (2 * numeric.sum() < present.sum() and 2 * is_number[distinct].sum() < len(distinct)):
        return text
    found = column.vocabulary[column.codes[wrong[0]]]
    others = f", as have {len(wrong) - 1:,} more rows" if len(wrong) > 1 else ""
    advice = _advice_on_label(column, may_be_class) if is_label else _advice_on_input(name, found)
    raise BadData(
        f"{table.cell(name, int(wrong[0]))}: found {shown_cell(found)}{others}; {numeric.sum():,} of the "
        f"{present.sum():,} values in this column are finite numbers. Correct the file, or {advice}"
    )


def _advice_on_input(name: str, found: str) -> str:
    # A text too long to be shown is not a marker of missing values.
    missing = f"say data.missing = {json.dumps(found)} if that is a missing value, or "
    return (
        f"{missing if len(found) <= SHOWN_CHARACTERS else 'say '}data.categorical = [{json.dumps(name)}] if all of the "
        "column's values are names"
    )


def _advice_on_label(column: Words, may_be_class: bool) -> str:
    """Return advice about a label column: a label must not be missing, and names classes only if its values repeat."""
    counts = column.counts()
    repeat = may_be_class and 2 * np.count_nonzero(counts) <= counts.sum()
    return "leave such a row out" + (
        ', or say data.target = "class" if all of the column\'s values are names' if repeat else ""
    )


def typed_like(training: Cells, table: ColumnTable, name: str, *, marks: MissingTexts = NO_MISSING_TEXTS) -> Cells:
    """Return a held-out column as the kind, numbers or text, that it has in the training table."""
    column = table.columns[name]
    if isinstance(column, Lists):
        raise BadData(f"{table.path}: column {shown_cell(name)}: has lists, and the training table has none there")
    if isinstance(column, Words):
        column = without_missing(column, marks, in_text=isinstance(training, Words))
    if isinstance(training, Words):
        return as_words(column)
    if isinstance(column, Numbers):
        return column
    values, is_number = _numbers(column)
    wrong = np.flatnonzero((column.codes >= 0) & ~is_number[column.codes])
    if len(wrong):
        found = column.vocabulary[column.codes[wrong[0]]]
        raise BadData(
            f"{table.cell(name, int(wrong[0]))}: found {shown_cell(found)}, where the training table has finite numbers"
        )
    _check_whole(column, values, functools.partial(table.cell, name))
    return Numbers(values[column.codes])


def _check_whole(column: Words, values: Float64s, cell: Callable[[int], str]) -> None:
    """Refuse whole numbers that float64 would round."""
    for code, text in enumerate(column.vocabulary):
        if len(text) <= _DIGITS_KEPT:
            continue
        digits = text.strip().lstrip("+-")
        if digits.isdigit() and abs(int(values[code])) != int(digits):
            raise digits_lost(cell(int(np.argmax(column.codes == code))), text)


def shown_cell(text: str) -> str:
    """Return a cell for a message."""
    return repr(shortened(text))


def _numbers(column: Words) -> tuple[Float64s, npt.NDArray[np.bool_]]:
    """Return the numbers of the vocabulary (NaN for none), and which words are numbers; last, those for code -1."""
    read = [number_of(word) for word in column.vocabulary]
    values = np.array([math.nan if value is None else value for value in read] + [math.nan])
    return values, np.array([value is not None for value in read] + [False])


VALUES_MAX = 4096
"""Maximum number of values in a cell; a step's arrays are as wide as the longest list of the data."""


def as_lists(column: Column, delimiter: str, marks: MissingTexts = NO_MISSING_TEXTS) -> Lists:
    """Return a column as lists of texts, without missing values."""
    if isinstance(column, Lists):
        return _without_missing(column, marks)
    cells = as_words(column)
    split = lists_of([values_of(cell, delimiter, marks) for cell in cells.vocabulary] + [[]])  # code -1: the last
    return split.take(np.where(cells.codes < 0, len(cells.vocabulary), cells.codes))


def values_of(cell: str, delimiter: str, marks: MissingTexts = NO_MISSING_TEXTS) -> list[str]:
    """Return the values of one cell."""
    values = (value.strip() for value in cell.split(delimiter))
    return [value for value in values if not marks.is_missing(value)]


def check_lengths(lists: Lists, cell: Callable[[int], str]) -> None:
    """Refuse cells of more than `VALUES_MAX` values."""
    lengths = run_lengths(lists.offsets)
    row = int(lengths.argmax())
    if lengths[row] > VALUES_MAX:
        raise BadData(f"{cell(row)}: found {lengths[row]:,} values; allowed: at most {VALUES_MAX:,}")


def lists_of(rows: Sequence[Sequence[str]]) -> Lists:
    """Return a column of these lists."""
    texts = words(text for row in rows for text in row)
    return Lists(texts.codes, np.cumsum([0, *map(len, rows)]), texts.vocabulary)


def _without_missing(lists: Lists, marks: MissingTexts) -> Lists:
    gone = np.array([marks.is_missing(text) for text in lists.vocabulary] + [True])
    there = ~gone[lists.codes]
    before = np.concatenate(([0], np.cumsum(there)))
    return Lists(lists.codes[there], before[lists.offsets], lists.vocabulary)
