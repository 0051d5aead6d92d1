"""Files that survive a power cut: a write returns once content and name are on the disk.

Owns the order: content, fsync, rename, fsync of the folder. Called by the launcher for the job file, and by the
coordinator for weights and report. The checkpoint store needs exclusive creation and has an order of its own
(`parashard.store.local`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file atomically; durable when this returns. After OSError the old content is there."""
    replace_durably(path, lambda temporary: temporary.write_bytes(content))


def replace_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a temporary file beside `path`, then rename it; durable when this returns.

    After an error of `write` or of the disk the old content is there, and the temporary is removed: a full disk must
    not be filled further.
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
    """Rename a synced file within its folder; durable when this returns."""
    os.replace(path, name)
    sync_folder(name.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_upwards(folder: Path) -> None:
    """Make the names in a folder and in every folder above it durable: any of them may be new.

    Folders that this user may not open are skipped: they are not new.
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
