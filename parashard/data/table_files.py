"""Tables in files: separated text, such as the files of the UCI repository, and Apache Parquet.

A whole table of text is held as Python strings while it is read; for tables of more than some millions of rows use
Parquet, which needs pyarrow (the extra `parquet`), imported only when such data is opened.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from parashard.data.arrays import ArraySource, is_rounded
from parashard.data.base import kind_of_failure
from parashard.data.columns import Column, ColumnTable, Lists, Numbers, Words, as_words, digits_lost, shown_cell, words
from parashard.data.input_columns import keyed_names
from parashard.data.options import CsvOptions, ParquetOptions
from parashard.data.tabular import table_source
from parashard.errors import BadData, shown_names
from parashard.process.extras import pyarrow_for

_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_CELL_CHARACTERS_MAX = 1 << 30
csv.field_size_limit(_CELL_CHARACTERS_MAX)  # Python's default of 131,072 applies to ignored columns, too


def open_csv(options: CsvOptions) -> ArraySource:
    """Read one or two tables; BadData names the file, the line or column, and the error."""
    training = read_csv(options.table, options)
    held_out = None if options.held_out_table is None else read_csv(options.held_out_table, options)
    return table_source(options, training, held_out)


@contextmanager
def opened_text(path: Path, encoding: str) -> Iterator[TextIO]:
    """Open a text file; gzip is detected by the first bytes."""
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
    blank: list[int] = []  # blank lines since the last row; in a table of one column those before a row are empty cells
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
    """Reader of rows that tracks quotes, for warnings and error messages."""

    def __init__(self, file: Iterable[str], options: CsvOptions) -> None:
        self.line = 0
        self._quote = options.quote
        self._first = 0  # first line of the current row; 0: the next line begins a row
        self._quoted = 0  # the last line with quotes
        self._joined: tuple[int, int] | None = None  # first and last line of the first row of several lines
        self._other_quotes = False  # whether a row of one line has quotes
        self._rows = _parsed(self._lines(file, options.comment), options)

    def row(self, what: str) -> list[str] | None:
        """Return the cells of the next row ([] for a blank line), or None at the end; errors name `what`."""
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
        """Yield a warning if quotes do nothing but join lines: they may be inch marks, or parts of titles."""
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
    """Return an iterator over rows of cells, which never reads past the current row's lines."""
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


_CATEGORY = "categorical"
_WHOLE_FLOATS = 2.0**53  # float64 has every whole number up to this


def open_parquet(options: ParquetOptions) -> ArraySource:
    """Read one or two files; BadData names the file and the error; ConfigurationError: pyarrow is not installed."""
    keys = {*keyed_names(options), *options.categorical}
    training = read_parquet(options.path, lambda name: not options.leaves_out(name), keys)
    held_out = None
    if options.held_out_path is not None:
        used = {name for name in training.columns if not options.leaves_out(name)}
        held_out = read_parquet(options.held_out_path, lambda name: name in used, keys)
    return table_source(options, training, held_out)


def read_readable_columns(path: Path) -> tuple[ColumnTable, dict[str, str]]:
    """Return a file's columns, and by name the error of each unreadable one, whose cells are all missing."""
    refused: dict[str, str] = {}
    return read_parquet(path, lambda name: True, (), refused), refused


def read_parquet(
    path: Path, is_used: Callable[[str], bool], keys: Collection[str], refused: dict[str, str] | None = None
) -> ColumnTable:
    """Return a file's columns; unused ones may have any type, and all of their cells are missing."""
    # Whole numbers in columns of `keys` (embedding keys or categories) are read as text, which keeps all digits.
    pa, parquet = pyarrow_for(f"{path}: Parquet files", "parquet")
    try:
        with parquet.ParquetFile(path) as file:  # `read_table` would accept a folder, too
            table = file.read()
        index, categories = _of_pandas(table)
        columns = _columns(pa, table, path, is_used, {*keys, *categories}, refused)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # Arrow decodes text lazily
        raise kind_of_failure(error)(f"{path}: cannot be read as Parquet: {error}") from error
    for name in categories:
        if isinstance(columns[name], Numbers):
            columns[name] = as_words(columns[name])
    return ColumnTable(path, columns, pandas_index=index, categories=categories)


def _of_pandas(table: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that were a pandas index, and those that were pandas categories."""
    with suppress(ValueError, AttributeError, TypeError):
        described = json.loads((table.schema.metadata or {}).get(b"pandas", b"{}"))
        index = tuple(name for name in described.get("index_columns", ()) if isinstance(name, str))
        categories = [one["field_name"] for one in described.get("columns", ()) if one.get("pandas_type") == _CATEGORY]
        return index, tuple(name for name in categories if name in table.column_names)
    return (), ()


def _columns(
    pa: Any,
    table: Any,
    path: Path,
    is_used: Callable[[str], bool],
    keys: Collection[str],
    refused: dict[str, str] | None,
) -> dict[str, Column]:
    """Return all columns, unused ones empty; an unreadable one is an error, or an entry of `refused` if given."""
    if not table.num_rows:
        raise BadData(f"{path}: has no rows")
    if len(set(table.column_names)) < table.num_columns:
        raise BadData(f"{path}: column names must differ, found {shown_names(table.column_names)}")
    columns: dict[str, Column] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        columns[name] = _empty(len(column))
        if not is_used(name):
            continue
        origin = f"{path}: column {shown_cell(name)}"
        try:
            columns[name] = _column(pa, _digits(pa, column.combine_chunks(), origin, is_key=name in keys), origin)
        except BadData as error:
            if refused is None:
                raise
            refused[name] = error.message.removeprefix(f"{origin}: ")
    return columns


def _column(pa: Any, array: Any, origin: str) -> Column:
    """Convert an Arrow array to a column (all cells missing if its type is null); BadData for other types."""
    types, kind = pa.types, array.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _lists(pa, array, origin)
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_null(kind):
        return _empty(len(array))
    if types.is_string(kind) or types.is_large_string(kind):
        encoded = array if types.is_dictionary(array.type) else array.dictionary_encode()
        codes = encoded.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        return Words(codes, tuple(encoded.dictionary.to_pylist()))
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind):
        _check_whole(pa, array, origin)
        values = array.cast(pa.int8() if types.is_boolean(kind) else kind).cast(pa.float64(), safe=False)
        numbers = values.to_numpy(zero_copy_only=False).astype(np.float64)
        if np.isinf(numbers).any():
            raise BadData(f"{origin}: row {int(np.flatnonzero(np.isinf(numbers))[0]) + 1} is infinite")
        return Numbers(numbers, boolean=types.is_boolean(kind))
    if types.is_temporal(kind):
        raise BadData(
            f"{origin}: holds dates or times ({array.type}), which are no inputs; make numbers of them, such as the "
            "weekday or days since a date, or leave the column out by data.ignore"
        )
    raise BadData(
        f"{origin}: must hold numbers, booleans, text or lists of these, found the type {array.type}; data.ignore "
        "leaves the column out"
    )


def _check_whole(pa: Any, array: Any, origin: str) -> None:
    """Refuse whole numbers that float64 would round, in a column that is used as numbers or as the label."""
    values = array.dictionary if pa.types.is_dictionary(array.type) else array
    if pa.types.is_integer(values.type):
        numbers = values.drop_null().to_numpy(zero_copy_only=False)
        changed = is_rounded(numbers, np.float64)
        if changed.any():
            raise digits_lost(origin, numbers[int(np.argmax(changed))])
    elif _is_whole(pa, values.type):
        for number in values.drop_null().to_pylist():
            if int(float(number)) != int(number):
                raise digits_lost(origin, number)


def _is_whole(pa: Any, kind: Any) -> bool:
    """Tell whether a type is of whole numbers."""
    return bool(pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale == 0))


def _lists(pa: Any, array: Any, origin: str) -> Lists:
    """Convert an Arrow list array to lists of texts, without null items."""
    items = array.flatten()  # skips the items of null lists
    column = _column(pa, _digits(pa, items, origin, is_key=True), f"{origin}: items of its lists")
    if isinstance(column, Lists):
        raise BadData(f"{origin}: must hold lists of numbers, booleans or text, found the type {array.type}")
    texts = as_words(column)
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    there = texts.codes >= 0
    before = np.concatenate(([0], np.cumsum(there)))
    return Lists(texts.codes[there], before[np.concatenate(([0], np.cumsum(lengths)))], texts.vocabulary)


def _digits(pa: Any, array: Any, origin: str, *, is_key: bool) -> Any:
    """Convert whole numbers that are keys to text: float64 would round long ones."""
    if is_key and pa.types.is_dictionary(array.type) and _is_whole(pa, array.type.value_type):
        array = array.dictionary_decode()
    if is_key and pa.types.is_floating(array.type):
        numbers = array.drop_null().cast(pa.float64()).to_numpy(zero_copy_only=False)
        long = numbers[np.isfinite(numbers) & (np.abs(numbers) > _WHOLE_FLOATS)]
        if len(long):
            raise BadData(
                f"{origin}: found the float {long[0]:.0f}, which has lost its last digits, as a key or category; write "
                "the column as whole numbers or text"
            )
    return array.cast(pa.string()) if is_key and _is_whole(pa, array.type) else array


def _empty(rows: int) -> Words:
    return Words(np.full(rows, -1, np.int64), ())
