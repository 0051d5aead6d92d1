"""A stream server on loopback for a test, and what connects to it."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from parashard._proto import stream_pb2
from parashard.transports.stream import Kind, Stream
from parashard_server.serving.stream_server import StreamServer
from support.waiting import DEADLINE_S

HELLO = stream_pb2.Hello(worker="worker-0")


def soon() -> float:
    return time.monotonic() + DEADLINE_S


def echo(stream: Stream) -> None:
    """Answer each HELLO with a WELCOME until the peer leaves."""
    while True:
        stream.wait()
        stream.receive(deadline_s=soon())
        stream.greeted = True
        stream.send(Kind.WELCOME, stream_pb2.Welcome(elements=5), deadline_s=soon())


@contextmanager
def serving(
    serve: Callable[[Stream], None],
    connections_max: int = 8,
    tls: Callable[[], ssl.SSLContext] | None = None,
    calls: Sequence[str] = (),
) -> Iterator[tuple[StreamServer, Callable[[], Stream]]]:
    """Yield a server and what connects to it; both ends are gone afterwards."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listening.getsockname()[1]
    server = StreamServer(listening, serve, connections_max=connections_max, name="data", tls=tls, calls=calls)
    clients: list[Stream] = []

    def connect() -> Stream:
        clients.append(Stream(socket.create_connection(("127.0.0.1", port), DEADLINE_S), "shard:1"))
        return clients[-1]

    server.start()
    try:
        yield server, connect
    finally:
        server.stop()
        for client in clients:
            client.close()
    assert server.connections == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data")]


def all_left() -> None:
    """Wait until the server has no connection any more."""
    for thread in threading.enumerate():
        if thread.name == "data":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
