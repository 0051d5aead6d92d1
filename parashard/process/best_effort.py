"""Best-effort writes: log lines, the history, state files. Their failures never interrupt the job.

A failure is counted by kind (`failed_writes`, on every process's /metrics) and reported once when it begins and once
when it is over. Implements rule P21 of docs/protocol.md.
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
from parashard.process.backoff import Debounce

_counting = threading.Lock()
_failed: Counter[str] = Counter()


def failed_writes() -> dict[str, int]:
    """Return the number of failed writes of this process, by kind."""
    with _counting:
        return dict(_failed)


def why_failed(error: BaseException) -> str:
    """Return the cause of a failed write, such as "no space left on device"."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__


class BestEffort:
    """One kind of best-effort write.

    `what` is the key of `failed_writes`. `tell` gets one line and whether the failure is over, which it is once no
    write has failed for `steady_s`: an almost full disk fails intermittently.
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
        self._debounce = Debounce(steady_s)
        self._unreported = 0  # failures since the last report

    def attempt(self, write: Callable[[], object]) -> bool:
        """Write; return whether that succeeded. An error of the disk or of the store is counted and not raised."""
        try:
            write()
        except (OSError, StoreFailed) as error:
            self.failed(why_failed(error))
            return False
        self.succeeded()
        return True

    def failed(self, why: str) -> None:
        """Count a failure, and report the first of a series."""
        with _counting:
            _failed[self.what] += 1
        self.failures += 1
        self._unreported += 1
        self.error = why
        if self._debounce.begins(self._clock()):
            self._tell(f"{self.what} cannot be written: {why}", False)

    def succeeded(self) -> None:
        """Report that writes work again, if they had failed."""
        self.error, self.failures = "", 0
        if self._debounce.ends(self._clock()):
            failed, self._unreported = self._unreported, 0
            self._tell(f"{self.what} are written again; {failed} writes failed", True)


def lossy(stream: TextIO | None, what: str) -> TextIO:
    """Wrap a stream (None: closed before the start) so that it never raises; a wrapped one is returned as it is."""
    if isinstance(stream, LossyStream):
        return stream
    return cast(TextIO, LossyStream(Path(os.devnull).open("w") if stream is None else stream, what))


def release_standard_streams() -> None:
    """Drop unwritten text of the standard streams: the interpreter would retry the write and exit with another code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class LossyStream:
    """A text stream that never raises: text that a full disk or a closed pipe rejects is counted and dropped."""

    def __init__(self, stream: TextIO, what: str) -> None:
        self._stream = stream
        self._writes = BestEffort(what, self._report)
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Write the text, or count it as lost; a line's end flushes it."""
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
        """Do nothing: `write` flushes."""

    def _report(self, text: str, over: bool) -> None:
        if not over:
            return  # a failure begins: nothing can be written here; /metrics has it
        try:
            self._stream.write(f"parashard: {text}\n")
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._writes.failed(why_failed(error))

    def __getattr__(self, name: str) -> object:
        """Delegate all else to the stream: `isatty`, `fileno`, `encoding`."""
        return getattr(self._stream, name)
