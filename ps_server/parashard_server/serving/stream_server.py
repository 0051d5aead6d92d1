"""StreamServer: takes connections on a listening socket and gives each a thread.

Owns the sockets, the threads, how many there may be and whose, and what is said before one is closed on its peer. Does
not know what is said on them: that is `serve`, of `parashard_server.serving.tcp_service` or
`parashard_server.serving.shm_service`. Called by `parashard_server.serving.listeners`.
"""

from __future__ import annotations

import math
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from parashard.errors import NotReady, ParashardError, PeerFailed, QueueFull, Unreachable
from parashard.process.logs import log
from parashard.protocol.rpc import join_address
from parashard.security.peers import peer_of_certificate, peer_of_host
from parashard.security.roles import check_call
from parashard.security.shares import Shares
from parashard.transports.socket_io import tune
from parashard.transports.stream import Kind, Stream, refusal

HELLO_DEADLINE_S = 5.0  # for a peer to say who it is: its TLS handshake and its HELLO
REFUSAL_DEADLINE_S = 1.0
STOP_DEADLINE_S = 5.0
ACCEPT_PAUSE_S = 0.1  # after the machine had no descriptor for a connection that waits


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
        How many there may be, and each peer its share. One more evicts the oldest unauthenticated one (with TLS:
        without a certificate yet; else: without a valid HELLO), of the same host where it is the host's share that
        is used up, so that silent peers lock no worker out. Where there is none it is refused with `QueueFull`.
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
        self._unproven: set[Stream] = set()  # of these: those without a certificate yet; without TLS all
        self._counted: set[Stream] = set()  # of these: those that count in a share; evicted ones do not
        self._shares = Shares(connections_max, alone_s=math.inf)
        self.turned_away = 0
        """Connections refused for want of room, and unauthenticated ones evicted for a new one."""
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
                # Out of descriptors, most likely: connections in the backlog are accepted once others have ended.
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
        stream.counted_for = peer_of_host(address[0]) if isinstance(address, tuple) else ""
        thread = threading.Thread(target=self._converse, args=(stream,), name=self._name, daemon=True)
        with self._lock:
            admitted = not self._stopping.is_set() and self._shares.take(stream.counted_for, 1, time.monotonic())
            leaves = None if admitted or self._stopping.is_set() else self._replaced(stream.counted_for)
            if admitted or leaves is not None:
                self._open[stream] = thread
                self._counted.add(stream)
                self._unproven.add(stream)
        if leaves is not None:
            leaves.close()  # its thread does the rest
        elif not admitted:
            taken = QueueFull(self._full(stream.counted_for))
            self._turn_away(stream, NotReady("the shard is stopping") if self._stopping.is_set() else taken)
            return
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no thread for it
            self._forget(stream)
            self._turn_away(stream, QueueFull(str(error)))

    def _converse(self, stream: Stream) -> None:
        try:
            stream.handshake(deadline_s=time.monotonic() + HELLO_DEADLINE_S)
            if self._tls is not None:
                self._prove(stream)
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

    def _prove(self, stream: Stream) -> None:
        """Check the certificate that a peer has shown; from now on the connection counts for that identity."""
        uris = stream.peer_uris()
        for method in self._calls:
            check_call(method, uris)
        peer = peer_of_certificate(uris)
        with self._lock:
            if stream not in self._unproven:
                raise Unreachable("the connection was evicted for a newer one")
            self._give_back(stream)
            if not self._shares.take(peer, 1, time.monotonic()):
                self.turned_away += 1
                raise QueueFull(self._full(peer))
            stream.counted_for = peer
            self._counted.add(stream)
            self._unproven.discard(stream)

    def _replaced(self, host: str) -> Stream | None:
        """Return the connection to evict for a new one, and transfer its share; None: there is none to evict."""
        quiet = [stream for stream in self._unproven if not stream.greeted and stream in self._counted]
        if not self._shares.fits(1):  # evict from the host that holds the most
            host_of_most = Counter(stream.counted_for for stream in quiet).most_common(1)
            giver = host_of_most[0][0] if host_of_most else host
        else:
            giver = host
        among = {stream for stream in quiet if stream.counted_for == giver}
        leaves = next((stream for stream in self._open if stream in among), None)
        if leaves is not None:
            self._counted.discard(leaves)
            self._unproven.discard(leaves)
            self._shares.transfer(giver, host, 1)
            self.turned_away += 1
        return leaves

    def _give_back(self, stream: Stream) -> None:
        if stream in self._counted:
            self._counted.discard(stream)
            self._shares.give_back(stream.counted_for, 1)

    def _full(self, peer: str) -> str:
        mine, everybodys = self._shares.of(peer), self._shares.held
        return f"{peer or 'this host'} has {mine} connections here, of {everybodys}; {self._connections_max} may be"

    def _forget(self, stream: Stream) -> None:
        with self._lock:
            del self._open[stream]
            self._unproven.discard(stream)
            self._give_back(stream)

    def _turn_away(self, stream: Stream, error: ParashardError) -> None:
        self.turned_away += 1
        # With TLS nothing can be said before a handshake, and the accepting thread must not wait for a peer.
        if self._tls is None:
            self._refuse(stream, error)
        stream.close()

    def _refuse(self, stream: Stream, error: ParashardError) -> None:
        with suppress(Unreachable):
            stream.send(Kind.REFUSAL, refusal(error), deadline_s=time.monotonic() + REFUSAL_DEADLINE_S)


def address_of(name: Any) -> str:
    """Return a socket's name as text: host:port, or a path, which is empty for the client's end of a Unix socket."""
    return join_address(*name[:2]) if isinstance(name, tuple) else str(name)
