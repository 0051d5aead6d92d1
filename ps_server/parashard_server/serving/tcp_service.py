"""The shard's data plane over TCP: a message in, the shard's answer out. No arithmetic, no decision.

Owns where payloads go, and checks every declared length before memory is taken for it; what may be said when is
`parashard_server.serving.session`'s. Knows nothing of sockets. Called by `parashard_server.serving.stream_server`, on a
thread for each connection.

An error of the shard answers one request, and the connection goes on. A peer that does not keep to the protocol is told
so by the server, which then closes: whatever `serve` raises ends the connection.
"""

from __future__ import annotations

import time
from functools import partial

from parashard._proto import stream_pb2, tensor_pb2
from parashard.errors import LimitExceeded, MalformedFrame, ParashardError, QueueFull
from parashard.protocol import wire
from parashard.protocol.messages import Weights
from parashard.protocol.rpc import SLOWEST_BYTES_PER_S
from parashard.transports.socket_io import LOCAL_BUFFER_BYTES
from parashard.transports.stream import Head, Kind, Stream, refusal
from parashard_server.serving.push_memory import PushMemory
from parashard_server.serving.session import (
    Plane,
    answer_to_push,
    greeted,
    hello_deadline_s,
    pull_asked,
    requests,
)

PIECE_BYTES = 2 * LOCAL_BUFFER_BYTES
"""Weights that are copied under the lock and sent after it, while others have theirs. Linux takes twice the
buffer that it is asked for, so a piece fits: the peer empties it while the next is copied."""

PAYLOAD_DEADLINE_S = 20.0
"""For a push's bytes to come, beside what they take on the slowest link: others may need the memory that it holds."""


class TcpService:
    """Serves one shard; pushes are received into `memory`."""

    def __init__(self, plane: Plane, memory: PushMemory) -> None:
        self._plane = plane
        self._memory = memory

    def serve(self, stream: Stream) -> None:
        """Answer requests until the peer leaves or does not keep to the protocol; an error ends the connection."""
        self._welcome(stream)
        scratch: memoryview | None = None  # not before the first pull: a connection alone costs no memory
        for head, deadline_s in requests(stream, self._plane):
            if head.kind is Kind.PUSH:
                self._push(stream, head, deadline_s)
            else:
                scratch = scratch or memoryview(bytearray(max(1, min(PIECE_BYTES, self._plane.push_bytes_max))))
                self._pull(stream, head, scratch, deadline_s)

    def _welcome(self, stream: Stream) -> None:
        deadline_s = hello_deadline_s()
        greeted(stream, self._plane, deadline_s=deadline_s)
        welcome = stream_pb2.Welcome(push_bytes_max=self._plane.push_bytes_max)
        stream.send(Kind.WELCOME, welcome, deadline_s=deadline_s)

    def _push(self, stream: Stream, head: Head, deadline_s: float) -> None:
        header, allowed_bytes = head.header, self._plane.push_bytes_max
        if head.payload_bytes > allowed_bytes:
            raise LimitExceeded(
                f"step {header.step}: a push of {head.payload_bytes} bytes; this shard's plan allows {allowed_bytes}"
            )
        if header.total_bytes != head.payload_bytes:
            raise MalformedFrame(
                f"step {header.step}: a push of {header.total_bytes} bytes came with {head.payload_bytes}"
            )
        try:
            with self._memory.buffer(header.total_bytes) as payload:
                payload_s = PAYLOAD_DEADLINE_S + payload.nbytes / SLOWEST_BYTES_PER_S
                stream.receive_into([payload], deadline_s=min(deadline_s, time.monotonic() + payload_s))
                answer = answer_to_push(self._plane, header, payload, deadline_s)
        except QueueFull as error:  # there is no buffer; what the shard refuses is an answer already
            stream.skip(head.payload_bytes, deadline_s=deadline_s)
            answer = Kind.REFUSAL, refusal(error)
        stream.send(*answer, deadline_s=deadline_s)  # a peer that is slow to read has no room any more

    def _pull(self, stream: Stream, head: Head, scratch: memoryview, deadline_s: float) -> None:
        header, run = pull_asked(stream, head, deadline_s)
        if header.in_slot:
            raise MalformedFrame("a pull names a slot, and this connection has none")
        versions: list[int] = []
        for part in wire.parts_of(run, PIECE_BYTES):
            try:
                left_s = max(0.0, deadline_s - time.monotonic())
                reply, payload = self._plane.pull(part, left_s, partial(_copied, scratch))
            except ParashardError as error:
                stream.send(Kind.REFUSAL, refusal(error), deadline_s=deadline_s)
                return
            versions.append(reply.version)
            reply.version = min(versions)  # a part in which nothing has moved is not sent
            reply.last = part.offset_bytes + part.length_bytes == run.offset_bytes + run.length_bytes
            if payload or reply.tables or reply.last:
                stream.send(Kind.WEIGHTS, reply, payload, deadline_s=deadline_s)


def _copied(scratch: memoryview, weights: Weights) -> tuple[tensor_pb2.PullReply, list[memoryview]]:
    """Copy the runs, end to end, and the rows to where they stay when the lock is released."""
    position = 0
    for run in weights.runs:
        scratch[position : position + run.values.nbytes] = run.values
        position += run.values.nbytes
    pieces = [scratch[:position]]
    if weights.rows:
        pieces += [memoryview(bytes(piece)) for piece in wire.rows_payload(weights)]
    return wire.weights_message(weights), [piece for piece in pieces if piece.nbytes]
