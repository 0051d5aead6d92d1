"""Writes that decide nothing: log lines, the history, state files. None of them raises into work (P21).

A failure is counted by what could not be written (`failed_writes`, on every process's /metrics) and told in one line
when it begins and one when it is over. Knows no file. Called by whoever writes such a thing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

from parashard.errors import StoreFailed
from parashard.process.trouble import Trouble

_counting = threading.Lock()
_failed: Counter[str] = Counter()


def failed_writes() -> dict[str, int]:
    """Return how many writes of this process have failed, by what was to be written."""
    with _counting:
        return dict(_failed)


def why_failed(error: BaseException) -> str:
    """Return the cause of a failed write in a few words, such as "no space left on device"."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__


class SideEffect:
    """One kind of write that decides nothing.

    Parameters
    ----------
    what : str
        What is written, in the plural or as a mass, such as "history lines": `failed_writes` counts by it.
    tell : callable
        Called with one line and whether it is over: when writes begin to fail, and when they work again.
    steady_s : float
        For how long none may have failed before they work again: an almost full disk fails and works by turns.
    clock : callable
        Monotonic seconds.

    Attributes
    ----------
    error : str
        Why the last write failed; empty after one that did not.
    failures : int
        How many have failed, in a row.
    """

    def __init__(
        self,
        what: str,
        tell: Callable[[str, bool], None],
        steady_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what = what
        self.error = ""
        self.failures = 0
        self._tell = tell
        self._clock = clock
        self._trouble = Trouble(steady_s)
        self._untold = 0  # failures of the present trouble

    def attempt(self, write: Callable[[], object]) -> bool:
        """Write; return whether that went well. An error of the disk or of the store is counted and not raised."""
        try:
            write()
        except (OSError, StoreFailed) as error:
            self.failed(why_failed(error))
            return False
        self.succeeded()
        return True

    def failed(self, why: str) -> None:
        """Count a failure, and tell of the first in a row."""
        with _counting:
            _failed[self.what] += 1
        self.failures += 1
        self._untold += 1
        self.error = why
        if self._trouble.begins(self._clock()):
            self._tell(f"{self.what} cannot be written: {why}", False)

    def succeeded(self) -> None:
        """Tell that writes work again, if they did not."""
        self.error, self.failures = "", 0
        if self._trouble.ends(self._clock()):
            failed, self._untold = self._untold, 0
            self._tell(f"{self.what} are written again; {failed} writes failed", True)


def lossy(stream: TextIO | None, what: str) -> TextIO:
    """Return a stream that hands text on to this one and never raises; one that does so already stays as it is.

    None is what Python has for a standard stream that was closed before its start.
    """
    if isinstance(stream, LossyStream):
        return stream
    return cast(TextIO, LossyStream(Path(os.devnull).open("w") if stream is None else stream, what))


def release_standard_streams() -> None:
    """Let this process end as it should, though its standard streams did not take all that they were given.

    The interpreter tries once more, and would end with a code of its own.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class LossyStream:
    """A text stream for people that never raises: what a full disk or a closed pipe does not take is counted and lost.

    Once the stream takes text again, it gets a line that says how much it did not take.

    Parameters
    ----------
    stream : TextIO
        Where text goes.
    what : str
        As of `SideEffect`.
    """

    def __init__(self, stream: TextIO, what: str) -> None:
        self._stream = stream
        self._writes = SideEffect(what, self._told)
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Write the text, or count it as lost; the end of a line takes it to the file."""
        with self._lock:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                self._writes.failed(why_failed(error))
            else:
                self._writes.succeeded()
        return len(text)

    def flush(self) -> None:
        """Nothing is left to flush: `write` does it."""

    def _told(self, text: str, over: bool) -> None:
        if not over:
            return  # it begins: nothing can be written here; /metrics has it
        try:
            self._stream.write(f"parashard: {text}\n")
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._writes.failed(why_failed(error))

    def __getattr__(self, name: str) -> object:
        """Have everything else of the stream: `isatty`, `fileno`, `encoding`."""
        return getattr(self._stream, name)
