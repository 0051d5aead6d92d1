"""Dialling: a TCP connection to host:port within a deadline, the lookup of the name included.

The system's lookup of a name has no time limit of ours: a name server that does not answer holds it up for many
seconds. So it runs on a thread of its own, one for each name that is being looked up, and the caller stops
waiting for it at the deadline.
Knows nothing of what is said on the connection. Called by `parashard.transports.tcp`.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

CONNECT_S = 2.0  # for one address of a name that has several

_Addresses = list[tuple[int, int, int, str, Any]]  # as of `socket.getaddrinfo`

_lock = threading.Lock()
_looked_up: dict[tuple[str, int], Future[_Addresses]] = {}  # names that are being looked up now


def dial(host: str, port: int, deadline_s: float) -> socket.socket:
    """Return a connection to the first address of a host that takes one, by a moment of `time.monotonic()`.

    Raises OSError as the last address or the lookup had it; `TimeoutError` at the deadline.
    """
    failure: OSError | None = None
    for family, kind, protocol, _, address in _addresses(host, port, deadline_s):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(min(CONNECT_S, left_s))
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            failure = error
    raise failure or TimeoutError("timed out")


def _addresses(host: str, port: int, deadline_s: float) -> _Addresses:
    try:
        return _lookup(host, port, socket.AI_NUMERICHOST)  # no name server is asked
    except socket.gaierror:
        pass
    with _lock:
        future = _looked_up.get((host, port))
        if future is None:
            future = Future()
            thread = threading.Thread(target=_look_up, args=(host, port, future), name=f"lookup-{host}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the machine has no thread for it
                raise OSError(str(error)) from None
            _looked_up[host, port] = future
    try:
        return future.result(max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:
        raise TimeoutError(f"the name {host} was not found before the deadline") from None


def _look_up(host: str, port: int, future: Future[_Addresses]) -> None:
    found: _Addresses = []
    failure: OSError | None = None
    try:
        found = _lookup(host, port, 0)
    except OSError as error:
        failure = error
    with _lock:  # later callers start a new lookup
        _looked_up.pop((host, port), None)
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(found)


def _lookup(host: str, port: int, flags: int) -> _Addresses:
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name: {error}") from None
