"""Streams: messages over a connected socket, as `protos/stream.proto` lays them out.

Owns the layout of a message, its bounds, and the encoding of an error as a REFUSAL. Knows neither the meaning of
headers nor the order of messages: `parashard.transports.tcp`, `parashard.transports.shm` and their services do, on both
sides. `parashard.transports.socket_io` transfers the bytes and enforces time limits.

Every wait has a deadline, a moment of `time.monotonic()`; the one exception is `Stream.wait`. After any error the
stream may be in the middle of a message and is unusable: close it.
"""

from __future__ import annotations

import enum
import select
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError, Message

from parashard._proto import stream_pb2, tensor_pb2
from parashard.errors import LimitExceeded, MalformedFrame, ParashardError, PeerFailed, Unreachable
from parashard.protocol import wire
from parashard.transports.base import Greeting
from parashard.transports.socket_io import PlainIo, TlsIo, close_descriptors

MAGIC = b"PSS1"
HEADER_BYTES_MAX = 1 << 20
REFUSAL_BYTES_MAX = 2000  # of the message in a refusal
SKIP_BYTES = 256 << 10  # read at once of a payload that is skipped

_PREFIX = struct.Struct("<4sB3sIQ")


class Kind(enum.IntEnum):
    """Kind of a message."""

    HELLO = 1
    WELCOME = 2
    PUSH = 3
    ACK = 4
    PULL = 5
    WEIGHTS = 6
    REFUSAL = 7


HEADERS: dict[Kind, type[Message]] = {
    Kind.HELLO: stream_pb2.Hello,
    Kind.WELCOME: stream_pb2.Welcome,
    Kind.PUSH: tensor_pb2.PushHeader,
    Kind.ACK: tensor_pb2.PushReply,
    Kind.PULL: tensor_pb2.PullHeader,
    Kind.WEIGHTS: tensor_pb2.PullReply,
    Kind.REFUSAL: stream_pb2.Refusal,
}
WITH_PAYLOAD = (Kind.PUSH, Kind.PULL, Kind.WEIGHTS)
BROKEN = (OSError, EOFError)
"""What `parashard.transports.socket_io` raises; a deadline's TimeoutError is an OSError."""
_KINDS = {kind.value: kind for kind in Kind}


class Head(NamedTuple):
    """A message without its payload, which is still on the wire."""

    kind: Kind
    header: Any  # the message that `HEADERS` names
    payload_bytes: int
    descriptors: tuple[int, ...] = ()  # the receiver's to close


class Stream:
    """A connected stream socket that carries messages.

    One thread sends or receives at a time; any may close. On a shard, `greeted` is set once the peer has sent a valid
    HELLO. With `tls` the stream is inside TLS: a client that expects `server_name`, or the server if that is None.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> None:
        self.peer = peer
        self.greeted = False
        self._io = PlainIo(connection) if tls is None else TlsIo(connection, tls, server_name)
        self._connection = self._io.connection  # inside TLS a wrapper of the given one
        self._poll = select.poll()
        self._poll.register(self._connection, select.POLLIN)
        self._sending = threading.Lock()
        self._receiving = threading.Lock()

    def handshake(self, *, deadline_s: float) -> None:
        """Do the TLS handshake, if any; call it before everything else; it may be repeated."""
        try:
            with self._sending, self._receiving:
                self._io.handshake(deadline_s)
        except BROKEN as error:
            raise self._unreachable(error, "agree on keys") from None

    def peer_uris(self) -> list[str]:
        """Return the URIs in the subject alternative names of the peer's certificate, which TLS has verified."""
        assert isinstance(self._io, TlsIo), "without TLS there are no certificates"
        names = self._io.peer_certificate().get("subjectAltName", ())
        return [str(value) for kind, value in names if kind == "URI"]

    def send(
        self,
        kind: Kind,
        header: Message,
        payload: Sequence[memoryview] = (),
        *,
        deadline_s: float,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send a message, without copying its payload in this process first."""
        # Raises LimitExceeded if the header is too long, before anything is sent; Unreachable if the peer is gone, or
        # has not taken all of it before the deadline.
        content = header.SerializeToString()
        if len(content) > HEADER_BYTES_MAX:
            raise LimitExceeded(f"a message's header has {len(content)} bytes; allowed are {HEADER_BYTES_MAX}")
        payload_bytes = sum(piece.nbytes for piece in payload)
        head = _PREFIX.pack(MAGIC, kind, b"", len(content), payload_bytes) + content
        try:
            with self._sending:
                self._io.send([memoryview(head), *payload], deadline_s, descriptors)
        except BROKEN as error:
            raise self._unreachable(error, "send") from None

    def receive(self, *, deadline_s: float, descriptors_max: int = 0, header_bytes_max: int = HEADER_BYTES_MAX) -> Head:
        """Receive a message up to its payload, which `receive_into` or `skip` must take next."""
        # Raises MalformedFrame if it is no valid message; LimitExceeded if its header or the number of its descriptors
        # is above the bounds; Unreachable if the peer is gone, or the message is incomplete at the deadline.
        prefix = memoryview(bytearray(_PREFIX.size))
        descriptors: list[int] = []
        try:
            with self._receiving:
                if descriptors_max:
                    descriptors = self._io.receive_with_descriptors(prefix, deadline_s, descriptors_max)
                else:
                    self._io.receive([prefix], deadline_s)
                if len(descriptors) > descriptors_max:
                    raise LimitExceeded(
                        f"a message brings more than {descriptors_max} file descriptors", peer=self.peer
                    )
                magic, number, reserved, header_bytes, payload_bytes = _PREFIX.unpack(prefix)
                if magic != MAGIC or any(reserved):
                    found = bytes(prefix[:8])
                    raise MalformedFrame(f"a message begins with {MAGIC!r}, found {found!r}", peer=self.peer)
                kind = _KINDS.get(number)
                if kind is None:
                    raise MalformedFrame(f"unknown message kind {number}; known are 1 to {len(Kind)}", peer=self.peer)
                if header_bytes > header_bytes_max:
                    raise LimitExceeded(
                        f"a message declares a header of {header_bytes} bytes; allowed are {header_bytes_max}",
                        peer=self.peer,
                    )
                if payload_bytes and kind not in WITH_PAYLOAD:
                    raise MalformedFrame(f"{kind.name} has no payload, found {payload_bytes} bytes", peer=self.peer)
                content = bytearray(header_bytes)
                if content:
                    self._io.receive([memoryview(content)], deadline_s)
            header = HEADERS[kind]()
            header.ParseFromString(bytes(content))
        except BROKEN as error:
            close_descriptors(descriptors)
            raise self._unreachable(error, "receive") from None
        except DecodeError as error:
            close_descriptors(descriptors)
            raise MalformedFrame(
                f"a message's header is not a {header.DESCRIPTOR.name}: {error}", peer=self.peer
            ) from None
        except BaseException:
            close_descriptors(descriptors)
            raise
        return Head(kind, header, payload_bytes, tuple(descriptors))

    def receive_into(self, pieces: Sequence[memoryview], *, deadline_s: float) -> None:
        """Receive the next bytes of a payload directly into pieces."""
        try:
            with self._receiving:
                self._io.receive([piece for piece in pieces if piece.nbytes], deadline_s)
        except BROKEN as error:
            raise self._unreachable(error, "receive") from None

    def skip(self, payload_bytes: int, *, deadline_s: float) -> None:
        """Receive bytes of a payload and discard them."""
        scratch = memoryview(bytearray(min(SKIP_BYTES, payload_bytes)))
        while payload_bytes:
            piece = scratch[:payload_bytes]
            self.receive_into([piece], deadline_s=deadline_s)
            payload_bytes -= piece.nbytes

    def wait(self) -> None:
        """Wait without a deadline until the peer sends something or is gone, as a shard does between requests."""
        try:
            with self._receiving:
                if self._connection.fileno() < 0:
                    raise EOFError
                if not self._io.read_ahead:
                    self._poll.poll()
        except BROKEN as error:
            raise self._unreachable(error, "receive") from None

    def close(self) -> None:
        """Close the connection; threads that wait in it get `Unreachable`."""
        with suppress(OSError):  # it may be gone already
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)  # SSLSocket's own would drop its TLS state
        with self._sending, self._receiving:  # else a descriptor in use could become that of another file
            self._connection.close()

    def _unreachable(self, error: OSError | EOFError, act: str) -> Unreachable:
        if isinstance(error, TimeoutError):
            return Unreachable(f"could not {act} before the deadline", peer=self.peer)
        if isinstance(error, EOFError):
            return Unreachable("the connection was closed", peer=self.peer)
        return Unreachable(f"the connection broke: {error}", peer=self.peer)


def refusal(error: ParashardError) -> stream_pb2.Refusal:
    """Return the header of the REFUSAL that carries an error."""
    content = error.message.encode(errors="replace")
    if len(content) > REFUSAL_BYTES_MAX:
        content = content[: REFUSAL_BYTES_MAX - 4] + b" ..."
    return stream_pb2.Refusal(code=error.code, message=content.decode(errors="ignore"))


def refused(message: stream_pb2.Refusal, peer: str) -> ParashardError:
    """Return the error that a REFUSAL carries, of the class that the peer raised and with the peer's address."""
    kind = ParashardError.from_code(message.code)
    if kind is None:
        return PeerFailed(f"refused with the unknown code {message.code!r}: {message.message}", peer=peer)
    return kind(message.message, peer=peer)


def receive_answer(stream: Stream, kind: Kind, *, deadline_s: float, descriptors_max: int = 0) -> Head:
    """Receive an answer of this kind; raises `Refused` with the peer's error, which leaves the stream usable."""
    head = stream.receive(deadline_s=deadline_s, descriptors_max=descriptors_max)
    if head.kind is kind:
        return head
    close_descriptors(head.descriptors)
    if head.kind is Kind.REFUSAL:
        raise Refused(refused(head.header, stream.peer))
    raise MalformedFrame(f"answered with {head.kind.name}, expected {kind.name}", peer=stream.peer)


def greet(
    stream: Stream, greeting: Greeting, *, deadline_s: float, descriptors_max: int = 0
) -> tuple[stream_pb2.Welcome, tuple[int, ...]]:
    """Send HELLO, and return the WELCOME and its file descriptors; after an error the stream is closed."""
    # Raises the shard's refusal; Unreachable if nothing answers, or another program has its port now: the next view
    # will have the new address.
    hello = stream_pb2.Hello(target=wire.target_message(greeting.target), worker=greeting.worker)
    try:
        stream.handshake(deadline_s=deadline_s)
        stream.send(Kind.HELLO, hello, deadline_s=deadline_s)
        head = receive_answer(stream, Kind.WELCOME, deadline_s=deadline_s, descriptors_max=descriptors_max)
        return head.header, head.descriptors
    except Refused as refusal:
        stream.close()
        raise refusal.error from None
    except (MalformedFrame, LimitExceeded) as error:
        stream.close()
        raise Unreachable(f"what answers there is no shard: {error.message}", peer=stream.peer) from None
    except BaseException:
        stream.close()
        raise


class Refused(Exception):
    """A peer answered with a REFUSAL, which leaves the stream usable; `error` is the peer's error."""

    def __init__(self, error: ParashardError) -> None:
        super().__init__(str(error))
        self.error = error
