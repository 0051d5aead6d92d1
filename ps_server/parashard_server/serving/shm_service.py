"""ShmService: serves workers on the same host, with tensors in memory that both map.

Makes each connection's slot, within the shard's budget, and sends it with the shard's weights at HELLO; then one small
message a request. A push is used in the slot, without a copy. Decides nothing: the data plane does. Called by
`parashard_server.serving.stream_server`, a thread for each connection; `parashard.transports.shm` is the other end.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parashard._proto import stream_pb2, tensor_pb2
from parashard.errors import LimitExceeded, MalformedFrame, ParashardError, QueueFull
from parashard.protocol import wire
from parashard.protocol.buffers import Buffers
from parashard.protocol.messages import Weights
from parashard.transports import memory
from parashard.transports.memory import Bytes
from parashard.transports.shared_weights import SharedWeights
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


class Slots:
    """The memory that connections push through, within the shard's budget.

    A slot is held for as long as its connection, so two things are left to others. Invariants: all slots together leave
    `left_bytes` of the budget, so that a push which comes another way never waits for a connection to end; a worker's
    second slot leaves room for the first of every worker that has none yet, which would else go another way for as long
    as this incarnation of the shard.

    Parameters
    ----------
    memory : PushMemory
        Where slots are counted.
    left_bytes : int
        What they leave: the largest push that comes another way.
    workers : int
        How many workers the job has.
    """

    def __init__(self, memory: PushMemory, *, left_bytes: int = 0, workers: int = 1) -> None:
        self._memory = memory
        self._left_bytes = left_bytes
        self._workers = workers
        self._lock = threading.Lock()
        self._holders: Counter[str] = Counter()
        self.held_bytes = 0
        """Bytes of the slots in use."""

    @contextmanager
    def take(self, size_bytes: int, worker: str) -> Iterator[tuple[int, Bytes]]:
        """Lend a worker a new slot, as a descriptor and mapped; it ends with the context, if no view of it is left.

        Raises QueueFull if too little of the budget is left, or the system has no memory; nothing is reserved.
        """
        with self._held(size_bytes, worker), self._memory.lent(size_bytes):
            descriptor, slot = _created(size_bytes)
            try:
                yield descriptor, slot
            finally:
                del slot  # its memory goes with its last view, and this frame may live as long as an error
                os.close(descriptor)

    @contextmanager
    def _held(self, size_bytes: int, worker: str) -> Iterator[None]:
        with self._lock:
            awaited = max(0, self._workers - len(self._holders)) if worker in self._holders else 0
            most_bytes = max(0, self._memory.total_bytes - self._left_bytes - awaited * size_bytes)
            if self.held_bytes + size_bytes > most_bytes:
                raise QueueFull(
                    f"connections over shared memory hold {self.held_bytes} bytes; another {size_bytes} would pass "
                    f"{most_bytes}, what others leave them of cluster.queue_bytes"
                )
            self._holders[worker] += 1
            self.held_bytes += size_bytes
        try:
            yield
        finally:
            with self._lock:
                self.held_bytes -= size_bytes
                self._holders -= Counter([worker])


class ShmService:
    """Serves one shard to its own host.

    `weights` returns the memory of the incarnation that is served now; None: it is not shared.
    """

    def __init__(self, plane: Plane, weights: Callable[[], SharedWeights | None], slots: Slots) -> None:
        self._plane = plane
        self._weights = weights
        self._slots = slots

    def serve(self, stream: Stream) -> None:
        """Answer requests until the worker leaves or does not keep to the protocol; an error ends the connection.

        Raises QueueFull if there is no room for its slot, or there was none for weights that can be shared.
        """
        worker, weights = self._greeted(stream)
        with self._slots.take(self._plane.push_bytes_max, worker) as (descriptor, slot):
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

    def _greeted(self, stream: Stream) -> tuple[str, SharedWeights]:
        """Receive HELLO; return the worker's name, and the memory that it may have."""
        hello = greeted(stream, self._plane, deadline_s=hello_deadline_s())
        weights = self._weights()
        if weights is None:
            raise QueueFull("this incarnation of the shard got no shared memory for its weights")
        return hello.worker, weights

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


def _created(size_bytes: int) -> tuple[int, Bytes]:
    """Return a new slot, sealed, as a descriptor that is the caller's and mapped."""
    try:
        descriptor = memory.create("parashard-slot", size_bytes)
        try:
            memory.seal(descriptor, writable=True)
            return descriptor, memory.mapped(descriptor, writable=True)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise QueueFull(f"this machine gives no memory for a slot of {size_bytes} bytes: {error}") from None


def _rows_in(weights: Weights, room: Bytes) -> list[memoryview]:
    """Copy rows to their room in a slot; where it is too small return a copy, which goes beside it."""
    pieces = wire.rows_payload(weights)
    if sum(piece.nbytes for piece in pieces) > room.nbytes:
        return [memoryview(bytes(piece)) for piece in pieces]
    memory.gather(Buffers(pieces), room)
    return []
