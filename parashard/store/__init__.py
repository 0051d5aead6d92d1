"""The checkpoint store: named contents, created atomically, durably and at most once.

Does not know what is stored.
"""

from parashard.errors import ConfigurationError
from parashard.store.base import Store
from parashard.store.local import LocalStore
from parashard.store.remote import ObjectStore

__all__ = ["CREATE_IS_CONDITIONAL", "Store", "open_store"]

CREATE_IS_CONDITIONAL = ("az", "gs", "memory", "s3")
"""The schemes whose create is conditional; `memory` is for the tests, and ends with the process."""


def open_store(url: str) -> Store:
    """Open the store at a path, ``file://PATH``, or a URL of an object store, such as ``s3://BUCKET/FOLDER``."""
    # Nothing is read or written yet.
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalStore(url)
    if scheme == "file":
        if not rest.startswith("/"):
            raise ConfigurationError(f"{url}: a file URL needs an absolute path: file:///PATH")
        return LocalStore(rest)
    if scheme not in CREATE_IS_CONDITIONAL:
        raise ConfigurationError(
            f"{url}: {scheme}:// is not a store we take; allowed are a path, file://, "
            + ", ".join(f"{known}://" for known in sorted(CREATE_IS_CONDITIONAL))
        )
    return ObjectStore(url)
