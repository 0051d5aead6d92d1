"""A store in a bucket.

Owns the implementation of the `Store` contract by obstore's calls. Opened by `parashard.store.open_store`.

A create is one PUT with a condition, whatever its size: ``If-None-Match: *`` on S3 and Azure, and
``x-goog-if-generation-match: 0`` on Google Cloud Storage. Three caveats. An S3-compatible server may ignore the
condition (`parashard.store.claims` checks). A request whose reply was lost is retried, and the retry may find the first
one's content: after `AlreadyStored` the content may be one's own; read it to find out. And `replace` uploads large
content in parts; those of an interrupted upload are in no listing, and a lifecycle rule of the bucket should delete
them after a day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import tenacity

from parashard.errors import AlreadyStored, NotStored, StoreFailed
from parashard.store.base import checked_folder, checked_name, is_segment
from parashard.store.buckets import Bucket

if TYPE_CHECKING:
    from obstore import ListResult

CREATE_ATTEMPTS_MAX = 5
SMALL_BYTES = 16 << 20
"""Content of up to this size is uploaded within the time limit of other requests."""
PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4

_Returned = TypeVar("_Returned")


class ObjectStore:
    """Keep contents as objects below a URL, such as ``s3://BUCKET/FOLDER``; the bucket must exist.

    Credentials, region and endpoint come from the provider's usual variables in the environment; those of S3 also from
    ``~/.aws``. Safe to use from many threads.
    """

    def __init__(self, url: str) -> None:
        self._bucket = Bucket(url)

    @property
    def url(self) -> str:
        """The URL, without a slash at its end."""
        return self._bucket.url

    def create(self, name: str, content: bytes | memoryview) -> None:
        """Upload the content if the name does not exist; see `Store.create` and above."""
        path, view = self._path(name), memoryview(content).cast("B")
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda settled: not settled),
            stop=tenacity.stop_after_attempt(CREATE_ATTEMPTS_MAX),
            wait=tenacity.wait_random_exponential(0.1, max=2.0),
        )
        try:
            retrying(self._create, name, path, view)
        except tenacity.RetryError:
            raise StoreFailed(f"{self.url}: cannot create {name}: other requests for it are under way") from None

    def _create(self, name: str, path: str, view: memoryview) -> bool:
        """Return whether it was created; False: another request for the name was in progress, and it has no content."""
        from obstore.exceptions import AlreadyExistsError

        client = self._bucket.uploads if view.nbytes > SMALL_BYTES else self._bucket.requests
        try:
            self._bucket.call(f"create {name}", client.put, path, view, mode="create")
        except StoreFailed as error:
            if not isinstance(error.__cause__, AlreadyExistsError):
                raise
            with suppress(NotStored):  # S3 answers the same to a request concurrent with another, which may then fail
                self.size(name)
                raise AlreadyStored(f"{self.url}: {name} is stored already") from None
            return False
        return True

    def replace(self, name: str, content: bytes | memoryview) -> None:
        """Upload the content; see `Store.replace`."""
        path, view = self._path(name), memoryview(content).cast("B")
        put = self._bucket.requests.put
        self._bucket.call(f"replace {name}", put, path, view, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def read(self, name: str, size_max: int) -> bytes:
        """Download the content in one request, so that its size and all bytes are of one content; see `Store.read`."""
        path = self._path(name)

        def get() -> bytes | int:
            found = self._bucket.requests.get(path)  # the answer's headers; its bytes are not here yet
            size = int(found.meta["size"])
            return bytes(found.bytes()) if size <= size_max else size

        content = self._find(name, "read", get)
        if isinstance(content, int):
            raise StoreFailed(f"{self.url}: {name} has {content} bytes, allowed are {size_max}")
        return content

    def size(self, name: str) -> int:
        """Return the object's size; see `Store.size`."""
        return int(self._find(name, "look up", self._bucket.requests.head, self._path(name))["size"])

    def names(self, folder: str) -> list[str]:
        """List the objects; see `Store.names`."""
        return _last_segments(entry["path"] for entry in self._list(folder)["objects"])

    def folders(self, folder: str) -> list[str]:
        """List the common prefixes; see `Store.folders`."""
        return _last_segments(self._list(folder)["common_prefixes"])

    def delete(self, name: str) -> None:
        """Delete the object; see `Store.delete`. Folders exist only as prefixes of names."""
        with suppress(NotStored):
            self._find(name, "delete", self._bucket.requests.delete, self._path(name))

    def local_path(self, name: str) -> None:
        """Return None: the objects are elsewhere."""
        checked_name(name)

    def _path(self, name: str) -> str:
        return f"{self._bucket.folder}/{checked_name(name)}".lstrip("/")

    def _list(self, folder: str) -> ListResult[Any]:
        path = f"{self._bucket.folder}/{checked_folder(folder)}".strip("/")
        doing = f"list {folder or 'the store'}"
        found: ListResult[Any] = self._bucket.call(doing, self._bucket.requests.list_with_delimiter, path)
        return found

    def _find(self, name: str, doing: str, call: Callable[..., _Returned], *arguments: Any) -> _Returned:
        """Call for one name; raise `NotStored` if it does not exist."""
        try:
            return self._bucket.call(f"{doing} {name}", call, *arguments)
        except StoreFailed as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise NotStored(f"{self.url}: {name} is not stored") from None
            raise


def _last_segments(paths: Iterable[str]) -> list[str]:
    """Return the last segments of paths that are names of ours, sorted."""
    return sorted(last for last in (path.rpartition("/")[2] for path in paths) if is_segment(last))
