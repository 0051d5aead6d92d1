"""HTTP/2 by hand, for what gRPC's own client would never say."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress

from support.waiting import DEADLINE_S

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, CONTINUATION = 0x0, 0x1, 0x4, 0x9
ACK, END_STREAM, END_HEADERS = 0x1, 0x1, 0x4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def request_headers(method: str, scheme: str = "http") -> bytes:
    """Return a gRPC call's headers, as literals that no table keeps."""
    pairs = {
        ":method": "POST",
        ":scheme": scheme,
        ":path": method,
        ":authority": "shard",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(b"\x00" + text_literal(name) + text_literal(value) for name, value in pairs.items())


def received(connection: socket.socket, text: bytes) -> bytes:
    """Return what comes until it has a text in it, or the connection ends, or the deadline."""
    connection.settimeout(DEADLINE_S)
    content, end_s = b"", time.monotonic() + DEADLINE_S
    with suppress(OSError):
        while text not in content and time.monotonic() < end_s:
            piece = connection.recv(1 << 16)
            if not piece:
                break
            content += piece
            if piece[3:5] == bytes((SETTINGS, 0)):
                connection.sendall(frame(SETTINGS, ACK, 0, b""))
    return content


def text_literal(text: str) -> bytes:
    """Return a text as HPACK writes it, uncompressed (RFC 7541, 5.2)."""
    content = text.encode()
    return integer(len(content), 7) + content


def integer(value: int, prefix_bits: int) -> bytes:
    """Return an integer as HPACK writes it (RFC 7541, 5.1)."""
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes((value,))
    value -= most
    content = bytearray((most,))
    while value >= 0x80:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)


def begun(connection: socket.socket) -> socket.socket:
    """Begin with HTTP/2 on a connection, and return it."""
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
    return connection
