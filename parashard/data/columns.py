"""Columns of a table, and the encoder that makes inputs and class labels of them.

Owns one-hot encoding, standardisation and the mapping of labels to classes. Knows nothing of files: `csv` and `parquet`
read a table into columns, and `table_source` makes their data source.

All sums run in a fixed order, so that the encoded bits (and with them the fingerprint) are the same on every machine:
`np.sum` adds in an order that depends on the width of the CPU's vectors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field

from parashard.data.arrays import MAX_CLASSES, ArraySource, Split
from parashard.data.base import Indices
from parashard.data.split import SplitOptions
from parashard.errors import BadData
from parashard.variables import Float32s

MAX_CATEGORIES = 4096
"""Most categories that one column may have: each becomes an input of its own, in every example."""

Float64s = npt.NDArray[np.float64]


class TableOptions(SplitOptions):
    """What the tabular sources share; inputs of shape (encoded columns,), classes from the label column."""

    path: Path = Field(description="The training table.")
    label: str = Field(description="Name of the column to predict; its distinct values, sorted, are the classes.")
    held_out_path: Path | None = Field(
        default=None,
        description="A held-out table with the same columns, encoded with what the training table taught; without it "
        "a fraction of the training table is held out.",
    )
    categorical: tuple[str, ...] = Field(
        default=(), description="Numeric columns to one-hot encode all the same (codes); text columns always are."
    )


@dataclass(frozen=True)
class Numbers:
    """A numeric column: float64 values, finite, or NaN where one is missing."""

    values: Float64s

    def take(self, rows: Indices) -> Numbers:
        """Return these rows."""
        return Numbers(self.values[rows])


@dataclass(frozen=True)
class Words:
    """A text column: row r holds vocabulary[codes[r]], or is missing where codes[r] is -1."""

    codes: npt.NDArray[np.int64]
    vocabulary: tuple[str, ...]

    def take(self, rows: Indices) -> Words:
        """Return these rows (with the whole vocabulary)."""
        return Words(self.codes[rows], self.vocabulary)

    def used(self) -> list[str]:
        """Return the words that occur, sorted."""
        return sorted(self.vocabulary[code] for code in np.unique(self.codes[self.codes >= 0]))

    def places(self, of: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return for every row the place of its word in `of`; -1 for a word that is not there or is missing."""
        place = {word: i for i, word in enumerate(of)}
        return np.array([place.get(word, -1) for word in self.vocabulary] + [-1])[self.codes]  # code -1: the last


Column = Numbers | Words
Table = Mapping[str, Column]


def words(texts: Sequence[str | None]) -> Words:
    """Return a text column of these values; None is missing."""
    vocabulary = sorted({text for text in texts if text is not None})
    place: dict[str | None, int] = {text: i for i, text in enumerate(vocabulary)}
    return Words(np.array([place.get(text, -1) for text in texts], np.int64), tuple(vocabulary))


def as_words(column: Column) -> Words:
    """Return a column as text: numbers in their shortest form, whole ones without a decimal point."""
    if isinstance(column, Words):
        return column
    return words([None if math.isnan(value) else _text(value) for value in column.values.tolist()])


def _text(number: float) -> str:
    return str(int(number)) if number.is_integer() else repr(number)


class _NumberEncoder:
    """Standardise: (x - mean) / deviation; a missing value becomes 0, and 1 in a second input if training has any."""

    def __init__(self, column: Numbers, origin: str) -> None:
        present = column.values[~np.isnan(column.values)]
        with np.errstate(over="ignore", invalid="ignore"):
            self._mean = _sum_in_order(present) / max(1, len(present))
            variance = _sum_in_order((present - self._mean) ** 2) / max(1, len(present))
        if not math.isfinite(variance):
            raise BadData(f"{origin}: values up to {np.abs(present).max():g} are too large to be standardised")
        self._deviation = math.sqrt(variance) or 1.0  # a constant column becomes 0
        self._flags_missing = len(present) < len(column.values)
        self.width = 1 + self._flags_missing

    def encode(self, column: Column, out: Float32s, origin: str) -> None:
        if not isinstance(column, Numbers):
            raise BadData(f"{origin}: holds text, but numbers in the training table")
        missing = np.isnan(column.values)
        with np.errstate(over="ignore"):
            out[:, 0] = np.where(missing, 0.0, (column.values - self._mean) / self._deviation)
        if not np.isfinite(out[:, 0]).all():
            raise BadData(f"{origin}: has values too far from those of the training rows for float32")
        if self._flags_missing:
            out[:, 1] = missing


class _WordEncoder:
    """One-hot: an input per word of the training rows, in sorted order, and one for missing if training has any."""

    def __init__(self, column: Words, origin: str) -> None:
        self._vocabulary = column.used()
        self._flags_missing = bool((column.codes < 0).any())
        self.width = len(self._vocabulary) + self._flags_missing
        if self.width > MAX_CATEGORIES:
            raise BadData(
                f"{origin}: has {self.width} categories, more than the {MAX_CATEGORIES} that can be one-hot encoded; "
                f"remove the column or group its values"
            )

    def encode(self, column: Column, out: Float32s, origin: str) -> None:
        text = as_words(column)
        places = text.places(self._vocabulary)
        known = np.flatnonzero(places >= 0)
        out[known, places[known]] = 1.0
        if self._flags_missing:
            out[text.codes < 0, -1] = 1.0


def table_source(options: TableOptions, training: Table, held_out: Table | None) -> ArraySource:
    """Return the data source of a table, or of a training table and a held-out one.

    What is learned from data (means, deviations, vocabularies) comes from the training rows alone; only the classes
    come from the whole training table, so that a rare class that was held out is still one.

    Raises
    ------
    BadData
        A column is missing or of another kind, a label is missing or unknown, or there is nothing to encode.
    """
    whole = dict(_checked(options, training))
    labels = whole.pop(options.label)
    classes = _classes(labels, f"{options.path}: label column {options.label!r}")
    targets = _targets(labels, classes, f"{options.path}: label column {options.label!r}")
    if held_out is None:
        rows, held_out_rows = options.rows(len(targets))
        train = {name: column.take(rows) for name, column in whole.items()}
        evaluation = {name: column.take(held_out_rows) for name, column in whole.items()}
        train_targets, evaluation_targets = targets[rows], targets[held_out_rows]
        evaluation_path = options.path
    else:
        assert options.held_out_path is not None
        evaluation_path = options.held_out_path
        train, train_targets = whole, targets
        absent = sorted({options.label, *whole} - set(held_out))
        if absent:
            raise BadData(f"{evaluation_path}: lacks the columns {', '.join(absent)}")
        evaluation = {name: held_out[name] for name in whole}
        origin = f"{evaluation_path}: label column {options.label!r}"
        evaluation_targets = _targets(held_out[options.label], classes, origin)
    encoders = {
        name: _encoder(column, name in options.categorical, f"{options.path}: column {name!r}")
        for name, column in train.items()
    }
    return ArraySource(
        Split(_encode(encoders, train, len(train_targets), options.path), train_targets),
        Split(_encode(encoders, evaluation, len(evaluation_targets), evaluation_path), evaluation_targets),
        classes=len(classes),
    )


def _encoder(column: Column, categorical: bool, origin: str) -> _NumberEncoder | _WordEncoder:
    if isinstance(column, Numbers) and not categorical:
        return _NumberEncoder(column, origin)
    return _WordEncoder(as_words(column), origin)


def _checked(options: TableOptions, table: Table) -> Table:
    for name in (options.label, *options.categorical):
        if name not in table:
            raise BadData(f"{options.path}: has no column {name!r}; its columns: {', '.join(table)}")
    if len(table) < 2:
        raise BadData(f"{options.path}: has no column but the label {options.label!r}")
    return table


def _classes(labels: Column, origin: str) -> list[str]:
    """Return the labels' texts in sorted order: numeric labels by value, others as text."""
    if isinstance(labels, Numbers):
        classes = [_text(value) for value in np.unique(labels.values[~np.isnan(labels.values)]).tolist()]
    else:
        classes = labels.used()
    if not 1 < len(classes) <= MAX_CLASSES:
        raise BadData(f"{origin}: must have 2 to {MAX_CLASSES} distinct values, found {len(classes)}")
    return classes


def _targets(labels: Column, classes: Sequence[str], origin: str) -> npt.NDArray[np.int64]:
    text = as_words(labels)
    targets = text.places(classes)
    wrong = np.flatnonzero(targets < 0)
    if len(wrong):
        code = int(text.codes[wrong[0]])
        found = "is missing" if code < 0 else f"{text.vocabulary[code]!r} is not in the training table"
        raise BadData(f"{origin}: the label of row {int(wrong[0]) + 1} {found}; {len(wrong)} such rows")
    return targets


def _encode(encoders: Mapping[str, _NumberEncoder | _WordEncoder], table: Table, rows: int, path: Path) -> Float32s:
    edges = list(itertools.accumulate((e.width for e in encoders.values()), initial=0))
    inputs = np.zeros((rows, edges[-1]), np.float32)
    for (name, encoder), start, stop in zip(encoders.items(), edges, edges[1:], strict=False):
        encoder.encode(table[name], inputs[:, start:stop], f"{path}: column {name!r}")
    return inputs


def _sum_in_order(values: Float64s) -> float:
    return float(np.cumsum(values)[-1]) if len(values) else 0.0
