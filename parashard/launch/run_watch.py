"""Watch a run for missing workers, a silent coordinator and refused peers, and word the messages for the user.

Pure but for RefusedHandshakes, which reads a log: `now_s` is an argument.
Implements rule P22 of docs/protocol.md.
"""

from __future__ import annotations

import re
from pathlib import Path

REMIND_S = 60.0
IMPORT_S = 5.0
"""How long a script's workers may take to join before the user is told."""
READ_BYTES = 1 << 16
"""Most that one look reads of a log; in a flood of refusals the older ones are skipped."""
_LINE = re.compile(rb"Handshake failed .*OPENSSL_internal:([A-Z0-9_]+)")
_SHOWS_NONE = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PEER_DID_NOT_RETURN_A_CERTIFICATE"}


class AwaitedWorkers:
    """Decides when to tell the user that a run has no workers, and why; first after `after_s` without one."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        self._reason, self._after_s = reason, after_s
        self._since_s: float | None = None
        self._next_s = 0.0

    def look(self, now_s: float, live: int) -> str:
        """Return a message for the user, or ""; `live`: the number of workers now."""
        if live:
            self._since_s = None
            return ""
        if self._since_s is None:
            self._since_s, self._next_s = now_s, now_s + self._after_s
        if now_s < self._next_s:
            return ""
        self._next_s = now_s + REMIND_S
        waited_s = now_s - self._since_s
        since = f" for {waited_s:.0f} s" if waited_s else ""
        return f"no workers{since}: {self._reason}"


class CoordinatorSilence:
    """Decides when to kill a coordinator: after `silence_s` while it serves, `start_s` while it starts."""

    def __init__(self, silence_s: float, start_s: float) -> None:
        self._silence_s = silence_s
        self._start_s = start_s
        self._since_s = 0.0
        self._serves = self._told = False

    def started(self, now_s: float) -> None:
        """Record that a coordinator was started."""
        self._since_s, self._serves, self._told = now_s, False, False

    def heard(self, now_s: float) -> None:
        """Record an answer."""
        self._since_s, self._serves = now_s, True

    def look(self, now_s: float, *, serves: bool) -> tuple[str, bool]:
        """Return a message for the user, or "", and whether to kill the coordinator."""
        # `serves`: it has written its address.
        if serves and not self._serves:
            self.heard(now_s)
        silent_s = now_s - self._since_s
        if self._serves and silent_s > self._silence_s:
            self._since_s = now_s
            return f"the coordinator has not answered for {silent_s:.0f} s; it is killed", True
        if not self._serves and silent_s > self._start_s:
            self._since_s = now_s
            return f"the coordinator has not come up within {self._start_s:.0f} s; it is killed", True
        if not self._serves and not self._told and silent_s > self._silence_s:
            self._told = True
            return f"the coordinator has been starting for {silent_s:.0f} s; it has {self._start_s:.0f} s", False
        return "", False


class RefusedHandshakes:
    """Reads the reasons of refused TLS handshakes from a process's log, which need not exist yet."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._told: set[str] = set()
        self._read_bytes = self._size()

    def look(self) -> str:
        """Return a message about refusals since the last look, or "" if there is none or it is no news."""
        size = self._size()
        begin, self._read_bytes = max(self._read_bytes, size - READ_BYTES), size
        if size <= begin:
            return ""
        try:
            with self._log.open("rb") as file:
                file.seek(begin)
                reasons = [reason.decode() for reason in _LINE.findall(file.read(size - begin))]
        except OSError:
            return ""
        said = [_sentence(reason) for reason in reasons]
        new = [sentence for sentence in dict.fromkeys(said) if sentence not in self._told]
        self._told |= set(new)
        return "; ".join(new)

    def _size(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0


def _sentence(reason: str) -> str:
    what = "without a certificate" if reason in _SHOWS_NONE else f"with a certificate that is not taken ({reason})"
    return f"the coordinator refuses a process {what}; a worker joins with --tls-dir and one of this run's authority"
