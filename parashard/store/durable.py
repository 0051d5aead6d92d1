"""Files that survive a power cut: content and name are on the disk before anybody is told of them.

Owns the order: content, fsync, name, fsync of the folder. Called by the launcher for the job file, by the coordinator
for weights and report, by the shards for their log's folders; the checkpoint store has an order of its own
(`parashard.store.local`), since there a name may be taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Write a file whole, in place of what is there; durable when this returns. OSError leaves what was there."""
    replace_durably(path, lambda temporary: temporary.write_bytes(content))


def replace_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a temporary file beside `path`, then give it that name; durable when this returns.

    An error of `write`, or of the disk, leaves what was there, and nothing of the temporary: a full disk must not be
    filled further.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        write(temporary)
        _sync(temporary, os.O_RDONLY)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def rename_durably(path: Path, name: Path) -> None:
    """Give a file that is on the disk another name in the same folder; durable when this returns."""
    os.replace(path, name)
    sync_folder(name.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_upwards(folder: Path) -> None:
    """Make a folder's names durable, and those of every folder above it: any of them may just have been made.

    Folders that we may not open were not made by us.
    """
    sync_folder(folder)
    for above in folder.absolute().parents:
        with suppress(PermissionError):
            sync_folder(above)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
