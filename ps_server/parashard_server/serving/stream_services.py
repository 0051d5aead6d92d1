"""A shard's side of a stream: HELLO, then requests, each with its answer, over TCP and over shared memory.

Owns the order of messages (`protos/stream.proto`), their deadlines, and the place of tensors: `TcpService` receives a
push into a buffer and sends copies of the weights; `ShmService` uses a push in place in the connection's slot, and its
worker copies the weights itself (`parashard.transports.shm`). Every declared length is checked before memory is
allocated for it.

An error of the shard answers one request, and the connection continues. Any error that `serve` raises ends the
connection; the server first reports a violation of the protocol to the peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from google.protobuf.message import Message

from parashard._proto import stream_pb2, tensor_pb2
from parashard.errors import LimitExceeded, MalformedFrame, ParashardError, QueueFull
from parashard.protocol import wire
from parashard.protocol.messages import MESSAGE_BYTES_MAX, Buffers, PullRun, Weights
from parashard.protocol.rpc import SLOWEST_BYTES_PER_S, data_deadline_s
from parashard.transports import memory
from parashard.transports.memory import Bytes
from parashard.transports.shared_weights import SharedWeights
from parashard.transports.socket_io import LOCAL_BUFFER_BYTES
from parashard.transports.stream import Head, Kind, Stream, refusal
from parashard_server.push_memory import PushMemory, Slots
from parashard_server.serving.request_handler import RequestHandler
from parashard_server.serving.stream_server import HELLO_DEADLINE_S

HELLO_BYTES_MAX = 4 << 10  # the peer is not known yet
HEAD_DEADLINE_S = 5.0  # to receive a request without its payload, from its first byte on
PIECE_BYTES = 2 * LOCAL_BUFFER_BYTES
"""Weights that are copied under the lock at once, and sent without it. Linux doubles the requested size of a socket's
buffer, so a piece fits: the peer reads it while the next is copied."""

PAYLOAD_DEADLINE_S = 20.0
"""To receive a push's payload, beside its time on the slowest link: others may need the memory that it holds."""


def greeted(stream: Stream, plane: RequestHandler, *, deadline_s: float) -> stream_pb2.Hello:
    """Receive HELLO, and return it if it is meant for this incarnation of this shard."""
    # Raises MalformedFrame for anything else, the errors of `plane.check`, and Unreachable at the deadline.
    head = stream.receive(deadline_s=deadline_s, header_bytes_max=HELLO_BYTES_MAX)
    if head.kind is not Kind.HELLO:
        raise MalformedFrame(f"a connection begins with HELLO, found {head.kind.name}")
    hello: stream_pb2.Hello = head.header
    plane.check(wire.target(hello.target))
    stream.greeted = True
    return hello


def requests(stream: Stream, plane: RequestHandler) -> Iterator[tuple[Head, float]]:
    """Yield each PUSH and PULL with its deadline."""
    # Ends by an error only: MalformedFrame for anything else, Unreachable if the peer is gone or stopped in the middle.
    within_s = data_deadline_s(plane.push_bytes_max)
    while True:
        stream.wait()
        head = stream.receive(deadline_s=time.monotonic() + HEAD_DEADLINE_S)
        if head.kind not in (Kind.PUSH, Kind.PULL):
            raise MalformedFrame(f"requests are PUSH and PULL, found {head.kind.name}")
        # The deadline does not depend on the declared length: a payload longer than the plan allows is refused.
        yield head, time.monotonic() + within_s


def answer_to_push(
    plane: RequestHandler, header: tensor_pb2.PushHeader, payload: memoryview, deadline_s: float
) -> tuple[Kind, Message]:
    """Push a whole payload, which is only borrowed; return the ACK to send, or the shard's REFUSAL."""
    try:
        ack = plane.push(wire.push_from(header, payload), max(0.0, deadline_s - time.monotonic()))
        return Kind.ACK, wire.ack_message(ack)
    except ParashardError as error:
        return Kind.REFUSAL, refusal(error)


def pull_asked(
    stream: Stream, head: Head, deadline_s: float, room: Bytes | None = None
) -> tuple[tensor_pb2.PullHeader, PullRun]:
    """Receive the row keys of a PULL, if it has any, from the stream or from a slot's `room` for them."""
    # Those in a slot are copied, as the answer will overwrite them. Raises LimitExceeded if they exceed one message of
    # gRPC; MalformedFrame if they are not as many as the header says. Nothing is received then.
    header = head.header
    if not (header.keys or header.keys_in_slot or head.payload_bytes):
        return header, wire.pull_run(header)
    keys_bytes = wire.keys_bytes_of(header)
    if header.keys_in_slot:
        room_bytes = 0 if room is None else room.nbytes
        if room is None or keys_bytes > room_bytes or head.payload_bytes:
            raise MalformedFrame(
                f"keys of {keys_bytes} bytes in a slot that has {room_bytes} for them, {head.payload_bytes} beside it"
            )
    else:
        wire.check_keys_bytes(header, head.payload_bytes)
    if keys_bytes > MESSAGE_BYTES_MAX:
        raise LimitExceeded(f"a pull with {keys_bytes} bytes of keys; allowed are {MESSAGE_BYTES_MAX}")
    if header.keys_in_slot:
        assert room is not None
        return header, wire.pull_run(header, room[:keys_bytes].copy().data)
    payload = memoryview(bytearray(keys_bytes))
    stream.receive_into([payload], deadline_s=deadline_s)
    return header, wire.pull_run(header, payload)


def hello_deadline_s() -> float:
    """Return the deadline for a peer that connects now to send its HELLO, or to take its WELCOME."""
    return time.monotonic() + HELLO_DEADLINE_S


class TcpService:
    """Serves one shard; pushes are received into `memory`."""

    def __init__(self, plane: RequestHandler, memory: PushMemory) -> None:
        self._plane = plane
        self._memory = memory

    def serve(self, stream: Stream) -> None:
        """Answer requests until the peer leaves or violates the protocol; an error ends the connection."""
        deadline_s = hello_deadline_s()
        greeted(stream, self._plane, deadline_s=deadline_s)
        welcome = stream_pb2.Welcome(push_bytes_max=self._plane.push_bytes_max)
        stream.send(Kind.WELCOME, welcome, deadline_s=deadline_s)
        scratch: memoryview | None = None  # not before the first pull: a connection alone costs no memory
        for head, deadline_s in requests(stream, self._plane):
            if head.kind is Kind.PUSH:
                self._push(stream, head, deadline_s)
            else:
                scratch = scratch or memoryview(bytearray(max(1, min(PIECE_BYTES, self._plane.push_bytes_max))))
                self._pull(stream, head, scratch, deadline_s)

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
        except QueueFull as error:  # there is no buffer; the shard's own refusals are answers already
            stream.skip(head.payload_bytes, deadline_s=deadline_s)
            answer = Kind.REFUSAL, refusal(error)
        stream.send(*answer, deadline_s=deadline_s)  # the buffer is released before: the peer may be slow to read

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
            reply.version = min(versions)  # a part without changes is not sent
            reply.last = part.offset_bytes + part.length_bytes == run.offset_bytes + run.length_bytes
            if payload or reply.tables or reply.last:
                stream.send(Kind.WEIGHTS, reply, payload, deadline_s=deadline_s)


class ShmService:
    """Serves one shard to workers of its own host.

    `weights` returns the shared memory of the incarnation that is served now, or None if it is not shared.
    """

    def __init__(self, plane: RequestHandler, weights: Callable[[], SharedWeights | None], slots: Slots) -> None:
        self._plane = plane
        self._weights = weights
        self._slots = slots

    def serve(self, stream: Stream) -> None:
        """Answer requests until the worker leaves or violates the protocol; an error ends the connection."""
        # Raises QueueFull if there is no memory for its slot, or there was none for shared weights.
        hello, weights = greeted(stream, self._plane, deadline_s=hello_deadline_s()), self._weights()
        if weights is None:
            raise QueueFull("this incarnation of the shard got no shared memory for its weights")
        with self._slots.take(self._plane.push_bytes_max, hello.worker) as (descriptor, slot):
            welcome = stream_pb2.Welcome(
                push_bytes_max=slot.nbytes,
                slot_bytes=slot.nbytes,
                elements=weights.weights.size,
                partitions=weights.done.size,
            )
            descriptors = (weights.read_descriptor, descriptor)
            stream.send(Kind.WELCOME, welcome, deadline_s=hello_deadline_s(), descriptors=descriptors)
            rows_at = weights.weights.nbytes
            del weights  # else a connection to an earlier incarnation would keep that incarnation's memory
            for head, deadline_s in requests(stream, self._plane):
                if head.kind is Kind.PUSH:
                    self._push(stream, head, slot, deadline_s)
                else:
                    self._pull(stream, head, slot, rows_at, deadline_s)

    def _push(self, stream: Stream, head: Head, slot: Bytes, deadline_s: float) -> None:
        if head.payload_bytes:  # it lies in the slot
            raise MalformedFrame(f"over shared memory a message has no payload, found {head.payload_bytes} bytes")
        header = head.header
        if header.total_bytes > slot.nbytes:
            raise LimitExceeded(f"step {header.step}: a push of {header.total_bytes} bytes; a slot has {slot.nbytes}")
        payload = slot[: header.total_bytes].data
        stream.send(*answer_to_push(self._plane, header, payload, deadline_s), deadline_s=deadline_s)

    def _pull(self, stream: Stream, head: Head, slot: Bytes, rows_at: int, deadline_s: float) -> None:
        header, run = pull_asked(stream, head, deadline_s, slot[rows_at:])

        def read(weights: Weights) -> tuple[tensor_pb2.PullReply, list[memoryview]]:
            runs = weights.runs if header.in_slot else ()
            for moved in runs:
                memory.copy(moved.values, slot[moved.offset_bytes : moved.offset_bytes + moved.values.nbytes])
            beside = _rows_in(weights, slot[rows_at:]) if weights.rows else []
            return wire.weights_message(weights._replace(runs=runs)), beside

        try:
            reply, beside = self._plane.pull(run, max(0.0, deadline_s - time.monotonic()), read)
        except ParashardError as error:
            stream.send(Kind.REFUSAL, refusal(error), deadline_s=deadline_s)
            return
        stream.send(Kind.WEIGHTS, reply, beside, deadline_s=deadline_s)


def _copied(scratch: memoryview, weights: Weights) -> tuple[tensor_pb2.PullReply, list[memoryview]]:
    """Copy the runs, end to end, and the rows, so that they stay valid after the lock is released."""
    position = 0
    for run in weights.runs:
        scratch[position : position + run.values.nbytes] = run.values
        position += run.values.nbytes
    pieces = [scratch[:position]]
    if weights.rows:
        pieces += [memoryview(bytes(piece)) for piece in wire.rows_payload(weights)]
    return wire.weights_message(weights), [piece for piece in pieces if piece.nbytes]


def _rows_in(weights: Weights, room: Bytes) -> list[memoryview]:
    """Copy rows to their room in a slot; if it is too small, return a copy to send as payload."""
    pieces = wire.rows_payload(weights)
    if sum(piece.nbytes for piece in pieces) > room.nbytes:
        return [memoryview(bytes(piece)) for piece in pieces]
    memory.gather(Buffers(pieces), room)
    return []
