"""Tables in Apache Parquet, read with pyarrow (the extra `parquet`), which is imported only when such data is opened.

Owns the mapping of Arrow's types to columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from parashard.data.arrays import ArraySource, is_rounded
from parashard.data.base import kind_of_failure
from parashard.data.columns import Column, ColumnTable, Lists, Numbers, Words, as_words, digits_lost, shown_cell
from parashard.data.keyed import keyed_names
from parashard.data.options import ParquetOptions
from parashard.data.tabular import table_source
from parashard.errors import BadData, shown_names
from parashard.process.extras import pyarrow_for

_CATEGORY = "categorical"
_WHOLE_FLOATS = 2.0**53  # each whole number up to it is a float64


def open_parquet(options: ParquetOptions) -> ArraySource:
    """Read one or two files; BadData names the file and the error; ConfigurationError: pyarrow is not installed."""
    keys = {*keyed_names(options), *options.categorical}
    training = read_parquet(options.path, lambda name: not options.leaves_out(name), keys)
    held_out = None
    if options.held_out_path is not None:
        used = {name for name in training.columns if not options.leaves_out(name)}
        held_out = read_parquet(options.held_out_path, lambda name: name in used, keys)
    return table_source(options, training, held_out)


def read_what_can_be(path: Path) -> tuple[ColumnTable, dict[str, str]]:
    """Return a file's columns, and by name why some cannot be read: those have no values."""
    refused: dict[str, str] = {}
    return read_parquet(path, lambda name: True, (), refused), refused


def read_parquet(
    path: Path, is_used: Callable[[str], bool], keys: Collection[str], refused: dict[str, str] | None = None
) -> ColumnTable:
    """Return a file's columns; those that are not used may be of any type, and have no values."""
    # Whole numbers in columns of `keys`, which become keys or categories, are texts, which have all their digits.
    pa, parquet = pyarrow_for(f"{path}: Parquet files", "parquet")
    try:
        with parquet.ParquetFile(path) as file:  # this file alone: `read_table` would take a folder of them too
            table = file.read()
        index, categories = _of_pandas(table)
        columns = _columns(pa, table, path, is_used, {*keys, *categories}, refused)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # Arrow decodes text only as it is taken out
        raise kind_of_failure(error)(f"{path}: cannot be read as Parquet: {error}") from error
    for name in categories:
        if isinstance(columns[name], Numbers):
            columns[name] = as_words(columns[name])
    return ColumnTable(path, columns, pandas_index=index, categories=categories)


def _of_pandas(table: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that were the index of a table of pandas, and those that were categories."""
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
    """Return the columns that are used; one that cannot be is an error, unless it can be said in `refused`."""
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
    """Return an Arrow array as a column, without values where its type is null; BadData for types that are neither."""
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
    """Refuse whole numbers that are not in float64, in a column that is used as numbers or as the label."""
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
    """Return lists as a column of texts, without values where an item is null."""
    items = array.flatten()  # without what is beneath a null
    column = _column(pa, _digits(pa, items, origin, is_key=True), f"{origin}: items of its lists")
    if isinstance(column, Lists):
        raise BadData(f"{origin}: must hold lists of numbers, booleans or text, found the type {array.type}")
    texts = as_words(column)
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    there = texts.codes >= 0
    before = np.concatenate(([0], np.cumsum(there)))
    return Lists(texts.codes[there], before[np.concatenate(([0], np.cumsum(lengths)))], texts.vocabulary)


def _digits(pa: Any, array: Any, origin: str, *, is_key: bool) -> Any:
    """Return whole numbers that are keys as texts: as float64 long ones would lose their last digits."""
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
