"""What every store promises, and which names it takes.

Owns the `Store` protocol and the check of names. Does not know what is stored, nor where. `parashard.store.local` and
`parashard.store.remote` keep the promises; `parashard.store.claims`, `parashard.checkpoints` and the services rely on
them.
"""

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

    A name is '/'-separated segments of ``A-Z a-z 0-9 . _ -``, none starting with '.'; folders need no making. Whoever
    reads a name gets the whole of what one writer wrote: never a part, never a mixture. What is acknowledged is kept
    (P20).

    Every method raises `ConfigurationError` for a name that is not allowed and `StoreFailed`, with the place and the
    cause, where the store gave an error.
    """

    @property
    def url(self) -> str:
        """Where the store is, as `parashard.store.open_store` takes it."""

    def create(self, name: str, content: bytes | memoryview) -> None:
        """Store the content under a name that nothing has; of several who try at once, exactly one succeeds (P3).

        The content is durable when this returns. After `AlreadyStored` readers find what was there before; after
        `StoreFailed`, nothing. One exception, on an object store: a request whose reply was lost may have been carried
        out, so that after either error the content may be there, whole, and ours. Whoever needs to know reads it.
        """

    def replace(self, name: str, content: bytes | memoryview) -> None:
        """Store the content under a name, in place of what is there; durable when this returns.

        After `StoreFailed` a reader finds the old content or the new one, whole.
        """

    def read(self, name: str, size_max: int) -> bytes:
        """Return the content of a name.

        Raises `NotStored`, and `StoreFailed` where the content is larger than `size_max` bytes: nothing is allocated
        for it then.
        """

    def size(self, name: str) -> int:
        """Return how many bytes a name's content has; raises `NotStored`."""

    def names(self, folder: str) -> list[str]:
        """Return the names directly in a folder, relative to it, sorted; none where there is no such folder.

        Only what `read` takes is listed: no writer's temporary, no stranger's file with another kind of name. The
        folder "" is the store's top.
        """

    def folders(self, folder: str) -> list[str]:
        """Return the folders directly in a folder, relative to it, sorted."""

    def delete(self, name: str) -> None:
        """Remove a name, durably; without error where there is nothing under it. An emptied folder goes with it."""

    def local_path(self, name: str) -> Path | None:
        """Return the file that holds, or would hold, a name's content; None where the store is not on this host."""


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
    """Tell whether the text may stand between two slashes of a name."""
    return len(text) <= SEGMENT_CHARACTERS_MAX and _SEGMENT.fullmatch(text) is not None
