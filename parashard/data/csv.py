"""Tables of separated text, with or without a header row, such as the files of the UCI repository.

Owns the reading of text into columns: which are numeric, and where a value is malformed. The whole table is held as
Python strings while it is read; for tables of more than some millions of rows use `parquet`. Called by
`parashard.data.open_source`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, field_validator

from parashard.data.arrays import ArraySource
from parashard.data.base import kind_of_failure
from parashard.data.columns import Column, Numbers, Table, TableOptions, table_source, words
from parashard.errors import BadData


class CsvOptions(TableOptions):
    """One text table, or one for training and one held out."""

    source: Literal["csv"] = Field(default="csv", description="Separated text in UTF-8.")
    columns: tuple[str, ...] | None = Field(
        default=None, min_length=2, description="Names of the columns of files without a header row."
    )
    separator: str = Field(default=",", description="One character, and then spaces if they follow it in the files.")
    missing: str = Field(default="", description='What stands for a missing value, such as "?".')
    comment: str = Field(default="", description="Lines that begin with this are skipped; empty: none are.")
    strip_label: str = Field(
        default="", description='Removed from the end of a label, such as the "." in the test file of UCI Adult.'
    )

    @field_validator("separator")
    @classmethod
    def _one_character(cls, separator: str) -> str:
        if not separator or separator[0] in '"\r\n' or separator[1:].strip(" "):
            raise ValueError(f"must be one character and then only spaces, found {separator!r}")
        return separator

    @field_validator("columns")
    @classmethod
    def _distinct(cls, columns: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if columns is not None and len(set(columns)) < len(columns):
            raise ValueError(f"names must differ, found {columns}")
        return columns


def open_csv(options: CsvOptions) -> ArraySource:
    """Read one or two tables; BadData names the file, the line or column, and what is wrong there."""
    texts = _read(options.path, options)
    training = {
        name: words(column) if name in options.categorical else _column(column) for name, column in texts.items()
    }
    held_out = None
    if options.held_out_path is not None:
        held_out = _typed_like(training, _read(options.held_out_path, options), options.held_out_path)
    return table_source(options, training, held_out)


Texts = list[str | None]


def _read(path: Path, options: CsvOptions) -> dict[str, Texts]:
    """Return the file's columns as text, None where a value is missing; each has the same length, at least 1."""
    names = list(options.columns) if options.columns is not None else None
    rows: list[list[str]] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = (line for line in file if not (options.comment and line.startswith(options.comment)))
            delimiter, skips_space = options.separator[0], len(options.separator) > 1
            reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=skips_space, strict=True)
            for row in reader:
                if not row:
                    continue  # a blank line
                if names is None:
                    names = _header(row, path)
                elif len(row) != len(names):
                    raise BadData(
                        f"{path}: row {len(rows) + 1} has {len(row)} values where the {len(names)} columns "
                        f"{', '.join(names)} are due (separator {options.separator!r}): {row[0]!r}, ..."
                    )
                else:
                    rows.append(row)
    except UnicodeDecodeError as error:
        raise BadData(f"{path}: is not text in UTF-8: {error}") from error
    except csv.Error as error:
        raise BadData(f"{path}: row {len(rows) + 1} cannot be parsed: {error}") from error
    except OSError as error:
        raise kind_of_failure(error)(f"{path}: cannot be read: {error.strerror or error}") from error
    if names is None or not rows:
        raise BadData(f"{path}: has no rows")
    columns: dict[str, Texts] = {}
    for name, texts in zip(names, zip(*rows, strict=True), strict=True):
        suffix = options.strip_label if name == options.label else ""
        columns[name] = [None if text == options.missing else text.removesuffix(suffix) for text in texts]
    return columns


def _header(row: Sequence[str], path: Path) -> list[str]:
    repeated = sorted({name for name in row if row.count(name) > 1})
    if repeated:
        raise BadData(f"{path}: the header names {', '.join(map(repr, repeated))} more than once")
    return list(row)


def _column(texts: Texts) -> Column:
    """Return a numeric column if every value that is there is a finite number, and there is one; else a text column."""
    numbers = [_number(text) for text in texts]
    if None in numbers or all(text is None for text in texts):
        return words(texts)
    return Numbers(np.array(numbers, np.float64))


def _typed_like(training: Table, texts: Mapping[str, Texts], path: Path) -> dict[str, Column]:
    """Return the columns that the training table has too, each of the kind that it has there."""
    columns: dict[str, Column] = {}
    for name in training.keys() & texts.keys():
        if not isinstance(training[name], Numbers):
            columns[name] = words(texts[name])
            continue
        numbers = [_number(text) for text in texts[name]]
        if None in numbers:
            row = numbers.index(None)
            raise BadData(
                f"{path}: column {name!r}, row {row + 1}: {texts[name][row]!r} is no number, as all are in training"
            )
        columns[name] = Numbers(np.array(numbers, np.float64))
    return columns


def _number(text: str | None) -> float | None:
    """Return a value as a number: NaN if it is missing, None if it is no finite number."""
    if text is None:
        return math.nan
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
