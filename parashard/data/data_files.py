"""Files of data by paths, patterns and URLs, each with what opens it.

Owns which URLs name data and how a pattern is matched. Files in buckets are read by obstore, with the settings of
`parashard.store.buckets`.
"""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from parashard.data.base import kind_of_failure
from parashard.errors import BadData, ConfigurationError, StoreFailed, Unavailable
from parashard.store.buckets import Bucket

REMOTE = ("az", "gs", "http", "https", "s3")
"""The schemes that are read besides ``file``; a pattern takes a store that can be listed, which http has not."""


class DataFile(NamedTuple):
    """A file; `url` is what the user named it by, and `version` changes with its content."""

    open: Callable[[], Any]
    path: str
    url: str
    version: str


def data_files(urls: Sequence[str]) -> list[DataFile]:
    """Return the files that paths and URLs name; those of a pattern (``*``, ``?``, ``[``, ``**``) by their names."""
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
    """Return whether a path is of a pattern; ``**`` stands for any number of segments."""
    if not wanted:
        return not segments
    if wanted[0] == "**":
        return any(_matches(segments[index:], wanted[1:]) for index in range(len(segments) + 1))
    return bool(segments) and fnmatchcase(segments[0], wanted[0]) and _matches(segments[1:], wanted[1:])


def _kind(error: StoreFailed) -> type[BadData | Unavailable]:
    """Return the error class of a failed request: what to fix, or a server that fails at present."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    to_fix = (FileNotFoundError, PermissionDeniedError, UnauthenticatedError)
    return BadData if isinstance(error.__cause__, to_fix) else Unavailable


class _RemoteFile(io.RawIOBase):
    """An object as a file, in the form that pyarrow reads: each read is one request for a range."""

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
