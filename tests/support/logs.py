"""The log of a test: its events, or none of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from parashard.process.logs import Event, event_of, log


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(event_of(record))


@contextmanager
def capture_logs() -> Iterator[list[Event]]:
    """Give the events of all threads, in a list that grows."""
    kept = _Kept()
    log.logger.addHandler(kept)
    try:
        yield kept.events
    finally:
        log.logger.removeHandler(kept)


@contextmanager
def quiet_log() -> Iterator[None]:
    """Write no events: in a simulation they would take as much time as all else."""
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(logging.INFO)
