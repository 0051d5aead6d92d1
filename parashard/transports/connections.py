"""The connections of a transport over streams to one shard, one request at a time on each.

Owns the free ones, their limit, and their end. Knows neither what a connection is nor how it is opened.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from parashard.errors import ParashardError, QueueFull, Unreachable
from parashard.transports.stream import Refused

CONNECTIONS_MAX = 8
FULL_PAUSE_S = 5.0  # after a shard has refused one more connection, before asking for one again
OPEN_S = 5.0  # for connecting and HELLO; a shard that hangs may have another incarnation elsewhere by then


class Connection(Protocol):
    """A connection, as far as this module uses it."""

    def close(self) -> None:
        """Release it, from any thread; a request in progress on it ends with `Unreachable`."""


_Connection = TypeVar("_Connection", bound=Connection)
_Answer = TypeVar("_Answer")


class Connections(Generic[_Connection]):
    """At most `limit` connections to `peer` that are free, in use or being opened.

    `open_one` opens one within a deadline, a moment of `time.monotonic()`, without a lock held.
    """

    def __init__(
        self,
        open_one: Callable[[float], _Connection],
        peer: str,
        limit: int = CONNECTIONS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_one = open_one
        self._peer = peer
        self._limit = limit
        self._clock = clock
        self._full_until_s = -math.inf
        self._changed = threading.Condition()
        self._free: list[_Connection] = []
        self._used: set[_Connection] = set()
        self._opening = 0
        self._closed = False

    def take(self, deadline_s: float) -> _Connection:
        """Return the connection that was freed last, a new one if none is free, or the first to become free."""
        # If a shard refuses one more connection (`QueueFull`), requests wait for an existing one, also those of the
        # next `FULL_PAUSE_S`. Raises the error of opening one; `Unreachable` if none became free before the deadline,
        # or after `close`.
        full: QueueFull | None = None
        while True:
            with self._changed:
                while not (self._free or self._closed) and (full or self._no_more()):
                    if full and not self._used and not self._opening:
                        raise full
                    if not self._changed.wait(deadline_s - time.monotonic()):
                        raise Unreachable("no connection was free before the deadline", peer=self._peer)
                if self._closed:
                    raise Unreachable("the transport is closed", peer=self._peer)
                if self._free:
                    connection = self._free.pop()
                    self._used.add(connection)
                    return connection
                self._opening += 1
            try:
                return self._opened(deadline_s)
            except QueueFull as error:
                full = error
                self._full_until_s = self._clock() + FULL_PAUSE_S

    def end(self, exchange: Exchange[_Connection, Any], *, clean: bool) -> None:
        """End an exchange once: its connection is free after a clean answer, and closed after anything else."""
        with self._changed:
            connection, exchange.connection = exchange.connection, None
            if connection is None:
                return
            self._used.discard(connection)
            if clean:
                self._free.append(connection)
            self._changed.notify_all()  # threads wait for different conditions
        if not clean:
            connection.close()

    def close(self) -> None:
        """Close all; taking one or waiting for one fails from now on."""
        with self._changed:
            self._closed = True
            connections = [*self._free, *self._used]
            self._free.clear()
            self._used.clear()
            self._changed.notify_all()
        for connection in connections:
            connection.close()

    def _opened(self, deadline_s: float) -> _Connection:
        connection = None
        try:
            connection = self._open_one(min(deadline_s, time.monotonic() + OPEN_S))
        finally:
            with self._changed:
                self._opening -= 1
                if connection is not None and not self._closed:
                    self._used.add(connection)
                self._changed.notify_all()  # also those that wait for a failure
                closed = self._closed
        if closed:
            connection.close()
            raise Unreachable("the transport is closed", peer=self._peer)
        return connection

    def _no_more(self) -> bool:
        """Return whether to wait for an existing connection."""
        there = len(self._used) + self._opening
        return there >= self._limit or (there > 0 and self._clock() < self._full_until_s)


class Exchange(Generic[_Connection, _Answer]):
    """A request in progress on its own connection (`parashard.transports.base.Pending`).

    It begins at once: `ask` sends, `answer` receives and raises `Refused` for a REFUSAL. A failure to begin is kept for
    `result`, so that one thread can begin on several shards and then wait for each. A clean answer, also a REFUSAL,
    frees the connection; after anything else its state is unknown, and it is closed.
    """

    def __init__(
        self,
        connections: Connections[_Connection],
        ask: Callable[[_Connection], None],
        answer: Callable[[_Connection], _Answer],
        deadline_s: float,
    ) -> None:
        self._connections = connections
        self._answer = answer
        self._failure: ParashardError | None = None
        self.connection: _Connection | None = None  # None: over, or never begun; `Connections.end` ends it
        try:
            self.connection = connections.take(deadline_s)
            ask(self.connection)
        except ParashardError as error:
            # Without its traceback, which would hold this request, and all that it refers to, in a cycle.
            self._failure = error.with_traceback(None)
            connections.end(self, clean=False)
        except BaseException:
            connections.end(self, clean=False)
            raise

    def start(self) -> None:
        """Do nothing: the request began when this was made."""

    def result(self) -> _Answer:
        """Wait for the answer."""
        connection = self.connection
        if self._failure is not None or connection is None:
            raise self._failure or Unreachable("the request was cancelled")
        clean = False
        try:
            answer = self._answer(connection)
            clean = True
            return answer
        except Refused as refusal:
            clean = True
            raise refusal.error from None
        finally:
            self._connections.end(self, clean=clean)

    def cancel(self) -> None:
        """Stop waiting, and close the connection."""
        self._connections.end(self, clean=False)


class StreamTransport(Generic[_Connection]):
    """A transport whose requests each take a connection; opening one sends HELLO."""

    def __init__(self, connections: Connections[_Connection]) -> None:
        self._connections = connections

    def greet(self, deadline_s: float) -> None:
        """Ensure that there is a connection within `deadline_s` seconds, or raise the reason why not."""
        Exchange(self._connections, lambda _: None, lambda _: None, time.monotonic() + deadline_s).result()

    def close(self) -> None:
        """Close every connection."""
        self._connections.close()
