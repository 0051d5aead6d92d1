"""The rows in an answer, by a shard that lies of their length."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from parashard._proto import stream_pb2, tensor_pb2
from parashard.errors import LimitExceeded, MalformedFrame, ParashardError
from parashard.protocol.messages import ROWS_BYTES_MAX, Buffers
from parashard.transports.base import ShardAddress
from parashard.transports.connections import Connections
from parashard.transports.shared_weights import SharedWeights, can_share
from parashard.transports.shm import ShmConnection, ShmTransport
from parashard.transports.stream import Kind, Stream
from parashard.transports.tcp import TcpTransport
from parashard_server.push_memory import _created
from support.conformance_cases import keys_of, pull_of
from support.fake_plane import GREETING
from support.waiting import DEADLINE_S

ROOM = 100  # of the slot, behind the weights
ELEMENTS = 4


@pytest.fixture(params=["tcp", "shm"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Stream, Any]]:
    """Return a transport, the other end of its only connection, and its slot."""
    ours, theirs = (Stream(end, "shard") for end in socket.socketpair())
    slot = None
    if request.param == "tcp":
        transport: Any = TcpTransport(ShardAddress("", 1, "shard"), GREETING)
        transport._connections = Connections(lambda until_s: ours, "shard")
    else:
        if not can_share():
            pytest.skip("this machine cannot share weights")
        weights, (descriptor, slot) = SharedWeights([0, ELEMENTS]), _created(4 * ELEMENTS + ROOM)
        welcome = stream_pb2.Welcome(slot_bytes=slot.nbytes, elements=ELEMENTS, partitions=1)
        connection = ShmConnection(ours, welcome, (weights.read_descriptor, descriptor))
        transport = ShmTransport(ShardAddress("", 1, "", "shard"), GREETING)
        transport._connections = Connections(lambda until_s: connection, "shard")
    yield transport, theirs, slot
    transport.close()
    theirs.close()


def answered(
    ends: tuple[Any, Stream, Any], *answers: tuple[tensor_pb2.PullReply, bytes], in_slot: bytes = b""
) -> list[Any]:
    """Return the rows that a pull reads when these are its answers, and this is in the slot."""
    transport, theirs, slot = ends
    found: list[Any] = []
    soon = time.monotonic() + DEADLINE_S

    def answer() -> None:
        theirs.skip(theirs.receive(deadline_s=soon).payload_bytes, deadline_s=soon)
        if in_slot:
            slot[4 * ELEMENTS : 4 * ELEMENTS + len(in_slot)] = np.frombuffer(in_slot, np.uint8)
        for reply, payload in answers:
            theirs.send(Kind.WEIGHTS, reply, [memoryview(payload)], deadline_s=soon)

    thread = threading.Thread(target=answer)
    thread.start()
    run = pull_of(0, 0, keys={"user": keys_of(1)})
    try:
        transport.pull(run, Buffers([]), DEADLINE_S, lambda rows: found.append(rows["user"].values.tolist())).result()
    finally:
        thread.join()
    return found


def reply_of(present: int = 1, row_elements: int = 3, **more: Any) -> tensor_pb2.PullReply:
    reply = tensor_pb2.PullReply(version=1, last=True, **more)
    reply.tables.add(table="user", present=present, row_elements=row_elements, dtype=tensor_pb2.DTYPE_FLOAT32)
    return reply


ROW = b"\1" + np.float32([1, 2, 3]).tobytes()


def test_rows_come_with_the_message(ends: Any) -> None:
    assert answered(ends, (reply_of(), ROW)) == [[[1, 2, 3]]]


def test_or_in_the_slot_behind_the_weights(ends: Any) -> None:
    if ends[2] is None:
        pytest.skip("TCP has no slot")
    assert answered(ends, (reply_of(), b""), in_slot=ROW) == [[[1, 2, 3]]]


LIES: list[tuple[tensor_pb2.PullReply, bytes, type[ParashardError]]] = [
    (reply_of(), ROW + b"1", MalformedFrame),
    (reply_of(), ROW[:-1], MalformedFrame),
    (reply_of(present=2), ROW + bytes(12), MalformedFrame),
    (reply_of(row_elements=25), b"", MalformedFrame),
    (reply_of(row_elements=ROWS_BYTES_MAX // 4), b"", LimitExceeded),
    (tensor_pb2.PullReply(version=1, last=True), b"", MalformedFrame),
]


@pytest.mark.parametrize(("reply", "payload", "kind"), LIES)
def test_a_length_that_cannot_be_is_refused(
    ends: Any, reply: tensor_pb2.PullReply, payload: bytes, kind: type[ParashardError]
) -> None:
    with pytest.raises(kind):
        answered(ends, (reply, payload), in_slot=b"" if ends[2] is None else b"\1")


def test_parts_that_bring_nothing_are_no_answer(ends: Any) -> None:
    if ends[2] is not None:
        pytest.skip("over shared memory there is one part")
    reply = reply_of()
    reply.last = False
    with pytest.raises(MalformedFrame, match="nothing in it"):
        answered(ends, (reply, ROW), (tensor_pb2.PullReply(version=1), b""))
