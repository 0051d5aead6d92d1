"""The common part of the transports over streams: TCP (tensors on the stream) and shared memory (beside it).

Owns HELLO ahead of the first request, the end, and the two small messages of a push. Does not know where tensors lie:
`parashard.transports.tcp` and `parashard.transports.shm`, which call it, do.
"""

from __future__ import annotations

import time
from typing import Generic, TypeVar

from parashard._proto import tensor_pb2
from parashard.errors import LimitExceeded, MalformedFrame
from parashard.protocol import wire
from parashard.protocol.messages import MESSAGE_BYTES_MAX, PullRun, Push, Receipt, Weights
from parashard.transports.connections import Connection, Connections
from parashard.transports.memory import Bytes
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


def ask_rows(stream: Stream, run: PullRun, *, deadline_s: float, in_slot: bool = False) -> None:
    """Ask for rows of tables; `in_slot`: the shard may put them into the connection's slot."""
    stream.send(Kind.PULL, wire.pull_header(run, in_slot=in_slot), wire.keys_payload(run), deadline_s=deadline_s)


def rows_answered(stream: Stream, run: PullRun, *, deadline_s: float, slot: Bytes | None = None) -> Weights:
    """Receive the rows that were asked for, into new memory, or find them in the slot: then they are views of it."""
    head = answer(stream, Kind.WEIGHTS, deadline_s=deadline_s)
    reply = parsed(head.header, tensor_pb2.PullReply)
    if slot is not None and reply.run_lengths:
        (size_bytes,) = reply.run_lengths if len(reply.run_lengths) == 1 else (-1,)
        if not 0 <= size_bytes <= slot.nbytes or head.payload_bytes:
            raise MalformedFrame(
                f"rows of {list(reply.run_lengths)} bytes in a slot of {slot.nbytes}, {head.payload_bytes} beside it",
                peer=stream.peer,
            )
        return wire.rows_from(reply, slot[:size_bytes].data, run)
    if head.payload_bytes > MESSAGE_BYTES_MAX:
        raise LimitExceeded(
            f"rows of {head.payload_bytes} bytes in one answer; allowed are {MESSAGE_BYTES_MAX}", peer=stream.peer
        )
    payload = memoryview(bytearray(head.payload_bytes))
    stream.receive_into([payload], deadline_s=deadline_s)
    return wire.rows_from(reply, payload, run)


def whole_push(push: Push, bytes_max: int, peer: str) -> tensor_pb2.PushHeader:
    """Return the header of a push in one message, or raise `LimitExceeded` if the shard takes no push so long."""
    if push.payload.nbytes > bytes_max:
        raise LimitExceeded(
            f"step {push.step}: a push of {push.payload.nbytes} bytes; the shard takes {bytes_max}", peer=peer
        )
    return wire.push_header(push)


def receipt_from(stream: Stream, *, deadline_s: float) -> Receipt:
    """Receive the answer to a push."""
    head = answer(stream, Kind.RECEIPT, deadline_s=deadline_s)
    return wire.receipt(parsed(head.header, tensor_pb2.PushReply))
