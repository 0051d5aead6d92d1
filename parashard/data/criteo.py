"""Criteo's click log, read with pyarrow (the extra `parquet`), which is imported only when such data is opened.

The format of the Display Advertising Challenge: a row has a label (1: there was a click), 13 whole numbers (I1 to I13)
and 26 texts (C1 to C26, 8 hex digits each), with tabs between them and no header; any field but the label may be empty.

The log is read block by block into arrays that grow in place. A number x becomes ln(1 + x), or stays x if negative, and
is standardised by the training rows; a missing one becomes 0. A text becomes a key, XXH64 seeded by its column; a
missing text has the key of "".
"""

from __future__ import annotations

import gzip
import itertools
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parashard.data.arrays import ArraySource, Split
from parashard.data.base import Indices, kind_of_failure
from parashard.data.columns import Numbers, shown_cell
from parashard.data.hashing import keys_of_bytes, seed_of
from parashard.data.input_columns import KeyColumn, LogNumberColumn
from parashard.data.options import CriteoOptions
from parashard.data.portable_math import mean_and_deviation, signed_log
from parashard.data.preprocessing import ClassTarget
from parashard.errors import BadData
from parashard.process.extras import pyarrow_for

LABEL = "label"
NUMBERS = tuple(f"I{number}" for number in range(1, 14))
TEXTS = tuple(f"C{number}" for number in range(1, 27))
COLUMNS = (LABEL, *NUMBERS, *TEXTS)

_MISSING = np.iinfo(np.int32).min
_BLOCK_BYTES = 1 << 20  # parsed by pyarrow at once
_BLOCK_ROWS = 1 << 14  # computed at once, so that temporaries stay in the CPU's cache
_GROWTH = 1.25
_GZIP_MAGIC = b"\x1f\x8b"
_WHOLE = re.compile(rb"\s*-?\d{1,10}\s*")


class _Rows(NamedTuple):
    """Rows of a log: int64 labels, int32 numbers with `_MISSING` for none, int64 keys."""

    labels: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int32]
    keys: npt.NDArray[np.int64]

    def take(self, rows: Indices | slice) -> _Rows:
        """Return these rows; for a slice, views."""
        return _Rows(self.labels[rows], self.numbers[rows], self.keys[rows])


def open_criteo(options: CriteoOptions) -> ArraySource:
    """Read one or two logs."""
    training, held_out = _split(options)
    columns = tuple(
        _fitted(name, training.numbers[:, place], f"{options.path}: column {shown_cell(name)}")
        for place, name in enumerate(NUMBERS)
    )
    return ArraySource(
        _inputs(training, columns, options.path),
        _inputs(held_out, columns, options.held_out_path or options.path),
        classes=2,
        columns=(*columns, *(KeyColumn(name=name) for name in TEXTS)),
        target=ClassTarget(name=LABEL, classes=("0", "1")),
    )


def _split(options: CriteoOptions) -> tuple[_Rows, _Rows]:
    whole = _read(options.path)
    if options.held_out_path is not None:
        return whole, _read(options.held_out_path)
    if options.split == "random":
        rows, held_out_rows = options.rows(len(whole.labels))
        return whole.take(rows), whole.take(held_out_rows)
    first = len(whole.labels) - options.held_out_rows(len(whole.labels))
    return whole.take(slice(first)), whole.take(slice(first, None))


def _inputs(rows: _Rows, columns: tuple[LogNumberColumn, ...], path: Path) -> Split:
    numbers = np.empty(rows.numbers.shape, np.float32)
    for first in range(0, len(numbers), _BLOCK_ROWS):
        some = slice(first, first + _BLOCK_ROWS)
        for place, column in enumerate(columns):
            found = rows.numbers[some, place]
            values = Numbers(np.where(found == _MISSING, np.nan, found.astype(np.float64)))
            column.encode(values, numbers[some, place : place + 1], f"{path}: column {shown_cell(column.name)}")
    return Split({"numbers": numbers, "keys": rows.keys}, rows.labels)


def _fitted(name: str, numbers: npt.NDArray[np.int32], origin: str) -> LogNumberColumn:
    """Return the standardisation of a column, learned from these rows alone."""
    present = numbers[numbers != _MISSING]
    values = np.empty(len(present))
    for first in range(0, len(values), _BLOCK_ROWS):
        some = slice(first, first + _BLOCK_ROWS)
        values[some] = signed_log(present[some].astype(np.float64))
    mean, deviation = mean_and_deviation(values, origin)
    return LogNumberColumn(name=name, mean=mean, deviation=deviation)


class _GrowingRows:
    """Rows that are appended; the arrays grow in place, because the system can move their pages without copying."""

    def __init__(self) -> None:
        self._arrays = _Rows(
            np.empty(0, np.int64), np.empty((0, len(NUMBERS)), np.int32), np.empty((0, len(TEXTS)), np.int64)
        )
        self._seeds = [seed_of(name) for name in TEXTS]
        self.rows = 0

    def append(self, batch: Any) -> None:
        """Append a record batch of Arrow."""
        end = self.rows + batch.num_rows
        if end > len(self._arrays.labels):
            self._resize(int(end * _GROWTH) + _BLOCK_ROWS)
        labels, numbers, keys = self._arrays.take(slice(self.rows, end))
        labels[:] = batch.column(0).to_numpy()
        for place in range(len(NUMBERS)):
            numbers[:, place] = batch.column(1 + place).fill_null(_MISSING).to_numpy()
        for place, seed in enumerate(self._seeds):
            keys[:, place] = _keys(batch.column(1 + len(NUMBERS) + place), seed)
        self.rows = end

    def finished(self) -> _Rows:
        """Return all rows; nothing can be appended after that."""
        self._resize(self.rows)
        return self._arrays

    def _resize(self, rows: int) -> None:
        for array in self._arrays:
            array.resize((rows, *array.shape[1:]), refcheck=False)  # no view of it is left


def _keys(texts: Any, seed: int) -> npt.NDArray[np.int64]:
    _, ends, content = texts.buffers()
    offsets = np.frombuffer(ends, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    text = np.frombuffer(content, np.uint8) if content else np.empty(0, np.uint8)
    return keys_of_bytes(text, offsets, seed).view(np.int64)


def _read(path: Path) -> _Rows:
    pa, csv = pyarrow_for(f"{path}: Criteo's files", "csv")
    types = [pa.int8(), *[pa.int32()] * len(NUMBERS), *[pa.binary()] * len(TEXTS)]
    settings = {
        "read_options": csv.ReadOptions(column_names=COLUMNS, block_size=_BLOCK_BYTES, use_threads=False),
        "parse_options": csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
        "convert_options": csv.ConvertOptions(column_types=dict(zip(COLUMNS, types, strict=True)), null_values=[""]),
    }
    found = _GrowingRows()
    try:
        with pa.input_stream(str(path), "gzip" if _is_zipped(path) else None) as content:
            for batch in csv.open_csv(content, **settings):
                _check_labels(batch.column(0), path, found.rows)
                found.append(batch)
    except pa.ArrowInvalid as error:
        raise BadData(f"{path}: {_malformed(path, found.rows) or error}") from None
    except (pa.ArrowException, OSError) as error:
        raise kind_of_failure(error)(f"{path}: cannot be read: {getattr(error, 'strerror', '') or error}") from error
    return found.finished()


def _check_labels(labels: Any, path: Path, rows: int) -> None:
    values = labels.fill_null(-1).to_numpy()
    if not ((values == 0) | (values == 1)).all():
        raise BadData(f"{path}: {_malformed(path, rows)}")


def _is_zipped(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC


def _malformed(path: Path, rows: int) -> str:
    """Describe the first malformed row, or return "": pyarrow's own messages depend on its version."""
    number = rows
    try:
        with gzip.open(path) if _is_zipped(path) else path.open("rb") as file:
            for number, line in enumerate(itertools.islice(file, rows, None), start=rows + 1):
                fault = _fault(number, line.rstrip(b"\r\n").split(b"\t"))
                if fault:
                    return fault
    except (OSError, EOFError, zlib.error):  # damaged compression after the part that pyarrow read
        return ""
    return "" if number else "has no rows"


def _fault(number: int, fields: list[bytes]) -> str:
    """Describe the first error of a row; "" if there is none."""
    if len(fields) != len(COLUMNS):
        return (
            f"row {number} has {len(fields)} fields; allowed: {len(COLUMNS)} with tabs between them, a label, "
            f"{len(NUMBERS)} whole numbers and {len(TEXTS)} texts"
        )
    for name, field in zip(COLUMNS, fields[: 1 + len(NUMBERS)], strict=False):
        allowed = _allowed(name, field)
        if allowed:
            found = shown_cell(field.decode(errors="replace"))
            return f"column {shown_cell(name)}, row {number}: found {found}; allowed: {allowed}"
    return ""


def _allowed(name: str, field: bytes) -> str:
    """Return the allowed values of a label or a number; "" if the field has one."""
    whole = _WHOLE.fullmatch(field)
    if name == LABEL:
        return "" if whole and int(field) in (0, 1) else "0 or 1"
    if not field or (whole and abs(int(field)) < -_MISSING):
        return ""
    return f"nothing, or a whole number from {_MISSING + 1} to {-_MISSING - 1}"
