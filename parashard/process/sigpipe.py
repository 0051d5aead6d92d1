"""SIGPIPE: a write to a peer that is gone is an error, also in a script that gave the signal its default action."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_sigpipe() -> Iterator[None]:
    """Let writes of this thread that cannot take MSG_NOSIGNAL fail with an error, however a script handles SIGPIPE."""
    if signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN:  # Python's default
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})  # it is sent to the thread that writes
    try:
        yield
    finally:
        if signal.SIGPIPE not in before:
            signal.sigtimedwait({signal.SIGPIPE}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
