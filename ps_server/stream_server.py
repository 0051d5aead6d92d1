"""StreamServer: takes connections on a listening socket and gives each a thread.

Owns the sockets, the threads, how many there may be, and what is said before a connection is closed on its peer. Does
not know what is said on them: that is `serve`, of `ps_server.tcp_service` or `ps_server.shm_service`. Called by
`ps_server.data_ports`.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import structlog

from parashard.errors import ParashardError, PeerFailed, QueueFull, Unreachable
from parashard.rpc import join_address
from parashard.security.roles import check_call
from parashard.transports.socket_io import tune
from parashard.transports.stream import Kind, Stream, refusal

HELLO_DEADLINE_S = 5.0  # for a peer to say who it is: its TLS handshake and its HELLO
REFUSAL_DEADLINE_S = 1.0
STOP_DEADLINE_S = 5.0
ACCEPT_PAUSE_S = 0.1  # after the machine had no descriptor for a connection that waits

log = structlog.get_logger(__name__)


class StreamServer:
    """A server of streams.

    Parameters
    ----------
    listening : socket
        Bound and listening; the server closes it.
    serve : callable
        Talks with one peer until it ends. A `ParashardError` that it raises is sent to the peer; then the connection is
        closed.
    connections_max : int
        One more is refused with `QueueFull`; with TLS it takes the place of the oldest that has shown no certificate
        yet, so that silent strangers keep nobody out.
    name : str
        Of its threads, and in logs.
    tls : callable, optional
        Then every connection is inside TLS, with the context that it returns, which requires a certificate.
    calls : sequence of str
        What is asked for on its streams, as RPCs: with TLS, a peer's certificate must allow each of them.
    """

    def __init__(
        self,
        listening: socket.socket,
        serve: Callable[[Stream], None],
        *,
        connections_max: int,
        name: str,
        tls: Callable[[], ssl.SSLContext] | None = None,
        calls: Sequence[str] = (),
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
        self._unproven: set[Stream] = set()  # of these: whoever has shown no certificate yet
        self._accepting = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)

    @property
    def connections(self) -> int:
        """How many connections there are."""
        return len(self._open)

    def start(self) -> None:
        """Begin to take connections."""
        self._accepting.start()

    def stop(self) -> None:
        """Close every connection and wait for the threads; a push that has reached the shard is done, unanswered."""
        with self._lock:
            self._stopping.set()
            still_open = dict(self._open)
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes accept
        for stream in still_open:
            stream.close()
        deadline_s = time.monotonic() + STOP_DEADLINE_S
        for thread in (self._accepting, *still_open.values()):
            if thread.ident is not None:
                thread.join(max(0.0, deadline_s - time.monotonic()))
        self._listening.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, address = self._listening.accept()
            except OSError as error:
                # Out of descriptors, most likely: who waits outside comes in when another has left.
                if not self._stopping.wait(ACCEPT_PAUSE_S):
                    log.warning("accept-failed", server=self._name, error=str(error))
                continue
            try:
                self._admit(connection, address)
            except OSError:  # it is gone already
                connection.close()

    def _admit(self, connection: socket.socket, address: Any) -> None:
        tune(connection)
        if self._tls is not None:
            connection = self._tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        stream = Stream(connection, address_of(address) or "a process on this host")
        thread = threading.Thread(target=self._converse, args=(stream,), name=self._name, daemon=True)
        with self._lock:
            full = len(self._open) >= self._connections_max
            leaves = next((one for one in self._open if one in self._unproven), None) if full else None
            admitted = not self._stopping.is_set() and (not full or leaves is not None)
            if admitted:
                self._open[stream] = thread
                self._unproven.discard(leaves or stream)
                if self._tls is not None:
                    self._unproven.add(stream)
        if leaves is not None:
            leaves.close()  # its thread does the rest
        if not admitted:
            self._turn_away(stream, f"{self._connections_max} connections are open already")
            return
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no thread for it
            self._forget(stream)
            self._turn_away(stream, str(error))

    def _converse(self, stream: Stream) -> None:
        try:
            stream.handshake(deadline_s=time.monotonic() + HELLO_DEADLINE_S)
            if self._tls is not None:
                for method in self._calls:
                    check_call(method, stream.peer_uris())
                with self._lock:
                    self._unproven.discard(stream)
            self._serve(stream)
        except Unreachable:
            pass  # nobody is there to be told
        except ParashardError as error:
            self._refuse(stream, error)
        except Exception as error:  # the seam: whatever broke, the peer must hear of it
            log.exception("call-broke", server=self._name, peer=stream.peer)
            self._refuse(stream, PeerFailed(f"{type(error).__name__}: {error}"))
        finally:
            stream.close()
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        with self._lock:
            del self._open[stream]
            self._unproven.discard(stream)

    def _turn_away(self, stream: Stream, why: str) -> None:
        # With TLS nothing can be said before a handshake, and the accepting thread waits for nobody.
        if self._tls is None:
            self._refuse(stream, QueueFull(why))
        stream.close()

    def _refuse(self, stream: Stream, error: ParashardError) -> None:
        with suppress(Unreachable):
            stream.send(Kind.REFUSAL, refusal(error), deadline_s=time.monotonic() + REFUSAL_DEADLINE_S)


def address_of(name: Any) -> str:
    """Return a socket's name as text: host:port, or a path, which is empty for the client's end of a Unix socket."""
    return join_address(*name[:2]) if isinstance(name, tuple) else str(name)
