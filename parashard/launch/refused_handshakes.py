"""RefusedHandshakes: who was refused at the coordinator's port, as far as gRPC tells, in a sentence for people.

gRPC refuses a TLS handshake below any code of ours, and says so on standard error only, which is the process's log.
Best effort: where that line is missing or worded otherwise, nothing is said. Called by `parashard.launch.running`.
"""

from __future__ import annotations

import re
from pathlib import Path

READ_BYTES = 1 << 16
"""At one look; what a flood of refusals writes beyond that is not read."""
_LINE = re.compile(rb"Handshake failed .*OPENSSL_internal:([A-Z0-9_]+)")
_SHOWS_NONE = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PEER_DID_NOT_RETURN_A_CERTIFICATE"}


class RefusedHandshakes:
    """Reads the log of a process from here on.

    Parameters
    ----------
    log : Path
        The log; it may not be there yet.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._told: set[str] = set()
        self._read_bytes = self._size()

    def look(self) -> str:
        """Return what to say of refusals since the last look; "": nothing, or what was said before."""
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
