"""A store in a bucket, over fsspec.

Owns the implementation of the `Store` contract by fsspec's calls, their deadlines, and the one place where errors of
the libraries below (fsspec, botocore, aiohttp, google-auth) are mapped to ours. Does not know what is stored. Opened by
`parashard.store.open_store`.

What ``pipe_file(mode="create")`` does, read in the sources of s3fs 2026.9, gcsfs 2026.10 and fsspec 2026.9:

- s3fs: under 100 MiB one PUT with ``If-None-Match: *``; from there on a multipart upload in parts of 50 MiB, with the
  same condition on the request that completes it. Either way the create is atomic and exclusive.
- gcsfs: under 50 MiB one upload with ``ifGenerationMatch=0``, from there on a resumable upload that was begun with it.
  It has no test of this and says so; we have none either.
- memory: check, then store; not thread-safe, which is enough for tests.

So large contents are created conditionally too. Three caveats. An S3-compatible server may ignore the condition
(`parashard.store.claims` checks). s3fs and botocore retry a request whose reply was lost, and the second may find the
first one's content: after `AlreadyStored` the content may be one's own; read it to find out. And an interrupted upload
leaves parts that no listing shows; a lifecycle rule of the bucket should delete them after a day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import fsspec
import tenacity

from parashard.errors import AlreadyStored, ConfigurationError, NotStored, StoreFailed
from parashard.process.extras import install
from parashard.store.base import checked_folder, checked_name, is_segment

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
REQUEST_ATTEMPTS_MAX = 3
CALL_DEADLINE_S = 300.0
"""Deadline of one call, its retries included: long enough for 256 MiB at 1 MiB/s."""

CREATE_ATTEMPTS_MAX = 5

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
_EXTRAS = {"s3": "s3", "gs": "gcs"}

_Returned = TypeVar("_Returned")


class ObjectStore:
    """Keep contents as objects below a URL, such as ``s3://BUCKET/FOLDER``; the bucket must exist.

    Credentials, region and endpoint come from the provider's usual places (for S3 the environment, such as
    ``AWS_ENDPOINT_URL``, and ``~/.aws``). Safe to use from many threads.

    Raises
    ------
    ConfigurationError
        If the URL names no bucket, or the package for its scheme is not installed.
    """

    def __init__(self, url: str) -> None:
        scheme, _, root = url.partition("://")
        self._root = root.strip("/")
        if not self._root:
            raise ConfigurationError(f"{url}: names no bucket: {scheme}://BUCKET/FOLDER")
        self._url = f"{scheme}://{self._root}"
        try:
            self._files = fsspec.filesystem(scheme, **_options(scheme))
        except ImportError as error:
            raise ConfigurationError(
                f"{url}: {_PACKAGES[scheme]} is not installed: {install(_EXTRAS[scheme])}"
            ) from error
        # fsspec's asynchronous file systems accept a deadline with every call; others would mistake it for an option.
        self._deadline = {"timeout": CALL_DEADLINE_S} if self._files.async_impl else {}

    @property
    def url(self) -> str:
        """The URL, without a slash at its end."""
        return self._url

    def create(self, name: str, content: bytes | memoryview) -> None:
        """Upload the content if the name does not exist; see `Store.create` and above."""
        path = self._path(name)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_conflict),
            stop=tenacity.stop_after_attempt(CREATE_ATTEMPTS_MAX),
            wait=tenacity.wait_random_exponential(0.1, max=2.0),
            reraise=True,
        )
        try:
            retrying(self._call, f"create {name}", self._files.pipe_file, path, bytes(content), mode="create")
        except StoreFailed as error:
            if isinstance(error.__cause__, FileExistsError) or _codes(error) & {"PreconditionFailed", "412"}:
                raise AlreadyStored(f"{self.url}: {name} is stored already") from None
            raise

    def replace(self, name: str, content: bytes | memoryview) -> None:
        """Upload the content; see `Store.replace`."""
        self._call(f"replace {name}", self._files.pipe_file, self._path(name), bytes(content))

    def read(self, name: str, size_max: int) -> bytes:
        """Download the content; see `Store.read`.

        Requests at most `size_max` + 1 bytes, because the content may be replaced after its size was read; in one
        request, so that they are all of one content.
        """
        size = self.size(name)
        if size > size_max:
            raise StoreFailed(f"{self.url}: {name} has {size} bytes, allowed are {size_max}")
        if size == 0:  # servers refuse a range of an empty object
            return b""
        content = self._find(name, "read", self._files.cat_file, start=0, end=size_max + 1)
        if len(content) > size_max:
            raise StoreFailed(f"{self.url}: {name} has more than {size_max} bytes, which are allowed")
        return bytes(content)

    def size(self, name: str) -> int:
        """Return the object's size; see `Store.size`."""
        found = self._find(name, "look up", self._files.info)
        if found["type"] != "file":
            raise self._not_stored(name)
        return int(found["size"])

    def names(self, folder: str) -> list[str]:
        """List the objects; see `Store.names`."""
        return sorted(self._entries(folder, "file"))

    def folders(self, folder: str) -> list[str]:
        """List the common prefixes; see `Store.folders`."""
        return sorted(self._entries(folder, "directory"))

    def delete(self, name: str) -> None:
        """Delete the object; see `Store.delete`. Folders exist only as prefixes of names."""
        with suppress(NotStored):
            self._find(name, "delete", self._files.rm_file)

    def local_path(self, name: str) -> None:
        """Return None: the objects are elsewhere."""
        checked_name(name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked_name(name)}"

    def _entries(self, folder: str, kind: str) -> Iterator[str]:
        path = f"{self._root}/{checked_folder(folder)}".rstrip("/")
        try:
            found = self._call(f"list {folder or 'the store'}", self._files.ls, path, detail=True)
        except StoreFailed as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return
            raise
        for entry in found:
            parent, _, last = entry["name"].strip("/").rpartition("/")
            # Listing the name of an object returns the object itself.
            if entry["type"] == kind and parent == path and is_segment(last):
                yield last

    def _find(self, name: str, doing: str, call: Callable[..., _Returned], **options: Any) -> _Returned:
        """Call for one name; raise `NotStored` if it does not exist."""
        try:
            return self._call(f"{doing} {name}", call, self._path(name), **options)
        except StoreFailed as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise self._not_stored(name) from None
            raise

    def _not_stored(self, name: str) -> NotStored:
        return NotStored(f"{self.url}: {name} is not stored")

    def _call(self, doing: str, call: Callable[..., _Returned], *arguments: Any, **options: Any) -> _Returned:
        """Call the library; raise its errors as `StoreFailed`, with the place and the cause."""
        try:
            return call(*arguments, **options, **self._deadline)
        except Exception as error:  # the libraries below have error classes without a common base
            cause = str(error) or type(error).__name__
            raise StoreFailed(f"{self.url}: cannot {doing}: {cause}") from error


def _options(scheme: str) -> dict[str, Any]:
    """Return the file system's options: no caches (other processes write too), and a deadline for every wait."""
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "s3":
        options["config_kwargs"] = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "retries": {"total_max_attempts": REQUEST_ATTEMPTS_MAX, "mode": "standard"},
        }
    return options


def _codes(error: BaseException) -> set[str]:
    """Return the S3 error codes of an error and its causes; servers differ in how much of them s3fs understands."""
    codes = set()
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            codes.add(str(response.get("Error", {}).get("Code", "")))
        cause = cause.__cause__
    return codes


def _is_conflict(error: BaseException) -> bool:
    """Return whether S3 asks to retry a conditional create because of a concurrent request for the name."""
    return bool(_codes(error) & {"ConditionalRequestConflict", "409"})
