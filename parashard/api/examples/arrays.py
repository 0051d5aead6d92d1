"""Arrays as examples: in memory or memory-mapped, alone or in dicts, tuples and lists."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parashard.data.arrays import AnyArray, check_digits, check_int64, fingerprint
from parashard.data.base import Examples, Field, Indices
from parashard.data.labels import check_rounding
from parashard.data.options import is_index
from parashard.data.tree import Tree, leaves, map_leaves
from parashard.errors import BadData

SAMPLED_ROWS = 1000
"""Rows of a memory-mapped array that its fingerprint covers: reading all of it may take minutes."""
NAMED_MAX = 8  # arrays listed in one error


class ArrayExamples:
    """Examples in arrays with equally many rows; `()` for no targets; memory-mapped files stay mapped."""

    batched = varying = False  # an index is one example, and all have the same shapes
    drop_last = False  # whether a shorter last batch is dropped
    batch_size: int | None = None  # the data's own, such as a DataLoader's

    def __init__(self, inputs: Tree, targets: Tree = (), weights: AnyArray | None = None) -> None:
        self._parts = (inputs, targets) if weights is None else (inputs, targets, weights)
        self._length = len(leaves(inputs)[0][1])

    def __len__(self) -> int:
        return self._length

    @property
    def are_mapped(self) -> bool:
        """Whether some arrays are read from files on access."""
        return any(isinstance(array, np.memmap) for _, array in leaves(self._parts))

    @property
    def targets(self) -> Tree:
        """The targets of all examples."""
        return self._parts[1]

    def take(self, indices: Indices, seed: int) -> Examples:
        """Return the examples with these indices, as new arrays."""
        taken: Examples = map_leaves(lambda array: _taken(array, indices), self._parts)
        return taken

    def fields(self) -> tuple[Field, ...]:
        """Return the arrays of an example."""
        named = dict(zip(("inputs", "targets", "weights"), self._parts, strict=False))
        return tuple(Field(name, array.shape[1:], str(allowed(array.dtype))) for name, array in leaves(named))

    def fingerprint(self) -> str:
        """Return a digest of the content; it covers only sampled rows of memory-mapped arrays."""
        content = []
        for _, array in leaves(self._parts):
            rows = spread(len(array), SAMPLED_ROWS) if isinstance(array, np.memmap) else None
            content.append(array if rows is None else _taken(array, rows))
        return fingerprint(content, f"script {len(self)} {self.fields()}")


def arrays_of(data: Sequence[Any], what: str) -> ArrayExamples:
    """Return the examples of (inputs, targets) or (inputs, targets, weights); raise BadData for anything else."""
    inputs = tree_of(data[0], f"{what}: inputs")
    targets = tree_of(data[1], f"{what}: targets", targets_array)
    named = [*leaves(inputs, "inputs"), *leaves(targets, "targets")]
    rows = len(named[0][1])
    if any(len(array) != rows for _, array in named):
        hint = "; due is one of each for every example"
        if isinstance(inputs, tuple | list):
            hint = "; a tuple or list of arrays is several inputs: numpy.stack makes one array of it"
        raise BadData(f"{what}: {' and '.join(f'{len(array):,} {name}' for name, array in named[:NAMED_MAX])}{hint}")
    return ArrayExamples(
        inputs,
        map_leaves(lambda array: array.astype(np.int64) if array.dtype == np.uint8 else array, targets),
        _weights(data[2], rows, what) if len(data) > 2 else None,
    )


def _weights(given: Any, rows: int, what: str) -> AnyArray:
    weights = rows_array(given, f"{what}: weights")
    if weights.shape != (rows,):
        raise BadData(f"{what}: weights are one number for each of {rows:,} examples, found shape {weights.shape}")
    return weights.astype(np.float32)


def tree_of(values: Any, what: str, leaf: Callable[[Any, str], AnyArray] | None = None) -> Tree:
    """Convert nested values to arrays with the same structure; `leaf` converts each (default: `inputs_array`)."""
    if isinstance(values, Mapping):
        for key in values:
            if not isinstance(key, str) or not key or "/" in key:
                raise BadData(f"{what}: a dict's keys are names without '/', found {key!r}")
        if not values:
            raise BadData(f"{what} have no arrays")
        return {key: tree_of(below, f"{what}/{key}", leaf) for key, below in values.items()}
    if isinstance(values, tuple | list) and any(map(_is_several, values)):
        made = [tree_of(below, f"{what}/{place}", leaf) for place, below in enumerate(values)]
        if isinstance(values, list):
            return made
        return type(values)(*made) if hasattr(values, "_fields") else tuple(made)
    return (leaf or inputs_array)(values, what)


def inputs_array(values: Any, what: str) -> AnyArray:
    """Return inputs as `rows_array` does; raise BadData for ids that would lose digits (in a file: sampled rows)."""
    given = numbers_of(values, what)
    if given.dtype.kind == "f" and given.ndim:
        check_digits(given[spread(len(given), SAMPLED_ROWS)] if isinstance(given, np.memmap) else given, what)
    return rows_array(given, what)


def targets_array(values: Any, what: str) -> AnyArray:
    """Return targets as `rows_array` does; raise BadData for values that float32 cannot distinguish."""
    given = numbers_of(values, what)
    if given.ndim and not isinstance(given, np.memmap):
        check_rounding(given, what)
    return rows_array(given, what)


def rows_array(values: Any, what: str) -> AnyArray:
    """Return an array of numbers with one row per example; a new array only if it had to be converted."""
    array = numbers_of(values, what)
    if array.ndim < 1:
        raise BadData(f"{what} must be an array of numbers with one axis for the examples, found {_kind(array)}")
    if isinstance(array, np.memmap):
        return array
    with np.errstate(over="ignore"):  # values that become infinite are refused below
        converted = np.ascontiguousarray(array, allowed(array.dtype))
    if converted.dtype.kind == "f" and not np.isfinite(converted).all():
        first = int(np.argmin(np.isfinite(converted).reshape(len(converted), -1).all(axis=1)))
        found = "too large for float32" if np.isfinite(array[first]).all() else "not finite"
        raise BadData(f"{what}: example {first} has a value that is {found}")
    return converted


def handed_out(array: AnyArray) -> AnyArray:
    """Return an array in the type that models receive."""
    return array.astype(allowed(array.dtype), copy=False)


def numbers_of(values: Any, what: str) -> AnyArray:
    """Return an array of numbers of any shape and unchanged type; memory-mapped arrays stay mapped."""
    if isinstance(values, np.memmap):
        array: AnyArray = values
    else:
        if hasattr(values, "detach"):  # a PyTorch tensor on any device
            values = _of_tensor(values, what)
        pandas = sys.modules.get("pandas")
        if pandas is not None and isinstance(values, pandas.DataFrame | pandas.Series):
            values = columns_array(pandas, values, what)
        if isinstance(values, np.ma.MaskedArray):
            raise BadData(f"{what} are a masked array, and a mask would be lost: .filled(value) says what is there")
        try:
            array = np.asarray(values)
        except (TypeError, ValueError) as error:  # rows of several lengths; keys of JAX
            raise BadData(f"{what} are no array: {error}") from None
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":  # of JAX
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf":
        raise BadData(f"{what} {_why_no_numbers(array)}")
    if not isinstance(array, np.memmap):  # rows of a mapped array are checked when they are read
        check_int64(array, what)
    return array


@functools.cache
def allowed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type that models receive for a type: float32, int64, uint8 or bool."""
    if dtype.kind == "f":
        return np.dtype(np.float32)
    return dtype if dtype in (np.uint8, np.bool_) else np.dtype(np.int64)


def spread(length: int, most: int) -> Indices:
    """Return at most `most` evenly spaced indices below a length, including the first and the last."""
    return np.unique(np.linspace(0, max(0, length - 1), min(length, most)).astype(np.int64))


def _taken(array: AnyArray, indices: Indices) -> AnyArray:
    if isinstance(array, np.memmap):  # `take` would read all of a non-contiguous array
        rows = np.asarray(array[indices])
        check_int64(rows, str(array.filename))
        return rows.astype(allowed(array.dtype), copy=False)
    return array.take(indices, axis=0)


def _of_tensor(tensor: Any, what: str) -> Any:
    """Return a PyTorch tensor as a NumPy array; 16-bit floating-point types become float32."""
    try:
        values = tensor.detach().cpu()
        half = values.is_floating_point() and values.element_size() < 4
        return (values.float() if half else values).numpy()
    except (RuntimeError, TypeError, NotImplementedError):
        layout = str(getattr(tensor, "layout", "")).removeprefix("torch.")
        dense = "; .to_dense() makes numbers of each" if "sparse" in layout else ""
        raise BadData(f"{what} are a tensor that is no array in memory: {layout} on {tensor.device}{dense}") from None


def _why_no_numbers(array: AnyArray) -> str:
    """Return an error message for an array that is not numeric, with a remedy."""
    if array.dtype.kind in "SU":
        return "are text, and due are numbers: np.unique(names, return_inverse=True)[1] numbers classes"
    if array.dtype.kind == "c":
        return f"are {array.dtype}, and due are real numbers: np.stack([x.real, x.imag], -1) has both parts"
    if array.dtype.kind in "mM":
        return f"are {array.dtype}, and due are numbers: such as (x - x.min()) / np.timedelta64(1, 'D')"
    if array.dtype.names:
        names = ", ".join(array.dtype.names)
        return f"have the fields {names}, and due are numbers: {{name: x[name] for name in x.dtype.names}} is a dict"
    return f"must be an array of numbers with one axis for the examples, found {_kind(array)}"


def _is_several(value: Any) -> bool:
    """Tell whether a list with this item is several arrays, not one."""
    if isinstance(value, tuple | list):
        return any(map(_is_several, value))
    return isinstance(value, Mapping) or len(getattr(value, "shape", ())) > 0


def _kind(array: AnyArray) -> str:
    return f"{array.dtype} of shape {array.shape[1:]}" if array.ndim else f"one {array.dtype}"


def columns_array(pandas: Any, given: Any, what: str) -> AnyArray:
    """Return a Series or DataFrame as bool, int64 or float32; raise BadData for a column that is not numeric."""
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
    """Return a type that represents a column without loss."""
    if types.is_unsigned_integer_dtype(column.dtype):
        return np.uint64
    return np.float64 if types.is_float_dtype(column.dtype) else np.int64
