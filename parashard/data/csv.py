"""Tables of separated text, with or without a header row, such as the files of the UCI repository.

Owns the reading of lines into rows of text. `parashard.data.columns` decides which columns are numeric. The whole table
is held as Python strings while it is read; for tables of more than some millions of rows use `parquet`.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from parashard.data.arrays import ArraySource
from parashard.data.base import kind_of_failure
from parashard.data.columns import ColumnTable, shown_cell, words
from parashard.data.options import CsvOptions
from parashard.data.tabular import table_source
from parashard.errors import BadData, shown_names

_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_CELL_CHARACTERS_MAX = 1 << 30
csv.field_size_limit(_CELL_CHARACTERS_MAX)  # Python's own is 131,072, also in columns that are left out


def open_csv(options: CsvOptions) -> ArraySource:
    """Read one or two tables; BadData names the file, the line or column, and the error."""
    training = read_csv(options.table, options)
    held_out = None if options.held_out_table is None else read_csv(options.held_out_table, options)
    return table_source(options, training, held_out)


@contextmanager
def opened_text(path: Path, encoding: str) -> Iterator[TextIO]:
    """Open a text file, compressed with gzip or not: the first bytes tell."""
    try:
        skips_mark = codecs.lookup(encoding).name == "utf-8"
        with path.open("rb") as file:
            begins = file.read(4)
            file.seek(0)
            if begins == _PARQUET:
                raise BadData(f'{path}: is a Parquet file, and due is a text table; data.source = "parquet" reads it')
            content = gzip.GzipFile(fileobj=file) if begins.startswith(_GZIP) else file
            with io.TextIOWrapper(content, encoding="utf-8-sig" if skips_mark else encoding, newline="") as text:
                yield text
    except UnicodeError as error:
        raise BadData(
            f"{path}: is not text in {encoding.upper()}: {error}; data.encoding (init: --encoding) names another, "
            'such as "latin-1" or "utf-16"'
        ) from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise BadData(f"{path}: the gzip stream is damaged: {error}") from error
    except LookupError:
        raise BadData(f'{path}: unknown encoding {encoding!r}; allowed: such as "utf-8" or "latin-1"') from None
    except OSError as error:
        raise kind_of_failure(error)(f"{path}: cannot be read: {error.strerror or error}") from error


def is_parquet(path: Path) -> bool:
    """Tell whether a file is a table in Parquet; False where it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(4) == _PARQUET
    return False


def read_csv(path: Path, options: CsvOptions) -> ColumnTable:
    """Return a file's columns, all of them as text; errors as in `open_csv`."""
    names = list(options.columns) if options.columns is not None else None
    rows: list[list[str]] = []
    lines: list[int] = []
    blank: list[int] = []  # lines, of which those before a row are empty cells in a table of one column
    with opened_text(path, options.encoding) as file:
        reading = _Reading(file, options)
        while (row := reading.row(f"{path}: {'the header' if names is None else f'row {len(rows) + 1}'}")) is not None:
            if not row:
                blank.append(reading.line)
                continue
            if names is not None and len(names) == 1:
                rows += [[""]] * len(blank)
                lines += blank
            blank.clear()
            if names is None:
                names = _header(row, path)
            elif len(row) != len(names):
                raise BadData(
                    f"{path}: row {len(rows) + 1} (line {reading.line}) has {len(row)} values where the {len(names)} "
                    f"columns {shown_names(names)} are due (separator {options.separator!r}): "
                    f"{shown_cell(row[0])}, ..."
                )
            else:
                rows.append(row)
                lines.append(reading.line)
    if names is None or not rows:
        raise BadData(f"{path}: has no rows")
    columns = {}
    for name, texts in zip(names, zip(*rows, strict=True), strict=True):
        suffix = options.strip_label if name == options.label else ""
        columns[name] = words(text.removesuffix(suffix) for text in texts)
    return ColumnTable(path, columns, lines, warnings=tuple(reading.warnings()))


class _Reading:
    """The rows of a file, and where its quotes are."""

    def __init__(self, file: Iterable[str], options: CsvOptions) -> None:
        self.line = 0
        self._quote = options.quote
        self._first = 0  # line of the row that is read; 0: the next line begins one
        self._quoted = 0  # the last line with quotes
        self._joined: tuple[int, int] | None = None  # the first row of several lines
        self._other_quotes = False  # of rows on one line
        self._rows = _parsed(self._lines(file, options.comment), options)

    def row(self, what: str) -> list[str] | None:
        """Return the cells of the next row, none of a blank line; None: there is no more. Errors name `what`."""
        self._first = 0
        try:
            cells = next(self._rows, None)
        except csv.Error as error:
            quotes = '; if quotes are letters like others here, say data.quote = ""' if self._quoted else ""
            raise BadData(f"{what} (line {self.line}) cannot be parsed: {error}{quotes}") from error
        if cells is None:
            return None
        if self._first < self.line:
            self._joined = self._joined or (self._first, self.line)
        elif self._quoted == self.line:
            self._other_quotes = True
        return cells

    def warnings(self) -> Iterator[str]:
        """Yield a warning where quotes join lines and do nothing else: they may be inches, or of titles."""
        if self._joined is not None and not self._other_quotes:
            first, last = self._joined
            yield (
                f"lines {first} to {last} are one row, as quotes join them, and only such rows have quotes; if quotes "
                'are letters like others, say data.quote = ""'
            )

    def _lines(self, file: Iterable[str], comment: str) -> Iterator[str]:
        quote = self._quote
        for text in file:
            self.line += 1
            if self._first == 0:
                if comment and text.startswith(comment):
                    continue
                self._first = self.line
            if quote and quote in text:
                self._quoted = self.line
            yield text


def _parsed(lines: Iterator[str], options: CsvOptions) -> Iterator[list[str]]:
    """Return an iterator of rows of cells, which takes a row's lines and no more."""
    if options.has_long_separator:
        return (text.split(options.separator) if (text := line.rstrip("\r\n")) else [] for line in lines)
    return csv.reader(
        lines,
        delimiter=options.separator[0],
        skipinitialspace=len(options.separator) > 1,
        quotechar=options.quote or None,
        quoting=csv.QUOTE_MINIMAL if options.quote else csv.QUOTE_NONE,
        strict=True,
    )


def _header(row: Sequence[str], path: Path) -> list[str]:
    repeated = sorted({name for name in row if row.count(name) > 1})
    if repeated:
        raise BadData(f"{path}: the header names {shown_names(map(shown_cell, repeated))} more than once")
    return list(row)
