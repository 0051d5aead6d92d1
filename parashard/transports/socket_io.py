"""Bytes through a connected stream socket, each call within a deadline.

Owns system calls, time limits, the differences between kinds of sockets, and the trust in Unix sockets; knows no
message. Only `parashard.transports.stream` sends and receives. Deadlines are moments of `time.monotonic()`; one that
passes raises `TimeoutError`, an end of the stream `EOFError`, any other failure the socket's `OSError`.

A plain socket blocks, and the kernel enforces its time limit (SO_RCVTIMEO, SO_SNDTIMEO): one call then transfers a
payload of any length, while Python's own time limits cost a poll and an acquisition of the GIL for each bufferful
(docs/decisions/0013-three-transports-one-seam.md).
"""

from __future__ import annotations

import array
import math
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from parashard.errors import Unreachable
from parashard.process.sigpipe import no_sigpipe

LOCAL_BUFFER_BYTES = 256 << 10  # of sockets between processes of one host; they and a piece of weights fit into L2
KEEPALIVE_IDLE_S = 10  # of silence before the kernel's first keep-alive probe
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3
UNACKNOWLEDGED_S = 25  # unacknowledged bytes for this long: the peer's host is gone; its shard may run elsewhere
LIMIT_FACTOR = 0.75  # of the time left: the limit then also fits later calls, whose deadlines are about as far away
SHORT_LIMIT_S = 1.0  # a nearer deadline is itself the limit
RECORD_BYTES = 16 << 10  # largest TLS record
IOVECS_MAX = 1024  # pieces that the kernel takes in one call (IOV_MAX)
DESCRIPTOR_BYTES = array.array("i").itemsize

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_TIMEVAL = struct.Struct("@ll")
_FOREVER = _TIMEVAL.pack(0, 0)


class PlainIo:
    """A TCP or Unix socket."""

    read_ahead = False
    """Bytes read from the socket are buffered and not received yet: polling the socket would miss them."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._limits_s: dict[int, float] = {}  # the kernel's current time limits, by option
        connection.setblocking(True)

    def handshake(self, deadline_s: float) -> None:
        """Do nothing: without TLS there is no handshake."""

    def send(self, pieces: Sequence[memoryview], deadline_s: float, descriptors: Sequence[int] = ()) -> None:
        """Send all pieces, in order; file descriptors travel with the first byte."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        left_bytes = sum(piece.nbytes for piece in pieces)
        while left_bytes:
            self._limit(socket.SO_SNDTIMEO, deadline_s)
            try:
                sent = self.connection.sendmsg(pieces[:IOVECS_MAX], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:  # the limit, which may be earlier than the deadline
                continue
            left_bytes -= sent
            if left_bytes:
                pieces, ancillary = rest_of(pieces, sent), []

    def receive(self, pieces: Sequence[memoryview], deadline_s: float) -> None:
        """Fill all pieces, in order."""
        left_bytes = sum(piece.nbytes for piece in pieces)
        while left_bytes:
            self._limit(socket.SO_RCVTIMEO, deadline_s)
            try:
                if len(pieces) == 1:
                    received = self.connection.recv_into(pieces[0], 0, socket.MSG_WAITALL)
                else:
                    received = self.connection.recvmsg_into(pieces[:IOVECS_MAX], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            if received == 0:
                raise EOFError
            left_bytes -= received
            if left_bytes:
                pieces = rest_of(pieces, received)

    def receive_with_descriptors(self, piece: memoryview, deadline_s: float, count_max: int) -> list[int]:
        """Fill a piece; return its file descriptors, at most `count_max` + 1, which the caller must close."""
        space_bytes = socket.CMSG_SPACE((count_max + 1) * DESCRIPTOR_BYTES)
        flags = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
        while True:
            self._limit(socket.SO_RCVTIMEO, deadline_s)
            try:
                received, ancillary, _, _ = self.connection.recvmsg_into([piece], space_bytes, flags)
                break
            except BlockingIOError:
                continue
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(content[: len(content) - len(content) % DESCRIPTOR_BYTES])
        try:
            if received == 0:
                raise EOFError
            self.receive(rest_of([piece], received), deadline_s)
        except BaseException:
            close_descriptors(descriptors)
            raise
        return list(descriptors)

    def _limit(self, option: int, deadline_s: float) -> None:
        """Make the kernel end the next call by its deadline, or earlier: then there is time for another call."""
        before_s = self._limits_s.get(option, 0.0)
        limit_s = _limit_of(deadline_s, before_s)
        if limit_s != before_s:
            self.connection.setsockopt(socket.SOL_SOCKET, option, _timeval(limit_s))
            self._limits_s[option] = limit_s


class TlsIo:
    """A TCP socket inside TLS: a client that expects `server_name`, or the server if that is None.

    OpenSSL reads and writes the socket itself, without the interpreter's lock: a piece is sent by one call, received by
    one for each record. Python enforces the time limits: they bound a call as a whole, even if the peer reads slowly.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, server_name: str | None) -> None:
        self.connection = context.wrap_socket(
            connection, server_side=server_name is None, server_hostname=server_name, do_handshake_on_connect=False
        )
        self._limit_s = 0.0
        self._certificate: dict[str, Any] = {}

    def handshake(self, deadline_s: float) -> None:
        self._whole(deadline_s, self.connection.do_handshake)
        self._certificate = self.connection.getpeercert() or {}  # a socket that is closed has none

    @property
    def read_ahead(self) -> bool:
        return self.connection.pending() > 0

    def peer_certificate(self) -> dict[str, Any]:
        """Return the peer's certificate, which TLS has verified, after the handshake."""
        return self._certificate

    def send(self, pieces: Sequence[memoryview], deadline_s: float, descriptors: Sequence[int] = ()) -> None:
        assert not descriptors, "file descriptors travel over Unix sockets, and those have no TLS"
        for piece in _in_records(pieces):
            self._whole(deadline_s, self.connection.write, piece)

    def receive(self, pieces: Sequence[memoryview], deadline_s: float) -> None:
        read, limited_until_s = self.connection.read, -math.inf
        for piece in pieces:
            position, size_bytes = 0, piece.nbytes
            while position < size_bytes:
                if time.monotonic() >= limited_until_s:
                    limited_until_s = self._limit(deadline_s)
                try:
                    received: Any = read(size_bytes - position, piece[position:])  # of one record
                except TimeoutError as error:
                    _check_own(error)
                    continue
                if received == 0:
                    raise EOFError
                position += received

    def receive_with_descriptors(self, piece: memoryview, deadline_s: float, count_max: int) -> list[int]:
        self.receive([piece], deadline_s)
        return []

    def _whole(self, deadline_s: float, call: Callable[..., Any], *given: Any) -> None:
        """Repeat a call until it completes; after a time limit OpenSSL continues where it stopped."""
        while True:
            self._limit(deadline_s)
            try:
                with no_sigpipe():  # OpenSSL has no MSG_NOSIGNAL
                    call(*given)
                return
            except TimeoutError as error:
                _check_own(error)

    def _limit(self, deadline_s: float) -> float:
        """Make Python end a call by its deadline, or earlier; return the time until which new calls are covered."""
        if self.connection.fileno() < 0:
            raise EOFError
        limit_s = _limit_of(deadline_s, self._limit_s)
        if limit_s != self._limit_s:
            self.connection.settimeout(None if math.isinf(limit_s) else limit_s)
            self._limit_s = limit_s
        return math.inf if math.isinf(limit_s) else deadline_s - limit_s


def _check_own(error: TimeoutError) -> None:
    """Raise the error again if it is the kernel's, not our time limit: the peer's host is gone."""
    if error.errno is not None:
        raise error


def _in_records(pieces: Sequence[memoryview]) -> Iterator[memoryview | bytes]:
    """Yield pieces, with neighbours shorter than a record joined: each one sent begins a new record."""
    short: list[memoryview] = []
    short_bytes = 0
    for piece in pieces:
        if short and short_bytes + piece.nbytes > RECORD_BYTES:
            yield b"".join(short)
            short, short_bytes = [], 0
        if piece.nbytes >= RECORD_BYTES:
            yield piece
        else:
            short.append(piece)
            short_bytes += piece.nbytes
    if short:
        yield b"".join(short)


def tune(connection: socket.socket) -> None:
    """Set TCP_NODELAY and keep-alive; small buffers only within a host: between hosts they cover bytes in flight."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if connection.getpeername()[0] == connection.getsockname()[0]:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, LOCAL_BUFFER_BYTES)


def connected(path: str, deadline_s: float) -> socket.socket:
    """Return a connection to a Unix socket of this user or of root, or raise Unreachable."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        connection.connect(path)
        if not is_own_user(connection):
            raise Unreachable("another user listens there", peer=path)
        return connection
    except OSError as error:
        connection.close()
        raise Unreachable(f"cannot connect: {error}", peer=path) from None
    except BaseException:
        connection.close()
        raise


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket is this user's, or root's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] in (os.getuid(), 0)


def rest_of(pieces: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """Return the rest of pieces after their first `done_bytes`."""
    for index, piece in enumerate(pieces):
        if done_bytes < piece.nbytes:
            return [piece[done_bytes:], *pieces[index + 1 :]]
        done_bytes -= piece.nbytes
    return []


def close_descriptors(descriptors: Sequence[int] | array.array[int]) -> None:
    """Close unwanted file descriptors."""
    for descriptor in descriptors:
        socket.close(descriptor)


def _limit_of(deadline_s: float, before_s: float) -> float:
    """Return a call's time limit, within its deadline; an earlier call's limit if it is at least half the time left."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    if before_s <= left_s and (2 * before_s >= left_s or math.isinf(before_s)):
        return before_s
    return left_s if left_s < SHORT_LIMIT_S else LIMIT_FACTOR * left_s


def _timeval(limit_s: float) -> bytes:
    if math.isinf(limit_s):
        return _FOREVER
    microseconds = max(1, int(limit_s * 1e6))  # 0 would mean no limit
    return _TIMEVAL.pack(microseconds // 1_000_000, microseconds % 1_000_000)
