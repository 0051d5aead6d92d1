"""Tables of separated text, with or without a header row, such as the files of the UCI repository.

Owns the reading of lines into rows of text. `parashard.data.columns` decides which columns are numeric. The whole
table is held as Python strings while it is read; for tables of more than some millions of rows use `parquet`. Called
by `parashard.data.open_source`, and by `parashard.cli` for a table that is new, or to be predicted for.
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
from typing import NamedTuple, TextIO

from parashard.data.arrays import ArraySource
from parashard.data.base import kind_of_failure
from parashard.data.columns import Table, shown_cell, words
from parashard.data.options import CsvOptions
from parashard.data.tables import table_source
from parashard.errors import BadData, shown_names

_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_CELL_CHARACTERS_MAX = 1 << 30
csv.field_size_limit(_CELL_CHARACTERS_MAX)  # Python's own is 131,072, also in columns that are left out


class _Row(NamedTuple):
    """A row's cells, its first and last line, and whether it has quotes."""

    cells: list[str]
    first: int
    last: int
    has_quotes: bool


def open_csv(options: CsvOptions) -> ArraySource:
    """Read one or two tables; BadData names the file, the line or column, and the error."""
    training = read_csv(options.table, options)
    held_out = None if options.held_out_table is None else read_csv(options.held_out_table, options)
    return table_source(options, training, held_out)


@contextmanager
def opened_text(path: Path, encoding: str) -> Iterator[TextIO]:
    """Open a text file, compressed with gzip or not: the first bytes tell.

    Raises
    ------
    BadData
        It cannot be opened or read, is no text in this encoding, or is a Parquet file.
    Unavailable
        It is there and the system does not give its content now.
    """
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
            f"{path}: is not text in {encoding.upper()}: {error}; data.encoding names another encoding, such as "
            '"latin-1" or "utf-16"'
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


def read_csv(path: Path, options: CsvOptions) -> Table:
    """Return a file's columns, all of them as text; errors as in `open_csv`."""
    names = list(options.columns) if options.columns is not None else None
    rows: list[_Row] = []
    with opened_text(path, options.encoding) as file:
        for row in _rows(file, path, options):
            if names is None:
                names = _header(row.cells, path)
            elif len(row.cells) != len(names):
                raise BadData(
                    f"{path}: row {len(rows) + 1} (line {row.last}) has {len(row.cells)} values where the "
                    f"{len(names)} columns {shown_names(names)} are due (separator {options.separator!r}): "
                    f"{shown_cell(row.cells[0])}, ..."
                )
            else:
                rows.append(row)
    if names is None or not rows:
        raise BadData(f"{path}: has no rows")
    columns = {}
    for name, texts in zip(names, zip(*(row.cells for row in rows), strict=True), strict=True):
        suffix = options.strip_label if name == options.label else ""
        columns[name] = words(text.removesuffix(suffix) for text in texts)
    return Table(path, columns, [row.last for row in rows], warnings=tuple(_stray_quotes(rows)))


def _rows(file: Iterable[str], path: Path, options: CsvOptions) -> Iterator[_Row]:
    """Yield the rows of a file that are not blank, the header's among them."""
    line = 0
    first = 0  # line of the row that is read; 0: the next line begins one
    has_quotes = False

    def lines() -> Iterator[str]:
        nonlocal line, first, has_quotes
        for text in file:
            line += 1
            if first == 0:
                if options.comment and text.startswith(options.comment):
                    continue
                first, has_quotes = line, False
            has_quotes = has_quotes or bool(options.quote and options.quote in text)
            yield text

    count = 0
    parsed = _parsed(lines(), options)
    while True:
        first = 0
        try:
            cells = next(parsed, None)
        except csv.Error as error:
            quoted = has_quotes and '; if quotes are letters like others here, say data.quote = ""'
            row = (
                "the header"
                if count == 0 and options.columns is None
                else f"row {count + (options.columns is not None)}"
            )
            raise BadData(f"{path}: {row} (line {line}) cannot be parsed: {error}{quoted or ''}") from error
        if cells is None:
            return
        if cells:
            count += 1
            yield _Row(cells, first, line, has_quotes)


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


def _stray_quotes(rows: Sequence[_Row]) -> Iterator[str]:
    """Yield a warning where quotes join lines and do nothing else: they may be inches, or of titles."""
    quoted = [row for row in rows if row.has_quotes]
    if quoted and all(row.first < row.last for row in quoted):
        row = quoted[0]
        yield (
            f"lines {row.first} to {row.last} are one row, as quotes join them, and only such rows have quotes; if "
            'quotes are letters like others, say data.quote = ""'
        )


def _header(row: Sequence[str], path: Path) -> list[str]:
    repeated = sorted({name for name in row if row.count(name) > 1})
    if repeated:
        raise BadData(f"{path}: the header names {shown_names(map(shown_cell, repeated))} more than once")
    return list(row)
