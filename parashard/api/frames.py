"""Columns of pandas as arrays of numbers.

Owns which types of columns are numbers. Imports no pandas: a script that has a table has it. Called by
`parashard.api.arrays` and `parashard.api.examples`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from parashard.data.arrays import AnyArray, check_digits, check_int64
from parashard.data.options import is_index
from parashard.errors import BadData


def is_frame(data: Any) -> bool:
    """Tell whether something is a table of pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, pandas.DataFrame)


def columns_array(pandas: Any, given: Any, what: str) -> AnyArray:
    """Return a Series as one axis and a DataFrame as two: bool, int64 for whole numbers, or float32.

    Raises BadData if a column has no numbers, or lacks one; it is named.
    """
    types = pandas.api.types
    is_table = isinstance(given, pandas.DataFrame)
    columns = [(name, given[name]) for name in given.columns] if is_table else [(given.name, given)]
    if not columns:
        raise BadData(f"{what} have no columns")
    if is_table and not given.columns.is_unique:
        raise BadData(f"{what}: column names must differ, found {list(given.columns)}")
    for name, column in columns:
        if is_table and is_index(str(name)):
            raise BadData(
                f"{what}: column {name!r} is an index that pandas wrote into a file, whose order may tell the target: "
                "read_csv(..., index_col=0) reads it as one, or rename the column to use it"
            )
        if not types.is_numeric_dtype(column.dtype) or types.is_complex_dtype(column.dtype):  # booleans are numeric
            raise BadData(
                f"{what}: column {name!r} is {column.dtype}; allowed are numbers and booleans: leave it out, or make "
                "numbers of it, such as by pandas.get_dummies or .cat.codes"
            )
        if column.isna().any():
            raise BadData(f"{what}: column {name!r} has no value in row {column.isna().idxmax()!r}")
    whole = all(types.is_integer_dtype(column.dtype) or types.is_bool_dtype(column.dtype) for _, column in columns)
    for name, column in columns:
        numbers = column.to_numpy(dtype=_dtype_of(types, column))
        if whole:
            check_int64(numbers, f"{what}: column {name!r}")
        else:
            check_digits(numbers, f"{what}: column {name!r}")
    if all(types.is_bool_dtype(column.dtype) for _, column in columns):
        dtype: type = np.bool_
    else:
        dtype = np.int64 if whole else np.float32
    array: AnyArray = given.to_numpy(dtype=dtype)
    return array


def _dtype_of(types: Any, column: Any) -> type[np.generic]:
    """Return a type that has all digits of a column."""
    if types.is_unsigned_integer_dtype(column.dtype):
        return np.uint64
    return np.float64 if types.is_float_dtype(column.dtype) else np.int64
