"""The contract of a store, and the names that it accepts; `local` and `remote` implement it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from parashard.errors import ConfigurationError

NAME_CHARACTERS_MAX = 512
SEGMENT_CHARACTERS_MAX = 200
"""Below the 255 bytes that common file systems allow."""

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class Store(Protocol):
    """Named contents below one place, shared by every process of a job.

    A name is '/'-separated segments of ``A-Z a-z 0-9 . _ -``, none starting with '.'; folders are created implicitly.
    Reads and writes of a name are atomic, and an acknowledged write is durable.

    Every method raises `ConfigurationError` for a name that is not allowed and `StoreFailed`, with the place and the
    cause, on an error of the store.
    """

    @property
    def url(self) -> str:
        """Location of the store, as `parashard.store.open_store` takes it."""

    def create(self, name: str, content: bytes | memoryview) -> None:
        """Create a name with this content; of concurrent creates exactly one succeeds.

        The content is durable when this returns. After `AlreadyStored` readers find the earlier content; after
        `StoreFailed`, none. One exception, on an object store: a request whose reply was lost may have been carried
        out, so that after either error the name may have our content. Read it to find out.
        """

    def replace(self, name: str, content: bytes | memoryview) -> None:
        """Replace the content of a name; durable when this returns.

        After `StoreFailed` a reader finds either the old content or the new one.
        """

    def read(self, name: str, size_max: int) -> bytes:
        """Return the content of a name.

        Raises `NotStored`, and `StoreFailed` for a content larger than `size_max` bytes, before any allocation.
        """

    def size(self, name: str) -> int:
        """Return the size of a name's content in bytes; raises `NotStored`."""

    def names(self, folder: str) -> list[str]:
        """Return the names directly in a folder, relative to it, sorted; none if there is no such folder.

        Only names that `read` accepts are listed: neither temporary files nor files of other programs. The folder "" is
        the root of the store.
        """

    def folders(self, folder: str) -> list[str]:
        """Return the folders directly in a folder, relative to it, sorted."""

    def delete(self, name: str) -> None:
        """Remove a name durably, and its folder if that is empty now; no error if there is no such name."""

    def local_path(self, name: str) -> Path | None:
        """Return the file of a name, which need not exist; None if the store is not on this host."""


def checked_name(name: str) -> str:
    """Return the name; raise `ConfigurationError` where it is not allowed (see `Store`)."""
    if len(name) > NAME_CHARACTERS_MAX:
        raise ConfigurationError(
            f"store name {name[:40]!r}...: {len(name)} characters, allowed are {NAME_CHARACTERS_MAX}"
        )
    for segment in name.split("/"):
        if len(segment) > SEGMENT_CHARACTERS_MAX:
            raise ConfigurationError(
                f"store name {name[:40]!r}...: {len(segment)} characters between slashes, "
                f"allowed are {SEGMENT_CHARACTERS_MAX}"
            )
        if not is_segment(segment):
            raise ConfigurationError(
                f"store name {name!r}: {segment!r} is not allowed: letters, digits, '.', '_' and '-', "
                "at least one, the first not '.'"
            )
    return name


def checked_folder(folder: str) -> str:
    """Return the folder's name; raise `ConfigurationError` where it is neither an allowed name nor ""."""
    return checked_name(folder) if folder else folder


def is_segment(text: str) -> bool:
    """Return whether the text is an allowed segment of a name."""
    return len(text) <= SEGMENT_CHARACTERS_MAX and _SEGMENT.fullmatch(text) is not None
