"""Waiting for room: the few writes that a process cannot go on without, while the disk has no room for them (P21).

A claim is one, since an incarnation that is not stored could be given twice (P3). Called where a process starts.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import TypeVar

from parashard.errors import NotReady, ParashardError, StoreFailed, may_pass
from parashard.process.backoff import retry_pause_s
from parashard.process.logs import structlog
from parashard.process.side_effects import SideEffect, why_failed

_Result = TypeVar("_Result")

log = structlog.get_logger(__name__)

ROOM_PATIENCE_S = 60.0  # then the process ends, says why, and is started again, however often


def disk_failed(error: BaseException) -> bool:
    """Tell whether a write failed for what this host's disk lacks at this moment, such as room; not for its path."""
    cause = error.__cause__ if isinstance(error, ParashardError) else error
    return cause is not None and may_pass(cause)


def no_room(error: BaseException) -> bool:
    """Tell whether a write failed because there was no room for it."""
    cause = error.__cause__ if isinstance(error, ParashardError) else error
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def when_there_is_room(write: Callable[[], _Result], what: str, giving_up: threading.Event) -> _Result:
    """Write, again and again while the disk fails, with a growing pause, for a minute; return what `write` returns.

    Parameters
    ----------
    write : callable
        Raises StoreFailed or OSError where it fails, and has then changed nothing.
    what : str
        What is written, for people, as of `SideEffect`.
    giving_up : Event
        Once set, nothing is waited for any more.

    Raises
    ------
    NotReady
        If `giving_up` was set meanwhile.
    StoreFailed, OSError
        If it fails for another cause than the disk's state, or has failed for ROOM_PATIENCE_S.
    """
    waiting = SideEffect(what, lambda text, over: log.info(text) if over else log.warning(text))
    waited_s = 0.0
    while True:
        try:
            result = write()
        except (StoreFailed, OSError) as error:
            if not disk_failed(error) or waited_s >= ROOM_PATIENCE_S:
                raise
            waiting.failed(why_failed(error))
        else:
            waiting.succeeded()
            return result
        pause_s = retry_pause_s(waiting.failures)
        waited_s += pause_s
        if giving_up.wait(pause_s):
            raise NotReady(f"{what} cannot be written: {waiting.error}")
