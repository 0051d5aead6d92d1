"""The shard's data plane over TCP: a message in, the shard's answer out. No arithmetic, no decision.

Owns what may be said when on a connection (`protos/stream.proto`) and checks every declared length before memory is
taken for it. Knows nothing of sockets. Called by `ps_server.stream_server`, on a thread for each connection.

An error of the shard answers one request, and the connection goes on. A peer that does not keep to the protocol is told
so by the server, which then closes: whatever `serve` raises ends the connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from parashard import wire
from parashard.errors import LimitExceeded, MalformedFrame, ParashardError, QueueFull
from parashard.messages import PullRun, PushChunk, Receipt, Target, Weights
from parashard.rpc import data_deadline_s
from parashard.transports.stream import Head, Kind, Stream, parsed, refusal
from protos import stream_pb2, tensor_pb2
from ps_server.rooms import Rooms
from ps_server.stream_server import HELLO_DEADLINE_S

PIECE_BYTES = 2 << 20
"""Weights that are copied in one turn of the owner and sent after it, while others have theirs."""
HEAD_DEADLINE_S = 5.0  # for the few bytes before a payload, once they have begun to come

_Result = TypeVar("_Result")


class Plane(Protocol):
    """What is needed of `ps_server.data_plane.DataPlane`."""

    @property
    def push_bytes_max(self) -> int:
        """Length of the longest push."""

    def check(self, target: Target) -> None:
        """Refuse what is not meant for this life of this shard."""

    def push(self, chunk: PushChunk, timeout_s: float) -> Receipt:
        """Take a push; its payload is borrowed."""

    def pull(self, run: PullRun, timeout_s: float, read: Callable[[Weights], _Result]) -> _Result:
        """Return what `read` makes of the weights; called while nobody moves them."""


class TcpService:
    """Serves one shard.

    Parameters
    ----------
    plane : Plane
        The shard.
    rooms : Rooms
        Where pushes are received.
    """

    def __init__(self, plane: Plane, rooms: Rooms) -> None:
        self._plane = plane
        self._rooms = rooms

    def serve(self, stream: Stream) -> None:
        """Answer requests until the peer leaves or does not keep to the protocol.

        Raises
        ------
        MalformedFrame, LimitExceeded
            If it does not.
        WrongRun, StalePlan, StaleIncarnation, NotReady
            If it says HELLO to another life, or at a bad moment.
        Unreachable
            If it is gone, or stopped in the middle.
        """
        self._welcome(stream)
        scratch = memoryview(bytearray(min(PIECE_BYTES, self._plane.push_bytes_max)))  # a shard may be smaller
        while True:
            stream.wait()
            head = stream.receive(deadline_s=time.monotonic() + HEAD_DEADLINE_S)
            # A lie about the length gains nothing: what is longer than the plan allows is refused.
            deadline_s = time.monotonic() + data_deadline_s(self._plane.push_bytes_max)
            if head.kind is Kind.PUSH:
                self._push(stream, head, deadline_s)
            elif head.kind is Kind.PULL:
                self._pull(stream, head, scratch, deadline_s)
            else:
                raise MalformedFrame(f"requests are PUSH and PULL, found {head.kind.name}")

    def _welcome(self, stream: Stream) -> None:
        deadline_s = time.monotonic() + HELLO_DEADLINE_S
        head = stream.receive(deadline_s=deadline_s)
        if head.kind is not Kind.HELLO:
            raise MalformedFrame(f"a connection begins with HELLO, found {head.kind.name}")
        self._plane.check(wire.target(parsed(head.header, stream_pb2.Hello).target))
        welcome = stream_pb2.Welcome(push_bytes_max=self._plane.push_bytes_max)
        stream.send(Kind.WELCOME, welcome, deadline_s=deadline_s)

    def _push(self, stream: Stream, head: Head, deadline_s: float) -> None:
        header = parsed(head.header, tensor_pb2.PushHeader)
        self._check_lengths(header, head.payload_bytes)
        try:
            room = self._rooms.take(header.total_bytes)
        except QueueFull as error:
            stream.skip(head.payload_bytes, deadline_s=deadline_s)
            stream.send(Kind.REFUSAL, refusal(error), deadline_s=deadline_s)
            return
        answer: tuple[Kind, Message]
        with room as payload:
            stream.receive_into([payload], deadline_s=deadline_s)
            try:
                receipt = self._plane.push(wire.push_chunk(header, payload), _left_s(deadline_s))
                answer = Kind.RECEIPT, wire.receipt_message(receipt)
            except ParashardError as error:
                answer = Kind.REFUSAL, refusal(error)
        stream.send(*answer, deadline_s=deadline_s)  # a peer that is slow to read has no room any more

    def _check_lengths(self, header: tensor_pb2.PushHeader, payload_bytes: int) -> None:
        allowed_bytes = self._plane.push_bytes_max
        if payload_bytes > allowed_bytes:
            raise LimitExceeded(
                f"step {header.step}: a push of {payload_bytes} bytes; this shard's plan allows {allowed_bytes}"
            )
        if header.offset_bytes != 0 or header.total_bytes != payload_bytes:
            raise MalformedFrame(
                f"step {header.step}: a stream carries whole pushes; {payload_bytes} bytes came as those from "
                f"{header.offset_bytes} on of {header.total_bytes}"
            )

    def _pull(self, stream: Stream, head: Head, scratch: memoryview, deadline_s: float) -> None:
        header = parsed(head.header, tensor_pb2.PullHeader)
        if header.in_slot:
            raise MalformedFrame("a pull names a slot, and this connection has none")
        lowest: int | None = None
        for part in _parts(wire.pull_run(header)):
            try:
                reply, payload_bytes = self._plane.pull(part, _left_s(deadline_s), lambda w: _copied(w, scratch))
            except ParashardError as error:
                stream.send(Kind.REFUSAL, refusal(error), deadline_s=deadline_s)
                return
            lowest = reply.version if lowest is None else min(lowest, reply.version)
            if payload_bytes:
                stream.send(Kind.WEIGHTS, reply, [scratch[:payload_bytes]], deadline_s=deadline_s)
        assert lowest is not None
        stream.send(Kind.WEIGHTS, tensor_pb2.PullReply(version=lowest), deadline_s=deadline_s)


def _parts(run: PullRun) -> Iterator[PullRun]:
    """Cut a run into pieces that are read in one turn each; an empty run is one: its version matters."""
    end = run.offset_bytes + run.length_bytes
    offset = run.offset_bytes
    while True:
        length = min(PIECE_BYTES, end - offset)
        yield PullRun(run.target, run.round, run.step, offset, length, run.known_version)
        offset += length
        if offset == end:
            return


def _copied(weights: Weights, scratch: memoryview) -> tuple[tensor_pb2.PullReply, int]:
    """Copy the runs, end to end, to where they stay when the owner's turn is over."""
    position = 0
    for run in weights.runs:
        scratch[position : position + run.values.nbytes] = run.values
        position += run.values.nbytes
    return wire.weights_message(weights), position


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
