"""The shared-memory transport: tensors in memory that worker and shard both map, small messages over a Unix socket.

A push is one copy, from the caller's arrays into the connection's slot, where the shard uses it in place. A pull is one
copy, out of the shard's own weights, which the shard may update meanwhile: `parashard.transports.shared_weights` keeps
it consistent. If a partition changes too often, the shard copies to the slot under its own lock. The other end is
`parashard_server.serving.stream_services`.

The shard allocates the memory and sends its descriptors with WELCOME; it is freed with its last user.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import NoReturn

import numpy as np

from parashard._proto import stream_pb2
from parashard.errors import LimitExceeded, MalformedFrame, StaleRound, Unreachable
from parashard.plan.partition import ELEMENT_BYTES
from parashard.process import failpoints
from parashard.protocol import wire
from parashard.protocol.messages import NO_KEYS, Ack, Buffers, Fetched, FoundRows, PullRun, Push
from parashard.transports import memory
from parashard.transports.base import Greeting, Pending, ReadRows, ShardAddress, no_rows
from parashard.transports.connections import Connections, Exchange, StreamTransport
from parashard.transports.memory import Bytes
from parashard.transports.shared_weights import WeightsReader
from parashard.transports.socket_io import close_descriptors, connected
from parashard.transports.stream import Head, Kind, Refused, Stream, greet, receive_answer


class ShmTransport(StreamTransport["ShmConnection"]):
    """Connections to one shard on this host, by its `local_path`."""

    def __init__(self, where: ShardAddress, greeting: Greeting) -> None:
        self._path = where.local_path
        self._greeting = greeting
        super().__init__(Connections(self._open, where.local_path))

    def push(self, push: Push, deadline_s: float) -> Pending[Ack]:
        """Copy a push into a slot and tell the shard."""
        until_s = time.monotonic() + deadline_s
        ask = partial(ShmConnection.ask_push, push=push, until_s=until_s)
        return Exchange(self._connections, ask, partial(ShmConnection.ack, until_s=until_s), until_s)

    def pull(self, run: PullRun, into: Buffers, deadline_s: float, read: ReadRows = no_rows) -> Pending[Fetched]:
        """Request rows and the version of the weights; these are copied once it is known."""
        until_s = time.monotonic() + deadline_s
        ask = partial(ShmConnection.ask_pull, run=run, until_s=until_s)
        answered = partial(ShmConnection.weights, run=run, into=into, read=read, until_s=until_s)
        return Exchange(self._connections, ask, answered, until_s)

    def _open(self, until_s: float) -> ShmConnection:
        stream = Stream(connected(self._path, until_s), self._path)
        welcome, descriptors = greet(stream, self._greeting, deadline_s=until_s, descriptors_max=2)
        try:
            return ShmConnection(stream, welcome, descriptors)
        except BaseException:
            stream.close()
            raise
        finally:
            close_descriptors(descriptors)


class ShmConnection:
    """One connection and its slot, which one request at a time uses.

    WELCOME has brought the descriptors of the weights and the slot, which are the caller's to close. Raises
    MalformedFrame if the memory is not what WELCOME says, Unreachable if it cannot be mapped.
    """

    def __init__(self, stream: Stream, welcome: stream_pb2.Welcome, descriptors: tuple[int, ...]) -> None:
        if len(descriptors) != 2:
            raise MalformedFrame(f"a shard sends two descriptors of memory, found {len(descriptors)}", peer=stream.peer)
        weights_descriptor, slot_descriptor = descriptors
        if welcome.slot_bytes < ELEMENT_BYTES * welcome.elements:
            raise MalformedFrame(
                f"a slot of {welcome.slot_bytes} bytes for a shard of {welcome.elements} elements", peer=stream.peer
            )
        self._stream = stream
        self._slot_bytes = welcome.slot_bytes
        self._rows_at = ELEMENT_BYTES * welcome.elements
        try:
            memory.check(slot_descriptor, welcome.slot_bytes, "a slot")
            slot = memory.mapped(slot_descriptor, writable=True)
            reader = WeightsReader.mapped(weights_descriptor, welcome.elements, welcome.partitions)
            self._mapped: tuple[Bytes, WeightsReader] | None = (slot, reader)
        except OSError as error:
            raise Unreachable(f"the shard's memory cannot be mapped: {error}", peer=stream.peer) from None

    def close(self) -> None:
        """End the connection, from any thread; memory that is in use is freed afterwards."""
        self._mapped = None  # a remaining reference to this object must not keep a dead shard's memory
        self._stream.close()

    def ask_push(self, push: Push, until_s: float) -> None:
        """Copy a push into the slot and send its header."""
        slot, _ = self._mapped or self._closed()
        if push.payload.nbytes > self._slot_bytes:
            raise LimitExceeded(
                f"step {push.step}: a push of {push.payload.nbytes} bytes; the shard takes {self._slot_bytes}",
                peer=self._stream.peer,
            )
        memory.gather(push.payload, slot)
        failpoints.hit("worker.push.in_slot")
        self._stream.send(Kind.PUSH, wire.push_header(push), deadline_s=until_s)

    def ack(self, until_s: float) -> Ack:
        """Wait for the answer to a push; from then on the slot is free."""
        return wire.ack(receive_answer(self._stream, Kind.ACK, deadline_s=until_s).header)

    def ask_pull(self, run: PullRun, until_s: float) -> None:
        """Request rows, and the version of a run."""
        header = wire.pull_header(run)
        keys = wire.keys_payload(run) if run.keys else []
        if keys and wire.keys_bytes_of(header) <= self._slot_bytes - self._rows_at:
            slot, _ = self._mapped or self._closed()
            memory.gather(Buffers(keys), slot[self._rows_at :])
            header.keys_in_slot, keys = True, []
        self._stream.send(Kind.PULL, header, keys, deadline_s=until_s)

    def weights(self, run: PullRun, into: Buffers, read: ReadRows, until_s: float) -> Fetched:
        """Wait for the answer to a pull, pass its rows to `read`, and copy the weights; return the result."""
        head = receive_answer(self._stream, Kind.WEIGHTS, deadline_s=until_s)
        if run.keys or head.header.tables or head.payload_bytes:
            read(self._rows(head, run, until_s))
        slot, reader = self._mapped or self._closed()
        version, end = head.header.version, run.offset_bytes + run.length_bytes
        if end > ELEMENT_BYTES * reader.elements:
            raise MalformedFrame(
                f"a pull of bytes up to {end} from a shard of {reader.elements} elements", peer=self._stream.peer
            )
        exact = run.round is not None
        try:
            position = reader.read(run.offset_bytes, end, into, known=run.known_version, version=version, exact=exact)
        except StaleRound as error:  # no message is in transit: the connection is usable, as after a refusal
            raise Refused(StaleRound(error.message, peer=self._stream.peer)) from None
        if position < end:
            rest = run._replace(offset_bytes=position, length_bytes=end - position, keys=NO_KEYS)
            self._copy_from_slot(slot, rest, into, position - run.offset_bytes, until_s)
        return Fetched(version, head.header.waited_s)

    def _rows(self, head: Head, run: PullRun, until_s: float) -> Mapping[str, FoundRows]:
        """Return the rows of an answer to a pull: in the slot, or from the socket if they had no room there."""
        # They are views of the slot, for as long as the connection is in use.
        reply = head.header
        rows_bytes = wire.rows_bytes_of(reply, run)
        if head.payload_bytes not in (0, rows_bytes):
            raise MalformedFrame(
                f"rows of {rows_bytes} bytes, {head.payload_bytes} beside the slot", peer=self._stream.peer
            )
        if head.payload_bytes:
            rows = np.empty(rows_bytes, np.uint8)
            self._stream.receive_into([rows.data], deadline_s=until_s)
        else:
            slot, _ = self._mapped or self._closed()
            rows = slot[self._rows_at : self._rows_at + rows_bytes]
            if rows.nbytes < rows_bytes:
                raise MalformedFrame(
                    f"rows of {rows_bytes} bytes from byte {self._rows_at} of a slot of {self._slot_bytes}",
                    peer=self._stream.peer,
                )
        return wire.rows_from(reply, rows.data, run)

    def _copy_from_slot(self, slot: Bytes, run: PullRun, into: Buffers, place: int, until_s: float) -> None:
        """Have the shard copy a run to the slot, and copy it from there."""
        self._stream.send(Kind.PULL, wire.pull_header(run, in_slot=True), deadline_s=until_s)
        head = receive_answer(self._stream, Kind.WEIGHTS, deadline_s=until_s)
        self._rows(head, run, until_s)  # refuses any
        copied = sum(head.header.run_lengths)
        wire.check_answered(run, copied, peer=self._stream.peer)
        for offset, length in wire.runs_within(head.header, run, copied):
            memory.scatter(slot[offset : offset + length], into, place + offset - run.offset_bytes)

    def _closed(self) -> NoReturn:
        raise Unreachable("the connection was closed", peer=self._stream.peer)
