"""Preprocessing: from a row of a table to the inputs of a model, and from its outputs to predictions.

Owns `preprocessing.json` beside a run's weights: the fitted columns and the meaning of outputs
(docs/preprocessing.md).
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Discriminator

from parashard.data.base import Field
from parashard.data.columns import (
    Column,
    Float64s,
    MissingTexts,
    Numbers,
    canonical,
    lists_of,
    missing_texts_of,
    number_of,
    number_text,
    shown_cell,
    values_of,
    words,
)
from parashard.data.input_columns import (
    ANY_KEYS,
    LISTS_OF_KEYS,
    SINGLE_KEYS,
    InputColumn,
    NumberColumn,
    TextColumn,
    check_known,
    encoded,
)
from parashard.data.portable_math import mean_and_deviation
from parashard.data.tree import LISTS, Ragged, Tree, map_leaves
from parashard.errors import BadData
from parashard.frozen_model import FrozenModel, first_problem

_PANDAS_MISSING = ("NAType", "NaTType")
_WHOLE_FLOATS = 2.0**53  # float64 has every whole number up to this
_TRUTHS = {"true": 1.0, "false": 0.0}


class ClassTarget(FrozenModel):
    """Classes: output (logit) i of a classifier belongs to classes[i]."""

    kind: Literal["class"] = "class"
    name: str = ""
    classes: tuple[str, ...]


class ValueTarget(FrozenModel):
    """A number: the built-in models' output z means mean + deviation * z, of the training targets."""

    kind: Literal["value"] = "value"
    name: str = ""
    mean: float
    deviation: float


class Preprocessing(FrozenModel):
    """The encoding of examples as inputs, and the meaning of outputs; frozen, and the same on every machine.

    Parameters
    ----------
    version : int
        Version of this format.
    input_shape : tuple of int
        Shape of one example's inputs.
    divide_by : float
        Divisor of the data's numbers, if there are no columns.
    columns : tuple of InputColumn, optional
        Columns of a table, in the order of their inputs; None if the data are arrays.
    missing, not_missing : str or tuple of str, tuple of str
        Texts of missing values besides `parashard.data.columns.MISSING`, and texts of that which are names in text
        columns.
    target : ClassTarget or ValueTarget
    """

    version: Literal[1] = 1
    input_shape: tuple[int, ...]
    divide_by: float = 1.0
    columns: tuple[InputColumn, ...] | None = None
    missing: str | tuple[str, ...] = ""
    not_missing: tuple[str, ...] = ()
    target: Annotated[ClassTarget | ValueTarget, Discriminator("kind")]

    def inputs(self, rows: Sequence[Mapping[str, Any]]) -> Tree:
        """Return the model's inputs for rows of a table.

        Parameters
        ----------
        rows : sequence of mapping of str to value
            By column name; a number, a boolean, a text, or None for a missing value; for a column of several
            values also a list of these. Other columns are ignored.

        Returns
        -------
        ndarray of float32, shape (rows, inputs)
            With key columns: a dict of this array as "numbers", and of "keys", int64 of shape (rows, key columns); with
            columns of several values also of "lists", a dict of one array for each, int64 of shape (rows, values),
            padded with -1.

        Raises
        ------
        BadData
            A row lacks a column, or has a value that is not a number in a numeric column, or a text that its column's
            vocabulary lacks and the job refuses; or the data are not a table.
        """
        return self.encoded(self.table(rows), len(rows))

    def table(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
        """Return the columns of these rows; arguments and errors as in `inputs`."""
        if self.columns is None:
            raise BadData("the data were arrays, not a table: divide them by `divide_by`, as float32")
        return {column.name: self._column(column, rows) for column in self.columns}

    def encoded(self, table: Mapping[str, Column], rows: int) -> Tree:
        """Return the model's inputs for the columns that `table` returned for `rows` rows; errors as in `inputs`."""
        columns = self.columns or ()
        for column in columns:
            check_known(column, table[column.name], functools.partial(_cell, column.name))
        inputs = encoded(columns, table, rows, "rows")
        return map_leaves(lambda values: values[:] if isinstance(values, Ragged) else values, inputs)

    def fields(self) -> tuple[Field, ...]:
        """Return the arrays of an example's inputs if there are key columns, else ()."""
        keys = sum(isinstance(column, SINGLE_KEYS) for column in self.columns or ())
        lists = [column for column in self.columns or () if isinstance(column, LISTS_OF_KEYS)]
        if not keys and not lists:
            return ()
        numbers = sum(column.width for column in self.columns or () if not isinstance(column, ANY_KEYS))
        return (
            Field("inputs/numbers", (numbers,), "float32"),
            Field("inputs/keys", (keys,), "int64"),
            *(Field(f"{LISTS}{column.name}", (column.values_max,), "int64") for column in lists),
        )

    def _column(self, column: InputColumn, rows: Sequence[Mapping[str, Any]]) -> Column:
        if isinstance(column, LISTS_OF_KEYS):
            return lists_of(
                [self._texts(row, number, column.name, column.delimiter) for number, row in enumerate(rows, start=1)]
            )
        in_text = isinstance(column, (TextColumn, *SINGLE_KEYS))
        texts = [self._text(row, number, column.name, in_text=in_text) for number, row in enumerate(rows, start=1)]
        if in_text:
            return words(texts)
        truths = _TRUTHS if isinstance(column, NumberColumn) and column.boolean else {}
        values = [math.nan if text is None else truths.get(canonical(text), number_of(text)) for text in texts]
        if None in values:
            wrong = values.index(None)
            raise BadData(
                f"{_cell(column.name, wrong)}: found {shown_cell(texts[wrong] or '')}; allowed: "
                f"{'true, false, ' if truths else ''}a number, or an empty cell"
            )
        return Numbers(np.array(values, np.float64))

    def _texts(self, row: Mapping[str, Any], number: int, name: str, delimiter: str) -> list[str]:
        """Return the values of a cell that may have several."""
        value = row.get(name)
        if not isinstance(value, list | tuple | np.ndarray):
            text = self._text(row, number, name)
            return [] if text is None else values_of(text, delimiter, self._marks)
        texts = (self._text({name: one}, number, name) for one in value)
        return [text.strip() for text in texts if text is not None]

    def _text(self, row: Mapping[str, Any], number: int, name: str, *, in_text: bool = True) -> str | None:
        if name not in row:
            raise BadData(f"rows: row {number} has no column {shown_cell(name)}")
        value = row[name]
        if value is None or type(value).__name__ in _PANDAS_MISSING:
            return None
        if isinstance(value, bool | np.bool_):
            return number_text(float(value), boolean=in_text)
        if isinstance(value, int | np.integer):
            return str(int(value))  # keeps all digits of a key
        if isinstance(value, float | np.floating) and not math.isinf(value):
            if in_text and abs(float(value)) > _WHOLE_FLOATS:
                raise BadData(
                    f"{_cell(name, number - 1)}: found the float {value:.0f}, which has lost its last digits; give it "
                    "as a whole number or text"
                )
            return None if math.isnan(value) else number_text(float(value))
        text = str(value)
        return None if self._marks.is_missing(text, in_text=in_text) else text

    @property
    def _marks(self) -> MissingTexts:
        return missing_texts_of(self.missing, self.not_missing)


def fitted_value(name: str, values: Float64s, origin: str) -> ValueTarget:
    """Return the scale of numeric targets, fitted on these values of the training rows."""
    mean, deviation = mean_and_deviation(values, origin)
    return ValueTarget(name=name, mean=mean, deviation=deviation)


def as_json(preprocessing: Preprocessing) -> bytes:
    """Return the content of `preprocessing.json`."""
    return json.dumps(preprocessing.plain(), indent=1, ensure_ascii=False).encode() + b"\n"


def read_preprocessing(path: str | os.PathLike[str]) -> Preprocessing:
    """Read the `preprocessing.json` of a run; BadData: it cannot be read, or has another format."""
    try:
        return Preprocessing.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadData(f"{path}: does not describe preprocessing: {first_problem(error)}") from None


def _cell(name: str, row: int) -> str:
    return f"rows: column {shown_cell(name)}, row {row + 1}"
