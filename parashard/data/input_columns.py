"""Input columns: how the columns of a table become inputs of a model or keys, fitted on its training rows.

Owns standardisation and one-hot encoding, and puts numbers and keys together. Knows no file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from parashard.data.columns import Column, Numbers, Words, as_words, merged, shown_cell
from parashard.data.key_columns import (
    KNOWN_KEYS,
    LISTS_OF_KEYS,
    SINGLE_KEYS,
    KeyColumn,
    KeysColumn,
    KnownKeyColumn,
    KnownKeysColumn,
    unknown_text,
)
from parashard.data.portable_math import mean_and_deviation, signed_log, standardise
from parashard.data.tree import Tree
from parashard.errors import BadData
from parashard.frozen_model import FrozenModel
from parashard.plan.variables import Float32s

ANY_KEYS = (*SINGLE_KEYS, *LISTS_OF_KEYS)
MAX_CATEGORIES = 4096
"""Most categories that one column may have: each becomes an input of its own, in every example."""


class NumberColumn(FrozenModel):
    """One input, (x - mean) / deviation, 0 for a missing value; with `missing_input` a second: 1 if it is missing.

    With `boolean` the texts true and false are numbers, too.
    """

    kind: Literal["number"] = "number"
    name: str
    mean: float
    deviation: float
    missing_input: bool
    boolean: bool = False

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


class LogNumberColumn(FrozenModel):
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


class TextColumn(FrozenModel):
    """An input per category, 1 in that of the row's, 0 in the others; with `missing_input` a last: 1 if it is missing.

    A row with a text that is no category, as none of the training rows has it, is 0 in all of them. Texts are compared
    as they are, and then in the form of `parashard.data.texts.canonical`.
    """

    kind: Literal["text"] = "text"
    name: str
    categories: tuple[str, ...]
    missing_input: bool

    @property
    def width(self) -> int:
        """How many inputs it becomes."""
        return len(self.categories) + self.missing_input

    @property
    def known(self) -> tuple[str, ...]:
        """The texts that are not unknown."""
        return self.categories

    def encode(self, column: Column, out: Float32s, origin: str) -> None:
        """Write the inputs of every row into `out`, shape (rows, width), which holds zeros."""
        text = as_words(column)
        places = text.places(self.categories)
        known = np.flatnonzero(places >= 0)
        out[known, places[known]] = 1.0
        if self.missing_input:
            out[text.codes < 0, -1] = 1.0


InputColumn = Annotated[
    NumberColumn | LogNumberColumn | TextColumn | KeyColumn | KeysColumn | KnownKeyColumn | KnownKeysColumn,
    Field(discriminator="kind"),
]


def fitted_number(name: str, column: Numbers, origin: str) -> NumberColumn:
    """Return the standardisation of a numeric column, learned from these rows alone."""
    mean, deviation = mean_and_deviation(column.present(), origin)
    return NumberColumn(
        name=name,
        mean=mean,
        deviation=deviation,
        missing_input=bool(np.isnan(column.values).any()),
        boolean=column.boolean,
    )


def fitted_text(name: str, column: Words, origin: str) -> TextColumn:
    """Return the one-hot encoding of a text column, learned from these rows alone."""
    fitted = TextColumn(
        name=name, categories=tuple(merged(column).used()), missing_input=bool((column.codes < 0).any())
    )
    if fitted.width > MAX_CATEGORIES:
        raise BadData(
            f"{origin}: has {fitted.width:,} categories in {len(column.codes):,} training rows, more than the "
            f"{MAX_CATEGORIES:,} that can be one-hot encoded; group its values, or leave it out: "
            f"data.ignore = [{json.dumps(name)}]"
        )
    return fitted


def encoded(columns: Sequence[InputColumn], table: Mapping[str, Column], rows: int, origin: str) -> Tree:
    """Return the inputs of a table: an array of shape (rows, sum of widths), or that and keys, lists of them ragged."""
    numbers = [column for column in columns if not isinstance(column, ANY_KEYS)]
    edges = list(itertools.accumulate((column.width for column in numbers), initial=0))
    inputs = np.zeros((rows, edges[-1]), np.float32)
    for column, start, stop in zip(numbers, edges, edges[1:], strict=False):
        column.encode(table[column.name], inputs[:, start:stop], f"{origin}: column {shown_cell(column.name)}")
    keys = [column.keys_of(table[column.name]) for column in columns if isinstance(column, SINGLE_KEYS)]
    lists = {
        column.name: column.lists_of(table[column.name]) for column in columns if isinstance(column, LISTS_OF_KEYS)
    }
    if not keys and not lists:
        return inputs
    of_rows = np.stack(keys, axis=1) if keys else np.empty((rows, 0), np.int64)
    return {"numbers": inputs, "keys": of_rows} | ({"lists": lists} if lists else {})


def check_known(column: InputColumn, texts: Column, cell: Callable[[int], str]) -> None:
    """Refuse a text that the vocabulary of a column lacks, where the job says so."""
    if not isinstance(column, KNOWN_KEYS) or column.unknown == "key":
        return
    found = unknown_text(column, texts)
    if found is not None:
        row, text = found
        raise BadData(
            f"{cell(row)}: found {shown_cell(text)}; allowed: the {len(column.texts):,} texts of the column's "
            'vocabulary (data.vocabularies), or data.unknown_texts = "key", which gives all others one key'
        )
