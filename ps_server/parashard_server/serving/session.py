"""A shard's side of a stream, common to TCP and shared memory: HELLO, then requests, each with its answer.

Owns the order of messages (`protos/stream.proto`) and how long each may take. Does not know where tensors lie:
`parashard_server.serving.tcp_service` and `parashard_server.serving.shm_service` do, which call it on the thread of a
connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from parashard._proto import stream_pb2, tensor_pb2
from parashard.errors import LimitExceeded, MalformedFrame, ParashardError
from parashard.protocol import wire
from parashard.protocol.messages import MESSAGE_BYTES_MAX, Ack, PullRun, Push, Target, Weights
from parashard.protocol.rpc import data_deadline_s
from parashard.transports.memory import Bytes
from parashard.transports.stream import Head, Kind, Stream, refusal
from parashard_server.serving.stream_server import HELLO_DEADLINE_S

HELLO_BYTES_MAX = 4 << 10  # the peer is not known yet
HEAD_DEADLINE_S = 5.0  # for the few bytes of a request before its payload, once they have begun to come

_Result = TypeVar("_Result")


class Plane(Protocol):
    """What is needed of `parashard_server.serving.request_handler.RequestHandler`."""

    @property
    def push_bytes_max(self) -> int:
        """Length of the longest push."""

    def check(self, target: Target) -> None:
        """Refuse what is not meant for this incarnation of this shard."""

    def push(self, push: Push, timeout_s: float) -> Ack:
        """Take a push; its payload is borrowed."""

    def pull(self, run: PullRun, timeout_s: float, read: Callable[[Weights], _Result]) -> _Result:
        """Return what `read` makes of the weights; called while they do not change."""


def greeted(stream: Stream, plane: Plane, *, deadline_s: float) -> stream_pb2.Hello:
    """Receive HELLO, and return it if it is meant for this incarnation of this shard.

    Raises MalformedFrame for anything else, what `plane.check` refuses with, and Unreachable at the deadline.
    """
    head = stream.receive(deadline_s=deadline_s, header_bytes_max=HELLO_BYTES_MAX)
    if head.kind is not Kind.HELLO:
        raise MalformedFrame(f"a connection begins with HELLO, found {head.kind.name}")
    hello: stream_pb2.Hello = head.header
    plane.check(wire.target(hello.target))
    stream.greeted = True
    return hello


def requests(stream: Stream, plane: Plane) -> Iterator[tuple[Head, float]]:
    """Yield each PUSH and PULL, and the moment by which it must be over.

    Ends by an error only: MalformedFrame for anything else, Unreachable if the peer is gone or stopped in the middle.
    """
    while True:
        stream.wait()
        head = stream.receive(deadline_s=time.monotonic() + HEAD_DEADLINE_S)
        if head.kind not in (Kind.PUSH, Kind.PULL):
            raise MalformedFrame(f"requests are PUSH and PULL, found {head.kind.name}")
        # A lie about the length gains nothing: what is longer than the plan allows is refused.
        yield head, time.monotonic() + data_deadline_s(plane.push_bytes_max)


def answer_to_push(
    plane: Plane, header: tensor_pb2.PushHeader, payload: memoryview, deadline_s: float
) -> tuple[Kind, Message]:
    """Push a whole payload, which is only borrowed; return the RECEIPT to send, or the shard's REFUSAL."""
    try:
        ack = plane.push(wire.push_from(header, payload), max(0.0, deadline_s - time.monotonic()))
        return Kind.RECEIPT, wire.ack_message(ack)
    except ParashardError as error:
        return Kind.REFUSAL, refusal(error)


def pull_asked(
    stream: Stream, head: Head, deadline_s: float, room: Bytes | None = None
) -> tuple[tensor_pb2.PullHeader, PullRun]:
    """Receive the rest of a PULL: the keys of rows, if it has any, by the stream or from a slot's `room` for them.

    The latter are copied, as the answer will lie there. Raises LimitExceeded if they are more than one message of gRPC
    has; MalformedFrame if they are not as many as the header says. Nothing is received then.
    """
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
    """Return the moment by which a peer that connects now must have said HELLO, or taken its WELCOME."""
    return time.monotonic() + HELLO_DEADLINE_S
