"""Rows of Parquet files as arrays, some at a time: columns of numbers, and of lists of one length.

Owns which types of columns are arrays. pyarrow (the extra `parquet`) is imported when rows are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parashard.data.arrays import AnyArray, check_digits, check_int64
from parashard.data.base import kind_of_failure
from parashard.data.data_files import DataFile
from parashard.data.options import is_index
from parashard.errors import BadData, shown_names
from parashard.plan.embedding import Keys, as_numpys
from parashard.process.extras import pyarrow_for

ROWS_AT_ONCE = 1 << 16


def read_rows(
    files: Sequence[DataFile], wanted: Sequence[str] | None, targets: Sequence[str] = ()
) -> Iterator[dict[str, AnyArray]]:
    """Yield the columns of some rows at a time, in the order of the files; None: all columns.

    Whole numbers and booleans are int64, others float32; a column of lists has one more axis.
    """
    pa, parquet = pyarrow_for(f"{files[0].url}: Parquet files", "parquet")
    due: dict[str, tuple[Any, ...]] = {}
    for file in files:
        row = 0
        try:
            with file.open() as content, parquet.ParquetFile(content) as table:
                known = table.schema_arrow.names
                names = list(wanted) if wanted is not None else known
                index = [name for name in names if wanted is None and is_index(name)]
                if index:
                    raise BadData(
                        f"{file.path}: column {index[0]!r} is an index that pandas wrote, and its order may tell the "
                        "target: name the columns, inputs=[...]"
                    )
                absent = [name for name in names if name not in known]
                if absent:
                    raise BadData(f"{file.path}: has no column {absent[0]!r}; its columns: {shown_names(known)}")
                for batch in table.iter_batches(ROWS_AT_ONCE, columns=names):
                    if not batch.num_rows:
                        continue
                    columns = {
                        name: _array(
                            pa, batch.column(name), f"{file.path}: column {name!r}", row, rounds=name in targets
                        )
                        for name in names
                    }
                    row += batch.num_rows
                    _check_form(columns, due, file.path)
                    yield columns
        except (pa.ArrowException, OSError) as error:
            raise kind_of_failure(error)(f"{file.path}: cannot be read as Parquet: {error}") from error


def _check_form(columns: dict[str, AnyArray], due: dict[str, tuple[Any, ...]], path: str) -> None:
    for name, array in columns.items():
        form = array.shape[1:], array.dtype
        if due.setdefault(name, form) != form:
            raise BadData(f"{path}: column {name!r} is {form[1]} {form[0]}, and {due[name][1]} {due[name][0]} before")


def _array(pa: Any, column: Any, origin: str, row: int, *, rounds: bool) -> AnyArray:
    types, kind = pa.types, column.type
    if column.null_count:
        at = row + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise BadData(f"{origin}: row {at} has no value")
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if lengths.min() != lengths.max():
            raise BadData(f"{origin}: its lists have {lengths.min()} to {lengths.max()} items; allowed is one length")
        items = _array(pa, column.flatten(), f"{origin}: its lists, item by item", row * int(lengths[0]), rounds=rounds)
        return items.reshape(len(column), int(lengths[0]), *items.shape[1:])
    if types.is_boolean(kind):
        column, kind = column.cast(pa.int8()), pa.int8()
    if types.is_integer(kind) or types.is_floating(kind):
        values: AnyArray = column.to_numpy(zero_copy_only=False)
        check_int64(values, origin)
        if values.dtype.kind == "f" and not rounds:
            check_digits(values, origin)
        array = values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BadData(f"{origin}: row {row + int(np.argmin(np.isfinite(array)))} is not finite")
        return array
    raise BadData(f"{origin}: is {kind}; allowed are numbers, booleans, and lists of these of one length")


def write_rows(path: Path, pieces: Iterable[tuple[Keys, NDArray[Any]]]) -> int:
    """Write keys (uint64) and rows (fixed-size lists of float32, or float16 where that is kept); return how many."""
    pa, parquet = pyarrow_for(f"{path.suffix} files", "parquet")
    writer, count = None, 0
    try:
        for keys, kept in pieces:
            rows = as_numpys(kept)
            lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
            piece = pa.table({"key": pa.array(keys), "row": lists})
            writer = writer or parquet.ParquetWriter(path, piece.schema)
            writer.write_table(piece)
            count += len(keys)
    finally:
        if writer is not None:
            writer.close()
    return count
