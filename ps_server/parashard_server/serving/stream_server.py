"""StreamServer: takes connections on a listening socket and gives each a thread.

Owns the sockets, the threads, their bounds, and the refusal of excess connections. Knows no messages: `serve`, in
`parashard_server.serving.stream_services`, handles them.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from parashard.errors import NotReady, ParashardError, PeerFailed, QueueFull, Unreachable
from parashard.process.addresses import join_address
from parashard.process.logs import log
from parashard.security.identity import check_call
from parashard.transports.socket_io import tune
from parashard.transports.stream import Kind, Stream, refusal

HELLO_DEADLINE_S = 5.0  # for a peer to identify itself: its TLS handshake and its HELLO
REFUSAL_DEADLINE_S = 1.0
STOP_DEADLINE_S = 5.0
CLOSING_MAX = 64  # connections being closed, which do not count; beyond them a refusal is not explained
ACCEPT_PAUSE_S = 0.1  # after a failed accept, as when the machine is out of descriptors


class StreamServer:
    """A server of streams.

    `serve` serves one connection until it ends. A `ParashardError` that it raises is sent to the peer; then the
    connection is closed. A connection beyond `connections_max` evicts the oldest one without a valid HELLO, so that
    silent peers lock no worker out. If there is none, it is refused with `QueueFull`.
    """

    def __init__(
        self,
        listening: socket.socket,  # the server closes it
        serve: Callable[[Stream], None],
        *,
        connections_max: int,
        name: str,  # of its threads, and in logs
        tls: Callable[[], ssl.SSLContext] | None = None,  # its context requires a certificate
        calls: Sequence[str] = (),  # the RPCs that its streams stand for: a peer's certificate must allow each of them
    ) -> None:
        self._listening = listening
        self.address = address_of(listening.getsockname())
        """Where it listens: host:port, or the path of a Unix socket."""
        self._serve = serve
        self._connections_max = connections_max
        self._name = name
        self._tls = tls
        self._calls = calls
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._open: dict[Stream, threading.Thread] = {}  # the oldest first
        self._closing: set[Stream] = set()  # of these: the evicted and the refused, which do not count any more
        self.turned_away = 0
        """Number of connections refused for lack of room, and of silent ones evicted for a new one."""
        self._accepting = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def start(self) -> None:
        """Begin to take connections."""
        self._accepting.start()

    def stop(self) -> None:
        """Close every connection and wait for the threads; a push in the shard completes, but is not answered."""
        self._stopping.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes accept
        deadline_s = time.monotonic() + STOP_DEADLINE_S
        _join(self._accepting, deadline_s)
        with self._lock:
            still_open = dict(self._open)
        for stream in still_open:
            stream.close()
        for thread in still_open.values():
            _join(thread, deadline_s)
        self._listening.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, address = self._listening.accept()
            except OSError as error:
                # Out of descriptors, most likely: connections in the backlog are accepted once others have ended.
                if not self._stopping.wait(ACCEPT_PAUSE_S):
                    log.warning("accept-failed", server=self._name, error=str(error))
                continue
            try:
                self._admit(connection, address)
            except OSError:  # the peer is gone already
                connection.close()

    def _admit(self, connection: socket.socket, address: Any) -> None:
        tune(connection)
        tls = None if self._tls is None else self._tls()
        stream = Stream(connection, address_of(address) or "a process on this host", tls=tls)
        refused = self._refusal()
        with self._lock:
            if refused is not None and len(self._closing) >= CLOSING_MAX:
                stream.close()  # too many refusals are in progress already
                return
            thread = threading.Thread(target=self._converse, args=(stream, refused), name=self._name, daemon=True)
            self._open[stream] = thread
            if refused is not None:
                self._closing.add(stream)
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no thread for it
            self._forget(stream)
            self.turned_away += 1
            if self._tls is None:  # inside TLS a refusal needs a handshake, for which this thread must not wait
                self._refuse(stream, QueueFull(str(error)))
            stream.close()

    def _refusal(self) -> ParashardError | None:
        """Make room for one more connection; return None, or the error that refuses it."""
        with self._lock:
            if self._stopping.is_set():
                return NotReady("the shard is stopping")
            count = len(self._open) - len(self._closing)
            if count < self._connections_max:
                return None
            self.turned_away += 1
            silent = (stream for stream in self._open if not stream.greeted and stream not in self._closing)
            evicted = next(silent, None)
            if evicted is None:
                return QueueFull(f"{count} connections are open here; at most {self._connections_max} may be")
            self._closing.add(evicted)
        evicted.close()  # its thread does the rest
        return None

    def _converse(self, stream: Stream, refused: ParashardError | None) -> None:
        try:
            stream.handshake(deadline_s=time.monotonic() + HELLO_DEADLINE_S)
            if refused is not None:
                raise refused
            if self._tls is not None:
                uris = stream.peer_uris()
                for method in self._calls:
                    check_call(method, uris)
            self._serve(stream)
        except Unreachable:
            pass  # the peer is gone
        except ParashardError as error:
            self._refuse(stream, error)
        except Exception as error:  # whatever broke, the peer gets an error
            log.exception("call-broke", server=self._name, peer=stream.peer)
            self._refuse(stream, PeerFailed(f"{type(error).__name__}: {error}"))
        finally:
            stream.close()
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        with self._lock:
            del self._open[stream]
            self._closing.discard(stream)

    def _refuse(self, stream: Stream, error: ParashardError) -> None:
        with suppress(Unreachable):
            stream.send(Kind.REFUSAL, refusal(error), deadline_s=time.monotonic() + REFUSAL_DEADLINE_S)


def _join(thread: threading.Thread, deadline_s: float) -> None:
    """Wait until a thread has ended, if it was started."""
    if thread.ident is not None:
        thread.join(max(0.0, deadline_s - time.monotonic()))


def address_of(name: Any) -> str:
    """Return a socket's name as text: host:port, or a path, which is empty for the client's end of a Unix socket."""
    return join_address(*name[:2]) if isinstance(name, tuple) else str(name)
