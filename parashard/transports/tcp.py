"""The TCP transport: pushes and pulls without a copy between the arrays and the kernel's socket buffers.

Owns the client's side of the dialogue; `parashard_server.serving.stream_services` has the other. Knows no plan, no step
and no retry. Checks a shard's header before any byte of its payload is written.

The system's lookup of a name has no time limit: with a name server that does not answer it takes many seconds. So it
runs on its own thread, one for each name that is being looked up, and the caller stops waiting at the deadline.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from parashard.errors import LimitExceeded, MalformedFrame, Unreachable
from parashard.protocol import wire
from parashard.protocol.messages import NO_KEYS, Ack, Buffers, Fetched, PullRun, Push, fetched
from parashard.security.identity import Role, identities_in, in_words
from parashard.transports.base import Greeting, Pending, ReadRows, ShardAddress, no_rows
from parashard.transports.connections import Connections, Exchange, StreamTransport
from parashard.transports.socket_io import tune
from parashard.transports.stream import Kind, Stream, greet, receive_answer

CONNECT_S = 2.0  # for one address of a name that has several

_Addresses = list[tuple[int, int, int, str, Any]]  # as of `socket.getaddrinfo`

_lookups_lock = threading.Lock()
_pending_lookups: dict[tuple[str, int], Future[_Addresses]] = {}  # names that are being looked up now


class TcpTransport(StreamTransport[Stream]):
    """Connections to one shard, by its `data_address`; with `tls` inside TLS, with the context that it returns."""

    def __init__(
        self, where: ShardAddress, greeting: Greeting, *, tls: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        self._address = where.data_address
        self._greeting = greeting
        self._tls = tls
        self._push_bytes_max = 0
        super().__init__(Connections(self._connect, self._address))

    def push(self, push: Push, deadline_s: float) -> Pending[Ack]:
        """Send a push."""
        deadline_s += time.monotonic()
        ask = partial(self._ask_push, push, deadline_s)
        return Exchange(self._connections, ask, partial(_ack, deadline_s=deadline_s), deadline_s)

    def pull(self, run: PullRun, into: Buffers, deadline_s: float, read: ReadRows = no_rows) -> Pending[Fetched]:
        """Ask for a run and for rows."""
        deadline_s += time.monotonic()
        answered = partial(_weights, run=run, into=into, read=read, deadline_s=deadline_s)
        return Exchange(self._connections, partial(_ask_pull, run=run, deadline_s=deadline_s), answered, deadline_s)

    def _ask_push(self, push: Push, deadline_s: float, stream: Stream) -> None:
        if push.payload.nbytes > self._push_bytes_max:
            raise LimitExceeded(
                f"step {push.step}: a push of {push.payload.nbytes} bytes; the shard takes {self._push_bytes_max}",
                peer=self._address,
            )
        stream.send(Kind.PUSH, wire.push_header(push), push.payload.pieces, deadline_s=deadline_s)

    def _connect(self, deadline_s: float) -> Stream:
        host, _, port = self._address.rpartition(":")
        host = host.strip("[]")
        try:
            connection = dial(host, int(port), deadline_s)
        except OSError as error:
            raise Unreachable(f"no answer: {error}", peer=self._address) from None
        try:
            tune(connection)
            tls = None if self._tls is None else self._tls()
            stream = Stream(connection, self._address, tls=tls, server_name=host)
        except OSError as error:
            connection.close()
            raise Unreachable(f"the peer disconnected: {error}", peer=self._address) from None
        except BaseException:
            connection.close()
            raise
        if tls is not None:
            _prove(stream, deadline_s)
        welcome, _ = greet(stream, self._greeting, deadline_s=deadline_s)
        self._push_bytes_max = welcome.push_bytes_max
        return stream


def _prove(stream: Stream, deadline_s: float) -> None:
    """Check that the server's certificate has the role of a shard; TLS has checked its name."""
    try:
        stream.handshake(deadline_s=deadline_s)
        identities = identities_in(stream.peer_uris())
        if not any(identity.role is Role.SHARD for identity in identities):
            raise Unreachable(
                f"the server is no shard: its certificate's roles are {in_words(identities)}", peer=stream.peer
            )
    except BaseException:
        stream.close()
        raise


def _ack(stream: Stream, deadline_s: float) -> Ack:
    return wire.ack(receive_answer(stream, Kind.ACK, deadline_s=deadline_s).header)


def _ask_pull(stream: Stream, run: PullRun, deadline_s: float) -> None:
    keys = wire.keys_payload(run) if run.keys else ()
    stream.send(Kind.PULL, wire.pull_header(run), keys, deadline_s=deadline_s)


def _weights(stream: Stream, run: PullRun, into: Buffers, read: ReadRows, deadline_s: float) -> Fetched:
    """Receive the parts of the answer to a pull into their places; return the combined result."""
    left, end, received = run, run.offset_bytes + run.length_bytes, 0
    found: list[Fetched] = []
    while True:
        head = receive_answer(stream, Kind.WEIGHTS, deadline_s=deadline_s)
        reply = head.header
        rows_bytes = wire.rows_bytes_of(reply, left) if left.keys or reply.tables else 0
        runs = wire.runs_within(reply, left, head.payload_bytes - rows_bytes)
        if not (head.payload_bytes or reply.tables or reply.last):
            raise MalformedFrame("a part of an answer with nothing in it", peer=stream.peer)
        views = [
            view
            for offset, length in runs
            for view in into.run(offset - run.offset_bytes, offset - run.offset_bytes + length)
        ]
        rows = np.empty(rows_bytes, np.uint8).data
        stream.receive_into([*views, rows], deadline_s=deadline_s)
        if left.keys:
            read(wire.rows_from(reply, rows, left))
        found.append(Fetched(reply.version, reply.waited_s))
        received += head.payload_bytes - rows_bytes
        if reply.last:
            break
        position = sum(runs[-1]) if runs else left.offset_bytes
        left = left._replace(offset_bytes=position, length_bytes=end - position, keys=NO_KEYS)
    wire.check_answered(run, received, peer=stream.peer)
    return fetched(found)


def dial(host: str, port: int, deadline_s: float) -> socket.socket:
    """Connect to the first address of a host that accepts, by a moment of `time.monotonic()`."""
    # Raises the OSError of the last address or of the lookup; `TimeoutError` at the deadline.
    failure: OSError | None = None
    for family, kind, protocol, _, address in addresses_of(host, port, deadline_s):
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


def addresses_of(host: str, port: int, deadline_s: float) -> _Addresses:
    """Return a host's addresses, as `socket.getaddrinfo` does, by a moment of `time.monotonic()`."""
    try:
        return _lookup(host, port, socket.AI_NUMERICHOST)  # no name server is asked
    except socket.gaierror:
        pass
    with _lookups_lock:
        future = _pending_lookups.get((host, port))
        if future is None:
            future = Future()
            thread = threading.Thread(target=_look_up, args=(host, port, future), name=f"lookup-{host}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the machine has no thread for it
                raise OSError(str(error)) from None
            _pending_lookups[host, port] = future
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
    with _lookups_lock:  # later callers start a new lookup
        _pending_lookups.pop((host, port), None)
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(found)


def _lookup(host: str, port: int, flags: int) -> _Addresses:
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name: {error}") from None
