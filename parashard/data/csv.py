"""Tables of separated text, with or without a header row, such as the files of the UCI repository.

Owns the reading of lines into rows of text. `parashard.data.columns` decides which columns are numeric. The whole
table is held as Python strings while it is read; for tables of more than some millions of rows use `parquet`. Called
by `parashard.data.open_source`, and by `parashard.cli` for a table that is new, or to be predicted for.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from parashard.data.arrays import ArraySource
from parashard.data.base import kind_of_failure
from parashard.data.columns import Table, shown_cell, words
from parashard.data.options import CsvOptions
from parashard.data.tables import table_source
from parashard.errors import BadData, shown_names


def open_csv(options: CsvOptions) -> ArraySource:
    """Read one or two tables; BadData names the file, the line or column, and the error."""
    training = read_csv(options.table, options)
    held_out = None if options.held_out_table is None else read_csv(options.held_out_table, options)
    return table_source(options, training, held_out)


def read_csv(path: Path, options: CsvOptions) -> Table:
    """Return a file's columns, all of them as text; errors as in `open_csv`."""
    names = list(options.columns) if options.columns is not None else None
    rows: list[list[str]] = []
    ends: list[int] = []
    line = 0

    def lines(file: Iterable[str]) -> Iterator[str]:
        nonlocal line
        for text in file:
            line += 1
            if not (options.comment and text.startswith(options.comment)):
                yield text

    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            delimiter, skips_space = options.separator[0], len(options.separator) > 1
            reader = csv.reader(lines(file), delimiter=delimiter, skipinitialspace=skips_space, strict=True)
            for row in reader:
                if not row:
                    continue  # a blank line
                if names is None:
                    names = _header(row, path)
                elif len(row) != len(names):
                    raise BadData(
                        f"{path}: row {len(rows) + 1} (line {line}) has {len(row)} values where the {len(names)} "
                        f"columns {shown_names(names)} are due (separator {options.separator!r}): "
                        f"{shown_cell(row[0])}, ..."
                    )
                else:
                    rows.append(row)
                    ends.append(line)
    except UnicodeDecodeError as error:
        raise BadData(f"{path}: is not text in UTF-8: {error}") from error
    except csv.Error as error:
        raise BadData(f"{path}: row {len(rows) + 1} (line {line}) cannot be parsed: {error}") from error
    except OSError as error:
        raise kind_of_failure(error)(f"{path}: cannot be read: {error.strerror or error}") from error
    if names is None or not rows:
        raise BadData(f"{path}: has no rows")
    columns = {}
    for name, texts in zip(names, zip(*rows, strict=True), strict=True):
        suffix = options.strip_label if name == options.label else ""
        columns[name] = words(text.removesuffix(suffix) for text in texts)
    return Table(path, columns, ends)


def _header(row: Sequence[str], path: Path) -> list[str]:
    repeated = sorted({name for name in row if row.count(name) > 1})
    if repeated:
        raise BadData(f"{path}: the header names {shown_names(map(shown_cell, repeated))} more than once")
    return list(row)
