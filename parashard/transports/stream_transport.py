"""The common part of the transports over streams: TCP (tensors on the stream) and shared memory (beside it).

Owns HELLO ahead of the first request, the end, and the two small messages of a push. Does not know where tensors
lie: `parashard.transports.tcp` and `parashard.transports.shm`, which call it, do.
"""

from __future__ import annotations

import time
from typing import Generic, TypeVar

from parashard._proto import tensor_pb2
from parashard.errors import LimitExceeded
from parashard.protocol import wire
from parashard.protocol.messages import Ack, Push
from parashard.transports.connections import Connection, Connections
from parashard.transports.stream import Kind, Stream, answer, parsed

_Connection = TypeVar("_Connection", bound=Connection)


class StreamTransport(Generic[_Connection]):
    """Connections to one shard.

    Parameters
    ----------
    connections : Connections
        Where each request takes one; opening one says HELLO.
    """

    def __init__(self, connections: Connections[_Connection]) -> None:
        self._connections = connections

    def greet(self, deadline_s: float) -> None:
        """Make sure that there is a connection, at most `deadline_s` seconds from now.

        Raises
        ------
        ParashardError
            What stands against it: `Unreachable` without an answer, else as the shard says.
        """
        self._connections.give_back(self._connections.take(time.monotonic() + deadline_s))

    def close(self) -> None:
        """Close every connection."""
        self._connections.close()


def whole_push(push: Push, bytes_max: int, peer: str) -> tensor_pb2.PushHeader:
    """Return the header of a push in one message, or raise `LimitExceeded` if the shard takes no push so long."""
    if push.payload.nbytes > bytes_max:
        raise LimitExceeded(
            f"step {push.step}: a push of {push.payload.nbytes} bytes; the shard takes {bytes_max}", peer=peer
        )
    return wire.push_header(push)


def ack_from(stream: Stream, *, deadline_s: float) -> Ack:
    """Receive the answer to a push."""
    head = answer(stream, Kind.RECEIPT, deadline_s=deadline_s)
    return wire.ack(parsed(head.header, tensor_pb2.PushReply))
