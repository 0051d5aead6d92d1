"""ShmService: serves workers on the same host, whose tensors lie in memory that both map.

Makes each connection's slot, within a budget, and sends it with the shard's weights at HELLO; then one small message a
request. A push is used in the slot, without a copy. Decides nothing: the data plane does. Called by
`ps_server.stream_server`, a thread for each connection; `parashard.transports.shm` is the other end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parashard import wire
from parashard.errors import LimitExceeded, MalformedFrame, ParashardError, QueueFull
from parashard.messages import Weights
from parashard.rpc import DATA_DEADLINE_S
from parashard.transports import memory
from parashard.transports.memory import Bytes
from parashard.transports.shared_weights import SharedWeights
from parashard.transports.stream import Head, Kind, Stream, parsed, refusal
from protos import stream_pb2, tensor_pb2
from ps_server.stream_server import HELLO_DEADLINE_S
from ps_server.tcp_service import Plane


class Slots:
    """The memory that connections push through, within a budget (P19).

    Invariant: the slots in use hold at most the budget, or there is one alone.

    Parameters
    ----------
    budget_bytes : int
        Greatest sum of all slots; a first slot is always admitted, however long.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self.held_bytes = 0
        """Bytes of the slots in use."""
        self.held_bytes_max = 0
        """The most that has been in use at once."""

    @contextmanager
    def take(self, size_bytes: int) -> Iterator[tuple[int, Bytes]]:
        """Lend a new slot, as a descriptor and mapped; here it ends with the context, if no view of it is left.

        Raises
        ------
        QueueFull
            If the slots in use leave too little of the budget, or the system has no memory; nothing is reserved.
        """
        self._hold(size_bytes)
        try:
            try:
                descriptor = memory.create("parashard-slot", size_bytes)
            except OSError as error:
                raise QueueFull(f"this machine gives no memory for a slot of {size_bytes} bytes: {error}") from None
            try:
                memory.seal(descriptor, writable=True)
                yield descriptor, memory.mapped(descriptor, writable=True)
            finally:
                os.close(descriptor)
        finally:
            with self._lock:
                self.held_bytes -= size_bytes

    def _hold(self, size_bytes: int) -> None:
        with self._lock:
            if self.held_bytes and self.held_bytes + size_bytes > self._budget_bytes:
                raise QueueFull(
                    f"connections over shared memory hold {self.held_bytes} bytes; another {size_bytes} would pass "
                    f"{self._budget_bytes}"
                )
            self.held_bytes += size_bytes
            self.held_bytes_max = max(self.held_bytes_max, self.held_bytes)


class ShmService:
    """Serves one shard to its own host.

    Parameters
    ----------
    plane : Plane
        The shard.
    weights : callable
        Returns the memory of the life that is served now; None: it is not shared.
    slots : Slots
        Where slots come from.
    direct : bool
        False: the shard must know what was pulled (delay compensation), so weights are only copied into slots.
    """

    def __init__(
        self, plane: Plane, weights: Callable[[], SharedWeights | None], slots: Slots, *, direct: bool
    ) -> None:
        self._plane = plane
        self._weights = weights
        self._slots = slots
        self._direct = direct

    def serve(self, stream: Stream) -> None:
        """Answer requests until the worker leaves or does not keep to the protocol.

        Raises
        ------
        MalformedFrame
            If it does not.
        WrongRun, StalePlan, StaleIncarnation, NotReady
            If it says HELLO to another life, or at a bad moment.
        QueueFull
            If there is no room for its slot, or there was none for weights that can be shared.
        Unreachable
            If it is gone, or stopped in the middle.
        """
        weights = self._greeted(stream)
        with self._slots.take(weights.weights.nbytes) as (descriptor, slot):
            welcome = stream_pb2.Welcome(
                push_bytes_max=slot.nbytes,
                slot_bytes=slot.nbytes,
                elements=weights.weights.size,
                partitions=weights.done.size,
                direct=self._direct,
            )
            descriptors = (weights.read_descriptor, descriptor)
            stream.send(Kind.WELCOME, welcome, deadline_s=_hello_deadline_s(), descriptors=descriptors)
            del weights  # else a connection to an earlier life would keep that life's memory
            while True:
                stream.wait()
                deadline_s = time.monotonic() + DATA_DEADLINE_S
                head = _received(stream, deadline_s)
                if head.kind is Kind.PUSH:
                    self._push(stream, parsed(head.header, tensor_pb2.PushHeader), slot, deadline_s)
                elif head.kind is Kind.PULL:
                    self._pull(stream, parsed(head.header, tensor_pb2.PullHeader), slot, deadline_s)
                else:
                    raise MalformedFrame(f"requests are PUSH and PULL, found {head.kind.name}")

    def _greeted(self, stream: Stream) -> SharedWeights:
        """Receive HELLO; return the memory that it may have."""
        head = _received(stream, _hello_deadline_s())
        if head.kind is not Kind.HELLO:
            raise MalformedFrame(f"a connection begins with HELLO, found {head.kind.name}")
        self._plane.check(wire.target(parsed(head.header, stream_pb2.Hello).target))
        weights = self._weights()
        if weights is None:
            raise QueueFull("this life of the shard got no shared memory for its weights")
        return weights

    def _push(self, stream: Stream, header: tensor_pb2.PushHeader, slot: Bytes, deadline_s: float) -> None:
        if header.offset_bytes != 0 or header.total_bytes > slot.nbytes:
            raise LimitExceeded(
                f"step {header.step}: a push of {header.total_bytes} bytes from {header.offset_bytes} on; a slot has "
                f"{slot.nbytes}"
            )
        payload = slot[: header.total_bytes].data
        try:
            receipt = self._plane.push(wire.push_chunk(header, payload), _left_s(deadline_s))
        except ParashardError as error:
            stream.send(Kind.REFUSAL, refusal(error), deadline_s=deadline_s)
            return
        stream.send(Kind.RECEIPT, wire.receipt_message(receipt), deadline_s=deadline_s)

    def _pull(self, stream: Stream, header: tensor_pb2.PullHeader, slot: Bytes, deadline_s: float) -> None:
        read = (lambda weights: _copied(weights, slot)) if header.in_slot else _version_of
        try:
            reply = self._plane.pull(wire.pull_run(header), _left_s(deadline_s), read)
        except ParashardError as error:
            stream.send(Kind.REFUSAL, refusal(error), deadline_s=deadline_s)
            return
        stream.send(Kind.WEIGHTS, reply, deadline_s=deadline_s)


def _version_of(weights: Weights) -> tensor_pb2.PullReply:
    """Return all that a worker needs to read the weights where they lie."""
    return tensor_pb2.PullReply(version=weights.version)


def _copied(weights: Weights, slot: Bytes) -> tensor_pb2.PullReply:
    """Copy what has moved to its place in a slot."""
    for run in weights.runs:
        memory.copy(run.values, slot[run.offset_bytes : run.offset_bytes + run.values.nbytes])
    return wire.weights_message(weights)


def _received(stream: Stream, deadline_s: float) -> Head:
    """Return the next message; it has no payload, since those lie in the slot."""
    head = stream.receive(deadline_s=deadline_s)
    if head.payload_bytes:
        raise MalformedFrame(f"over shared memory a message has no payload, found {head.payload_bytes} bytes")
    return head


def _hello_deadline_s() -> float:
    return time.monotonic() + HELLO_DEADLINE_S


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
