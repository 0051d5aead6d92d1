"""A scripted peer: a loopback socket whose other end says what a test wants, however wrong."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from parashard._proto import stream_pb2
from parashard.transports import socket_io
from parashard.transports.stream import Kind, Stream
from support.waiting import DEADLINE_S


def soon() -> float:
    """Return a deadline that a test meets unless something hangs."""
    return time.monotonic() + DEADLINE_S


@contextmanager
def deadlines_passed() -> Iterator[None]:
    """Expire the deadline of any wait on a socket of this process."""
    late = SimpleNamespace(monotonic=lambda: time.monotonic() + 10 * DEADLINE_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket_io, "time", late)
        yield


def raw(
    kind: int, header: bytes = b"", payload_bytes: int = 0, *, magic: bytes = b"PSS1", reserved: bytes = b""
) -> bytes:
    """Return the beginning of a message, as `protos/stream.proto` lays it out, with any lengths and any kind."""
    return struct.pack("<4sB3sIQ", magic, kind, reserved, len(header), payload_bytes) + header


@contextmanager
def stream_pair() -> Iterator[tuple[Stream, Stream]]:
    """Yield two connected streams."""
    mine, theirs = socket.socketpair()
    streams = Stream(mine, "their-end"), Stream(theirs, "my-end")
    try:
        yield streams
    finally:
        for stream in streams:
            stream.close()


@contextmanager
def peer(*scripts: Callable[[Stream], None], push_bytes_max: int = 1 << 30) -> Iterator[str]:
    """Yield the address of a peer that welcomes one connection for each script and then follows it.

    What goes wrong in a script fails the test.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(len(scripts) + 1) as pool:
        listening.settimeout(DEADLINE_S)

        def accept() -> list[Future[None]]:
            return [pool.submit(_converse, listening.accept()[0], script, push_bytes_max) for script in scripts]

        accepting = pool.submit(accept)
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        for conversation in accepting.result(DEADLINE_S):
            conversation.result(DEADLINE_S)


def _converse(connection: socket.socket, script: Callable[[Stream], None], push_bytes_max: int) -> None:
    connection.setblocking(True)
    stream = Stream(connection, "client")
    try:
        assert stream.receive(deadline_s=soon()).kind is Kind.HELLO
        stream.send(Kind.WELCOME, stream_pb2.Welcome(push_bytes_max=push_bytes_max), deadline_s=soon())
        script(stream)
    finally:
        stream.close()
