"""Check numbers that users give, and publish a service's address: its address file, and the one to advertise."""

from __future__ import annotations

import json
import math
import operator
import threading
from numbers import Real
from pathlib import Path
from typing import Any

from parashard.errors import ConfigurationError, StoreFailed
from parashard.process.addresses import advertised_for
from parashard.process.best_effort import why_failed
from parashard.process.durable import disk_failed, retry_while_disk_fails, write_durably
from parashard.process.starts import Start

TIMEOUT_S_MAX = 1e9
"""Longest timeout of one wait; the system's waits take little more."""


def checked_timeout_s(timeout_s: Any) -> float:
    """Return a number of seconds to wait for; a negative one acts as 0."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real) or not timeout_s <= TIMEOUT_S_MAX:
        raise ConfigurationError(
            f"timeout_s must be a number of seconds of at most {TIMEOUT_S_MAX:g}, found {timeout_s!r}"
        )
    return float(timeout_s)


def checked_whole(what: str, given: Any, least: int = 1, most: int | None = None) -> int:
    """Return a user's whole number, of any integer type; refuse other types, and numbers out of bounds."""
    try:
        number = least - 1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigurationError(f"{what} must be a whole number {allowed}, found {given!r}")
    return number


def finite(value: float | None) -> float | None:
    """Return the number of a command's option; NaN passes the bounds of every option, and is refused here."""
    if value is not None and not math.isfinite(value):
        raise ConfigurationError(f"an option is {value}; allowed are finite numbers")
    return value


def advertised_address(
    start: Start, listening: str, data_listening: str = "", stopping: threading.Event | None = None
) -> str:
    """Write a service's address file, if it has one; return the address that it advertises."""
    if start.address_file is not None:
        write_address(start.address_file, {"address": listening, "data_address": data_listening}, stopping)
    return advertised_for(start.advertise, listening)


def write_address(path: Path, content: dict[str, str | int], stopping: threading.Event | None = None) -> None:
    """Replace an address file atomically; retry while the disk fails, because the process is unreachable without it."""
    text = json.dumps(content).encode()
    try:
        retry_while_disk_fails(lambda: write_durably(path, text), "address files", stopping or threading.Event())
    except OSError as error:
        if disk_failed(error):
            raise StoreFailed(f"{path} cannot be written: {why_failed(error)}") from error
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None
