"""Peers that mean harm to a running job: what they open, declare and never read, on every port of its services.

They come from an address, and with a certificate, that no process of the job has.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from parashard._proto import stream_pb2, tensor_pb2
from parashard.errors import ParashardError, Unreachable
from parashard.protocol import wire
from parashard.protocol.messages import Target
from parashard.transports.base import Greeting
from parashard.transports.stream import Kind, Stream, greet
from support.http2_frames import (
    CONTINUATION,
    DATA,
    DEADLINE_S,
    END_HEADERS,
    HEADERS,
    PREFACE,
    begun,
    frame,
    integer,
    received,
    request_headers,
    text_literal,
)

HOST = "127.0.0.2"
HUGE = 100 << 30
METADATA_VALUE_BYTES = 15_000  # in one frame, which may have 16 KiB
DRIP_S = 0.2
FULL_S = 0.1  # a connection that takes nothing for so long is full


class Hostile:
    """All connections of the attack; `close` ends every one.

    Parameters
    ----------
    context : callable, optional
        Returns what a worker's certificate is shown with, where the job is inside TLS.
    """

    def __init__(self, context: Callable[[], ssl.SSLContext] | None) -> None:
        self._context = context() if context else None
        if self._context:
            self._context.set_alpn_protocols(["h2"])  # which gRPC asks for, and streams do not mind
        self._sockets: list[socket.socket] = []
        self._streams: list[Stream] = []  # each owns its socket
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for connection in [*self._sockets, *self._streams]:
            connection.close()

    def silent(self, address: str, count: int) -> list[socket.socket]:
        """Connect so often and say nothing."""
        return [self._connected(address) for _ in range(count)]

    def slow(self, addresses: Sequence[str], count: int) -> None:
        """Begin so many handshakes at each address and send a byte of them now and then, again and again."""
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) if self._context else PREFACE + bytes(500)
        dripping = [(address, self._connected(address)) for address in addresses for _ in range(count)]

        def drip() -> None:
            position = 0
            while not self._stopping.wait(DRIP_S):
                byte = hello[position % len(hello) :][:1]
                position += 1
                for index, (address, connection) in enumerate(dripping):
                    try:
                        connection.send(byte)
                    except OSError:  # it was ended; so begins another
                        connection.close()
                        with suppress(OSError):
                            dripping[index] = (address, self._connected(address))

        self._threads.append(threading.Thread(target=drip, name="drip", daemon=True))
        self._threads[-1].start()

    def _connected(self, address: str) -> socket.socket:
        self._sockets.append(self._opened(address))
        return self._sockets[-1]

    @staticmethod
    def _opened(address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), DEADLINE_S, source_address=(HOST, 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each HELLO inside TLS takes 40 ms
        return connection

    def _secured(self, address: str) -> socket.socket:
        """Return a connection on which a handshake is done, where the job wants one."""
        connection = self._connected(address)
        if self._context is None:
            return connection
        inside = self._context.wrap_socket(connection, server_hostname=address.rpartition(":")[0])
        self._sockets[-1] = inside
        return inside

    # --- streams ---

    def worker_stream(self, address: str, target: Target) -> tuple[Stream, stream_pb2.Welcome]:
        """Return a stream on which a right HELLO was said."""
        server_name = address.rpartition(":")[0]
        stream = Stream(self._opened(address), "shard", tls=self._context, server_name=server_name)
        self._streams.append(stream)
        return stream, greet(stream, Greeting(target, "hog"), deadline_s=time.monotonic() + DEADLINE_S)[0]

    def greeted_until_refused(self, address: str, target: Target, most: int) -> bool:
        """Open streams that say HELLO and no more, and stay open; return whether one of so many was refused."""
        for _ in range(most):
            try:
                self.worker_stream(address, target)
            except (OSError, ParashardError):
                return True
        return False

    def lies(self, address: str, target: Target) -> int:
        """Declare 100 GiB and more in every field that can; return how many such connections the shard ended."""
        header = tensor_pb2.PushHeader(target=wire.target_message(target), worker="hog", total_bytes=HUGE)
        content = header.SerializeToString()
        ended = 0
        for head_bytes, payload_bytes in ((len(content), HUGE), (len(content), 2**64 - 1), (2**32 - 1, HUGE)):
            stream, _ = self.worker_stream(address, target)
            prefix = struct.pack("<4sB3sIQ", b"PSS1", Kind.PUSH, b"", head_bytes, payload_bytes)
            ended += _refused_and_ended(stream, prefix + content)
        return ended

    def pushes_without_payload(self, address: str, target: Target, count: int) -> int:
        """Declare pushes and send nothing of them, so that their buffers are held; return how many were refused."""
        waiting = []
        for _ in range(count):
            stream, welcome = self.worker_stream(address, target)
            size = welcome.push_bytes_max
            header = tensor_pb2.PushHeader(target=wire.target_message(target), worker="hog", total_bytes=size)
            content = header.SerializeToString()
            prefix = struct.pack("<4sB3sIQ", b"PSS1", Kind.PUSH, b"", len(content), size)
            stream._io.send([memoryview(prefix + content)], time.monotonic() + DEADLINE_S)
            waiting.append((stream, size))
        refused = 0
        for stream, size in waiting[-4:]:  # a refusal comes once the payload is there: so the last ones tell
            with suppress(OSError, ParashardError):
                stream._io.send([memoryview(bytes(size))], time.monotonic() + DEADLINE_S)
                refused += stream.receive(deadline_s=time.monotonic() + DEADLINE_S).kind is Kind.REFUSAL
        return refused

    def pulls_unread(self, address: str, target: Target, count: int) -> None:
        """Ask for all weights again and again, and read nothing."""
        for _ in range(count):
            stream, welcome = self.worker_stream(address, target)
            header = tensor_pb2.PullHeader(target=wire.target_message(target), length_bytes=welcome.push_bytes_max)
            content = header.SerializeToString()
            one = struct.pack("<4sB3sIQ", b"PSS1", Kind.PULL, b"", len(content), 0) + content
            with suppress(OSError):  # its buffer is full
                for _ in range(1000):
                    stream._io.send([memoryview(one)], time.monotonic() + FULL_S)

    # --- HTTP/2, by hand: gRPC's own client would not say any of this ---

    def http2(self, address: str) -> socket.socket:
        """Return a connection that has begun with HTTP/2."""
        return begun(self._secured(address))

    def calls_without_message(self, address: str, method: str, count: int) -> None:
        """Begin calls on one connection and send no message."""
        connection = self.http2(address)
        for number in range(count):
            connection.sendall(frame(HEADERS, END_HEADERS, 2 * number + 1, request_headers(method)))

    def huge_message(self, address: str, method: str, text: bytes) -> bytes:
        """Declare the longest message that gRPC's prefix can, 4 GiB; return what is said to that."""
        connection = self.http2(address)
        declared = b"\0" + struct.pack(">I", 2**32 - 1) + bytes(1000)
        call = frame(HEADERS, END_HEADERS, 1, request_headers(method)) + frame(DATA, 0, 1, declared)
        connection.sendall(call)
        return received(connection, text)

    def huge_metadata(self, address: str, method: str, bytes_: int, text: bytes) -> bytes:
        """Send a call whose metadata has so many bytes; return what is said to that."""
        connection = self.http2(address)
        connection.sendall(frame(HEADERS, 0, 1, request_headers(method)))
        value = integer(METADATA_VALUE_BYTES, 7) + b"x" * METADATA_VALUE_BYTES
        for number in range(bytes_ // METADATA_VALUE_BYTES):
            connection.sendall(frame(CONTINUATION, 0, 1, b"\x00" + text_literal(f"x-{number}") + value))
        connection.sendall(frame(CONTINUATION, END_HEADERS, 1, b"\x00" + text_literal("x-last") + text_literal("")))
        return received(connection, text)


def ended(connections: Sequence[socket.socket]) -> int:
    """Return how many the other side has closed."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN | select.POLLRDHUP)
    return sum(bool(events & (select.POLLRDHUP | select.POLLHUP | select.POLLERR)) for _, events in poll.poll(0))


def _refused_and_ended(stream: Stream, content: bytes) -> bool:
    stream._io.send([memoryview(content)], time.monotonic() + DEADLINE_S)
    refused = stream.receive(deadline_s=time.monotonic() + DEADLINE_S).kind is Kind.REFUSAL
    try:
        stream.receive(deadline_s=time.monotonic() + DEADLINE_S)
    except Unreachable:
        return refused
    return False
