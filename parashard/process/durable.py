"""Files that survive a power cut: a write returns once content and name are on the disk.

Owns the order: content, fsync, rename, fsync of the folder. The checkpoint store needs exclusive creation and has
its own order (`parashard.store.local`).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from parashard.errors import NotReady, ParashardError, StoreFailed, is_transient
from parashard.process.backoff import retry_pause_s
from parashard.process.best_effort import BestEffort, why_failed
from parashard.process.logs import log


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file atomically; durable when this returns. After OSError the old content is there."""
    replace_durably(path, lambda temporary: temporary.write_bytes(content))


def replace_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it; durable when this returns."""
    # After an error of `write` or of the disk the old content is there, and the temporary is removed: a full disk must
    # not be filled further.
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
    """Make the names in a folder and all above it durable, where this user may open them: any of them may be new."""
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


_Result = TypeVar("_Result")


DISK_RETRY_S_MAX = 60.0  # then the process ends with the reason, and is restarted without a bound


def disk_failed(error: BaseException) -> bool:
    """Return whether a write failed for a transient state of this host's disk, such as no space, not for its path."""
    cause = error.__cause__ if isinstance(error, ParashardError) else error
    return cause is not None and is_transient(cause)


def disk_is_full(error: BaseException) -> bool:
    """Return whether a write failed because the disk or the quota was full."""
    cause = error.__cause__ if isinstance(error, ParashardError) else error
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def retry_while_disk_fails(write: Callable[[], _Result], what: str, stopping: threading.Event) -> _Result:
    """Retry a write, which changes nothing when it raises, for at most DISK_RETRY_S_MAX while the disk fails."""
    waiting = BestEffort(what, lambda text, over: log.info(text) if over else log.warning(text))
    waited_s = 0.0
    while True:
        try:
            result = write()
        except (StoreFailed, OSError) as error:
            if not disk_failed(error) or waited_s >= DISK_RETRY_S_MAX:
                raise
            waiting.failed(why_failed(error))
        else:
            waiting.succeeded()
            return result
        pause_s = retry_pause_s(waiting.failures)
        waited_s += pause_s
        if stopping.wait(pause_s):
            raise NotReady(f"{what} cannot be written: {waiting.error}")
