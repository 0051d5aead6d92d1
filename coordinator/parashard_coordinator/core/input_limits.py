"""Validation of texts from peers: length and allowed characters, before the coordinator keeps or shows them.

Owns these bounds. The texts go into events, logs, terminals, the status and the report, so they must not control a
terminal, begin a line, or grow without bound. Pure; called by `parashard_coordinator.endpoints.service` for input and
by `parashard_coordinator.core.job_record` for events.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from parashard.errors import ConfigurationError, LimitExceeded, MalformedFrame

NAME_BYTES_MAX = 100
ADDRESS_BYTES_MAX = 300  # a host name has at most 253
PATH_BYTES_MAX = 200  # a Unix socket's path has at most 108
DEVICE_BYTES_MAX = 200
FINGERPRINT_BYTES_MAX = 2000
REASON_BYTES_MAX = 1000
EVENT_BYTES_MAX = 2000  # an event names a process, and may contain a reason
METRICS_MAX = 64  # of one evaluation
CUT = "..."

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_ADDRESS = re.compile(r"[A-Za-z0-9._:%\[\]-]*")


def readable(text: str, bytes_max: int) -> str:
    r"""Escape unprintable characters of a text, and cut it to `bytes_max` bytes.

    >>> readable("NaN\x1b[2J\nlevel=critical", 100), readable("far too long", 8)
    ('NaN\\x1b[2J\\nlevel=critical', 'far t...')
    """
    begins = text[:bytes_max]  # first, so that the rest is not copied
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in begins).encode()
    if len(begins) == len(text) and len(shown) <= bytes_max:
        return shown.decode()
    return shown[: bytes_max - len(CUT)].decode(errors="ignore") + CUT


def checked_name(name: str) -> str:
    """Return a worker's name; "" stands for none."""
    if len(name) > NAME_BYTES_MAX:
        raise ConfigurationError(f"a worker's name has at most {NAME_BYTES_MAX} characters, found {len(name)}")
    if name and not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"a worker's name has letters, digits and . _ : / @ - and begins with a letter or a digit, found "
            f"'{readable(name, NAME_BYTES_MAX)}'"
        )
    return name


def checked_address(address: str, what: str) -> str:
    """Return an address, host:port; "" stands for none."""
    _check_length(address, what, ADDRESS_BYTES_MAX)
    if not _ADDRESS.fullmatch(address):
        raise MalformedFrame(f"{what}: '{readable(address, ADDRESS_BYTES_MAX)}' is not host:port")
    return address


def checked_text(text: str, what: str, bytes_max: int) -> str:
    """Return a text that must not be altered, such as a path or a fingerprint; raise if it is invalid."""
    _check_length(text, what, bytes_max)
    if not text.isprintable():
        raise MalformedFrame(f"{what}: '{readable(text, bytes_max)}' has characters that cannot be printed")
    return text


def fault_of_metrics(metrics: Mapping[str, float]) -> str:
    """Return the fault in the number or the names of an evaluation's metrics, or ""."""
    if len(metrics) > METRICS_MAX:
        return f"an evaluation has at most {METRICS_MAX} metrics, found {len(metrics)}"
    for name in metrics:
        if len(name.encode()) > NAME_BYTES_MAX or not name.isprintable():
            return (
                f"a metric's name has at most {NAME_BYTES_MAX} bytes, all printable: '{readable(name, NAME_BYTES_MAX)}'"
            )
    return ""


def _check_length(text: str, what: str, bytes_max: int) -> None:
    length = len(text.encode())
    if length > bytes_max:
        raise LimitExceeded(f"{what} has {length} bytes; allowed are {bytes_max}")
