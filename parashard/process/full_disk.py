"""Retry of the few writes that a process cannot start without while the disk is full or failing.

Such as a claim: an incarnation that is not stored could be claimed twice. Called where a process starts.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import TypeVar

from parashard.errors import NotReady, ParashardError, StoreFailed, may_pass
from parashard.process.backoff import retry_pause_s
from parashard.process.best_effort import BestEffort, why_failed
from parashard.process.logs import log

_Result = TypeVar("_Result")


DISK_RETRY_S_MAX = 60.0  # then the process ends with the reason, and is restarted without a bound


def disk_failed(error: BaseException) -> bool:
    """Return whether a write failed for a transient state of this host's disk, such as no space; not for its path."""
    cause = error.__cause__ if isinstance(error, ParashardError) else error
    return cause is not None and may_pass(cause)


def disk_is_full(error: BaseException) -> bool:
    """Return whether a write failed because the disk or the quota was full."""
    cause = error.__cause__ if isinstance(error, ParashardError) else error
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def retry_while_disk_fails(write: Callable[[], _Result], what: str, stopping: threading.Event) -> _Result:
    """Retry a write with back-off while the disk fails, for at most DISK_RETRY_S_MAX; return its result.

    Raises NotReady if `stopping` was set meanwhile; StoreFailed or OSError if it fails for another reason, or has
    failed for DISK_RETRY_S_MAX.

    Parameters
    ----------
    write : callable
        Raises StoreFailed or OSError if it fails, and has then changed nothing.
    """
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
