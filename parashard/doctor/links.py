"""Measures a link between two machines by plain sockets; a `Listener` answers only peers that send its token."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from contextlib import suppress
from hmac import compare_digest

from parashard.doctor.facts import Link
from parashard.errors import Unavailable
from parashard.process.addresses import Port, address_family, join_address, listen, split_address
from parashard.transports.tcp import dial

CONNECT_S = 3.0
CALL_S = 5.0
PINGS = 21
BULK_S = 0.3
BULK_BYTES_MAX = 1 << 30
CHUNK = bytes(1 << 18)
CONNECTIONS_MAX = 64
TOKEN_BYTES = 32
BACKLOG = 64

_PING, _BULK, _YES = b"p", b"b", b"y"


def listening(host: str, port: Port) -> socket.socket:
    """Return a socket that listens; raise Unavailable where the port is taken."""

    def on(number: int) -> socket.socket:
        try:
            dual = host == "::" and socket.has_dualstack_ipv6()
            where = (host, number)
            return socket.create_server(where, family=address_family(host), backlog=BACKLOG, dualstack_ipv6=dual)
        except OSError as error:
            raise Unavailable(f"cannot listen on {join_address(host, number)}: {error.strerror}") from None

    return listen(port, on)


class Listener:
    """Listens at `address`, and answers measurements."""

    def __init__(self, host: str, port: Port, token: bytes) -> None:
        self._listening = listening(host, port)
        self._token = token
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self.address = join_address(host, self._listening.getsockname()[1])
        threading.Thread(target=self._accept, name="doctor", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError, EOFError):
                connection.settimeout(CALL_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not compare_digest(_exactly(connection, len(self._token)), self._token):
                    return
                connection.sendall(_YES)
                while (asked := connection.recv(1)) == _PING:
                    connection.sendall(_YES)
                if asked == _BULK:
                    _swallow(connection)
                    connection.sendall(_YES)
        finally:
            self._room.release()


def _swallow(connection: socket.socket) -> None:
    """Receive and discard bytes until end of stream, at most `BULK_BYTES_MAX`."""
    scratch = bytearray(len(CHUNK))
    taken = 0
    while taken < BULK_BYTES_MAX and (more := connection.recv_into(scratch)):
        taken += more


def _exactly(connection: socket.socket, length: int) -> bytes:
    """Return `length` bytes, received within `CALL_S` in total, so that a slow sender cannot occupy a connection."""
    found, until_s = b"", time.monotonic() + CALL_S
    while len(found) < length:
        connection.settimeout(max(1e-3, until_s - time.monotonic()))
        more = connection.recv(length - len(found))
        if not more:
            raise EOFError
        found += more
        if time.monotonic() > until_s:
            raise TimeoutError
    connection.settimeout(CALL_S)
    return found


def measure(address: str, token: bytes | None) -> Link:
    """Measure the link to an address; without a `Listener`'s token only whether it accepts a connection."""
    since_s = time.monotonic()
    try:
        host, port = split_address(address)
        connection = dial(host, port, since_s + CONNECT_S)
    except ConnectionRefusedError as error:
        return Link(address=address, kind="refused", problem=error.strerror or "")
    except TimeoutError:
        return Link(address=address, kind="silent", problem=f"no answer for {CONNECT_S:.0f} s")
    except socket.gaierror as error:
        return Link(address=address, kind="unknown-name", problem=error.strerror or str(error))
    except OSError as error:
        return Link(address=address, kind="failed", problem=error.strerror or str(error))
    connect_s = time.monotonic() - since_s
    with connection:
        if token is None:
            return Link(address=address, kind="open", connect_s=connect_s)
        return _measured(connection, Link(address=address, kind="open", connect_s=connect_s), token)


def _measured(connection: socket.socket, link: Link, token: bytes) -> Link:
    try:
        connection.settimeout(CALL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token)
        _expect_yes(connection)
        times_s: list[float] = []
        while len(times_s) < PINGS and sum(times_s) < CALL_S:
            since_s = time.monotonic()
            connection.sendall(_PING)
            _expect_yes(connection)
            times_s.append(time.monotonic() - since_s)
        link = link.replaced(round_trip_s=statistics.median(times_s))
    except (OSError, EOFError):
        return link.replaced(kind="foreign", problem="something else answers there")
    try:
        connection.sendall(_BULK)
        since_s, sent = time.monotonic(), 0
        while time.monotonic() - since_s < BULK_S and sent < BULK_BYTES_MAX:
            connection.sendall(CHUNK)
            sent += len(CHUNK)
        connection.shutdown(socket.SHUT_WR)
        _expect_yes(connection)
    except (OSError, EOFError):
        return link.replaced(kind="small-only", problem=f"nothing more passes for {CALL_S:.0f} s")
    return link.replaced(bytes_per_s=sent / (time.monotonic() - since_s))


def _expect_yes(connection: socket.socket) -> None:
    if _exactly(connection, 1) != _YES:
        raise EOFError
