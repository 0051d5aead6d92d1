"""Ctrl-C and SIGTERM while a training runs in this process: the step in the works is finished, then it stops.

Knows no training. Called by `parashard.api.in_process.training`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether a stop was asked for.

    Attributes
    ----------
    asked : bool
    in_users_code : bool
        Set by the caller while a model computes: the second signal then breaks it off, by KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.asked = False
        self.in_users_code = False

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.asked and self.in_users_code:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Take the signals until the end of the block; in another thread than the main one there are none to take."""
    found = Interruption()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN and handler is not None:
                before[number] = signal.signal(number, found._signalled)
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
