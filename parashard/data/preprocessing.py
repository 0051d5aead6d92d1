"""Preprocessing: from a row of a table to the inputs of a model, and from its outputs to predictions.

Owns standardisation, one-hot encoding, and the file with their fitted parameters: `preprocessing.json` beside a run's
weights (docs/preprocessing.md). Knows nothing of training. Used by the data sources, and for prediction with a run's
weights.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from parashard.data.base import Field
from parashard.data.columns import (
    Column,
    Float64s,
    Numbers,
    Words,
    as_words,
    is_missing,
    number_of,
    number_text,
    shown_cell,
    words,
)
from parashard.data.hashing import keys_of_texts, seed_of
from parashard.data.portable_math import signed_log
from parashard.data.standardising import mean_and_deviation, standardise
from parashard.data.tree import Tree
from parashard.errors import BadData
from parashard.plan.variables import Float32s
from parashard.settings.reading import read_json
from parashard.settings.table import OneOf, Table

MAX_CATEGORIES = 4096
"""Most categories that one column may have: each becomes an input of its own, in every example."""


class NumberColumn(Table):
    """One input, (x - mean) / deviation, 0 for a missing value; with `missing_input` a second: 1 if it is missing."""

    kind: Literal["number"] = "number"
    name: str
    mean: float
    deviation: float
    missing_input: bool

    @property
    def width(self) -> int:
        """How many inputs it becomes."""
        return 1 + self.missing_input

    def encode(self, column: Column, out: Float32s, origin: str) -> None:
        """Write the inputs of every row into `out`, shape (rows, width), which holds zeros."""
        assert isinstance(column, Numbers)
        standardise(column.values, self.mean, self.deviation, out[:, 0], origin)
        if self.missing_input:
            out[:, 1] = np.isnan(column.values)


class LogNumberColumn(Table):
    """One input, (f(x) - mean) / deviation, where f(x) is ln(1 + x), and x where it is negative; 0 if it is missing."""

    kind: Literal["log_number"] = "log_number"
    name: str
    mean: float
    deviation: float

    @property
    def width(self) -> int:
        """How many inputs it becomes."""
        return 1

    def encode(self, column: Column, out: Float32s, origin: str) -> None:
        """Write the inputs of every row into `out`, shape (rows, 1)."""
        assert isinstance(column, Numbers)
        standardise(signed_log(column.values), self.mean, self.deviation, out[:, 0], origin)


class TextColumn(Table):
    """An input per category, 1 in that of the row's, 0 in the others; with `missing_input` a last: 1 if it is missing.

    A row with a text that is no category, as none of the training rows has it, is 0 in all of them.
    """

    kind: Literal["text"] = "text"
    name: str
    categories: tuple[str, ...]
    missing_input: bool

    @property
    def width(self) -> int:
        """How many inputs it becomes."""
        return len(self.categories) + self.missing_input

    def encode(self, column: Column, out: Float32s, origin: str) -> None:
        """Write the inputs of every row into `out`, shape (rows, width), which holds zeros."""
        text = as_words(column)
        places = text.places(self.categories)
        known = np.flatnonzero(places >= 0)
        out[known, places[known]] = 1.0
        if self.missing_input:
            out[text.codes < 0, -1] = 1.0


class KeyColumn(Table):
    """A key of embedding tables: XXH64 of the cell's text, with a seed of the column's own; a missing cell is ""."""

    kind: Literal["key"] = "key"
    name: str

    def keys_of(self, column: Column) -> npt.NDArray[np.int64]:
        """Return the key of every row."""
        text = as_words(column)
        of_words = keys_of_texts([*text.vocabulary, ""], seed_of(self.name)).view(np.int64)
        return of_words[text.codes]  # code -1, of a missing cell: the last


InputColumn = Annotated[NumberColumn | LogNumberColumn | TextColumn | KeyColumn, OneOf("kind")]


class ClassTarget(Table):
    """Classes: output (logit) i of a classifier belongs to classes[i]."""

    kind: Literal["class"] = "class"
    name: str = ""
    classes: tuple[str, ...]


class ValueTarget(Table):
    """A number: the built-in models' output z means mean + deviation * z. Both are of the training targets."""

    kind: Literal["value"] = "value"
    name: str = ""
    mean: float
    deviation: float


class Preprocessing(Table):
    """How examples become inputs, and what outputs mean; frozen, and the same on every machine.

    Parameters
    ----------
    version : int
        Of this layout.
    input_shape : tuple of int
        Shape of one example's inputs.
    divide_by : float
        Where there are no columns: what the data's own numbers are divided by.
    columns : tuple of InputColumn, optional
        Of a table, in the order of their inputs; None where the data are arrays.
    missing : str
        What stands for a missing value besides `parashard.data.columns.MISSING`.
    target : ClassTarget or ValueTarget
    """

    version: Literal[1] = 1
    input_shape: tuple[int, ...]
    divide_by: float = 1.0
    columns: tuple[InputColumn, ...] | None = None
    missing: str = ""
    target: Annotated[ClassTarget | ValueTarget, OneOf("kind")]

    def inputs(self, rows: Sequence[Mapping[str, Any]]) -> Tree:
        """Return the model's inputs for rows of a table.

        Parameters
        ----------
        rows : sequence of mapping of str to value
            By column name; a number, a boolean, a text, or None for a missing value. Other columns are ignored.

        Returns
        -------
        ndarray of float32, shape (rows, inputs)
            Where columns are keys: a dict of it, "numbers", and of "keys", int64 of shape (rows, key columns).

        Raises
        ------
        BadData
            A row lacks a column, or has a value that is not a number in a numeric column; or the data are not a table.
        """
        if self.columns is None:
            raise BadData("the data were arrays, not a table: divide them by `divide_by`, as float32")
        table = {column.name: self._column(column, rows) for column in self.columns}
        return encoded(self.columns, table, len(rows), "rows")

    def fields(self) -> tuple[Field, ...]:
        """Return the arrays of an example's inputs where there are several, as columns are keys; else none."""
        keys = sum(isinstance(column, KeyColumn) for column in self.columns or ())
        if not keys:
            return ()
        numbers = sum(column.width for column in self.columns or () if not isinstance(column, KeyColumn))
        return Field("inputs/numbers", (numbers,), "float32"), Field("inputs/keys", (keys,), "int64")

    def _column(self, column: InputColumn, rows: Sequence[Mapping[str, Any]]) -> Column:
        texts = [self._text(row, number, column.name) for number, row in enumerate(rows, start=1)]
        if isinstance(column, TextColumn | KeyColumn):
            return words(texts)
        values = [math.nan if text is None else number_of(text) for text in texts]
        if None in values:
            wrong = values.index(None)
            raise BadData(
                f"rows: column {shown_cell(column.name)}, row {wrong + 1}: found {shown_cell(texts[wrong] or '')}"
            )
        return Numbers(np.array(values, np.float64))

    def _text(self, row: Mapping[str, Any], number: int, name: str) -> str | None:
        if name not in row:
            raise BadData(f"rows: row {number} has no column {shown_cell(name)}")
        value = row[name]
        if value is None:
            return None
        if isinstance(value, bool | np.bool_):
            value = number_text(float(value), boolean=True)
        elif isinstance(value, int | float | np.integer | np.floating) and math.isfinite(value):
            value = number_text(float(value))
        text = str(value)
        return None if is_missing(text, self.missing) else text


def fitted_number(name: str, column: Numbers, origin: str) -> NumberColumn:
    """Return the standardisation of a numeric column, learned from these rows alone.

    Raises
    ------
    BadData
        The numbers are too large.
    """
    mean, deviation = mean_and_deviation(column.present(), origin)
    return NumberColumn(name=name, mean=mean, deviation=deviation, missing_input=bool(np.isnan(column.values).any()))


def fitted_text(name: str, column: Words, origin: str) -> TextColumn:
    """Return the one-hot encoding of a text column, learned from these rows alone.

    Raises
    ------
    BadData
        There are too many categories.
    """
    fitted = TextColumn(name=name, categories=tuple(column.used()), missing_input=bool((column.codes < 0).any()))
    if fitted.width > MAX_CATEGORIES:
        raise BadData(
            f"{origin}: has {fitted.width:,} categories in {len(column.codes):,} training rows, more than the "
            f"{MAX_CATEGORIES:,} that can be one-hot encoded; group its values, or leave it out: "
            f"data.ignore = [{json.dumps(name)}]"
        )
    return fitted


def fitted_value(name: str, values: Float64s, origin: str) -> ValueTarget:
    """Return the scale of targets that are numbers, learned from these of the training rows."""
    mean, deviation = mean_and_deviation(values, origin)
    return ValueTarget(name=name, mean=mean, deviation=deviation)


def encoded(columns: Sequence[InputColumn], table: Mapping[str, Column], rows: int, origin: str) -> Tree:
    """Return the inputs of a table: an array of shape (rows, sum of widths), or that and keys."""
    numbers = [column for column in columns if not isinstance(column, KeyColumn)]
    edges = list(itertools.accumulate((column.width for column in numbers), initial=0))
    inputs = np.zeros((rows, edges[-1]), np.float32)
    for column, start, stop in zip(numbers, edges, edges[1:], strict=False):
        column.encode(table[column.name], inputs[:, start:stop], f"{origin}: column {shown_cell(column.name)}")
    keys = [column.keys_of(table[column.name]) for column in columns if isinstance(column, KeyColumn)]
    return {"numbers": inputs, "keys": np.stack(keys, axis=1)} if keys else inputs


def as_json(preprocessing: Preprocessing) -> bytes:
    """Return the content of the file."""
    return json.dumps(preprocessing.plain(), indent=1, ensure_ascii=False).encode() + b"\n"


def read_preprocessing(path: str | os.PathLike[str]) -> Preprocessing:
    """Read the `preprocessing.json` of a run.

    Raises
    ------
    BadData
        It cannot be read, or has another format.
    """
    try:
        return read_json(Preprocessing, Path(path).read_bytes())
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        from parashard.settings.validation import first_problem

        raise BadData(f"{path}: does not describe preprocessing: {first_problem(error)}") from None
