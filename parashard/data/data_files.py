"""Data files by path, pattern or URL, and the rows of Parquet files.

Files in buckets are read by obstore, with the settings of `parashard.store.buckets`.
"""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parashard.data.arrays import AnyArray, check_digits, check_int64
from parashard.data.base import kind_of_failure
from parashard.data.options import is_index
from parashard.errors import BadData, ConfigurationError, StoreFailed, Unavailable, shown_names
from parashard.plan.embedding import Keys, as_numpys
from parashard.process.extras import pyarrow_for
from parashard.store.buckets import Bucket

REMOTE = ("az", "gs", "http", "https", "s3")
"""Supported schemes besides ``file``; a pattern needs a store that can be listed, which HTTP cannot."""


class DataFile(NamedTuple):
    """A file: `url` is the user's name for it, and `version` changes with its content."""

    open: Callable[[], Any]
    path: str
    url: str
    version: str


def data_files(urls: Sequence[str]) -> list[DataFile]:
    """Return the files that paths and URLs name; matches of a pattern (``*``, ``?``, ``[``, ``**``) sorted by name."""
    found = []
    for url in urls:
        scheme, separator, rest = url.partition("://")
        if separator and scheme in REMOTE:
            found += _in_bucket(url)
        elif not separator or scheme == "file":
            found += _on_disk(url, rest if separator else url)
        else:
            raise ConfigurationError(
                f"{url}: {scheme}:// is not read; allowed are paths, file://, "
                + ", ".join(f"{one}://" for one in REMOTE)
            )
    if not found:
        raise BadData(f"{', '.join(urls) or 'files'}: there is no such file")
    return found


def _is_pattern(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _on_disk(url: str, path: str) -> list[DataFile]:
    try:
        paths = sorted(glob.glob(path, recursive=True)) if _is_pattern(path) else [path]
        found = [(one, os.stat(one)) for one in paths]
    except OSError as error:
        raise kind_of_failure(error)(f"{url}: cannot be read: {error}") from None
    return [
        DataFile(partial(open, one, "rb"), one, url, f"{status.st_size} {status.st_mtime_ns} {status.st_ino}")
        for one, status in found
    ]


def _in_bucket(url: str) -> list[DataFile]:
    bucket = Bucket(url)
    path, client = bucket.folder, bucket.requests
    try:
        if _is_pattern(path):
            wanted = path.split("/")
            fixed = next(index for index, segment in enumerate(wanted) if _is_pattern(segment))
            listed = bucket.call("be listed", _listed, client, "/".join(wanted[:fixed]))
            entries = [entry for entry in listed if _matches(entry["path"].split("/"), wanted)]
        else:
            entries = [bucket.call("be read", client.head, path)]
    except StoreFailed as error:
        raise _kind(error)(error.message) from None
    return [
        DataFile(
            partial(_RemoteFile, bucket, entry["path"], int(entry["size"])),
            entry["path"],
            url,
            f"{entry['size']} {entry['e_tag']} {entry['last_modified'].isoformat()}",
        )
        for entry in sorted(entries, key=lambda entry: str(entry["path"]))
    ]


def _listed(client: Any, folder: str) -> list[Any]:
    """Return all objects below a folder."""
    return [entry for some in client.list(folder or None) for entry in some]


def _matches(segments: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether a path matches a pattern; ``**`` stands for any number of segments."""
    if not wanted:
        return not segments
    if wanted[0] == "**":
        return any(_matches(segments[index:], wanted[1:]) for index in range(len(segments) + 1))
    return bool(segments) and fnmatchcase(segments[0], wanted[0]) and _matches(segments[1:], wanted[1:])


def _kind(error: StoreFailed) -> type[BadData | Unavailable]:
    """Return the error class of a failed request: BadData if the user must fix it, else Unavailable."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    to_fix = (FileNotFoundError, PermissionDeniedError, UnauthenticatedError)
    return BadData if isinstance(error.__cause__, to_fix) else Unavailable


class _RemoteFile(io.RawIOBase):
    """A seekable file over a stored object, for pyarrow; each read is one range request."""

    def __init__(self, bucket: Bucket, path: str, size: int) -> None:
        self._bucket, self._path, self._size, self._at = bucket, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._size)
        if end <= self._at:
            return 0
        try:
            got = self._bucket.call("be read", self._bucket.requests.get_range, self._path, start=self._at, end=end)
        except StoreFailed as error:
            raise _kind(error)(error.message) from None
        view[: len(got)] = memoryview(got)
        self._at += len(got)
        return len(got)


# --- rows of Parquet files ---

ROWS_AT_ONCE = 1 << 16


def read_rows(
    files: Sequence[DataFile], wanted: Sequence[str] | None, targets: Sequence[str] = ()
) -> Iterator[dict[str, AnyArray]]:
    """Yield the wanted columns (None: all) in batches of rows, in the order of the files."""
    # Whole numbers and booleans are int64, others float32; a column of lists has one more axis.
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
