"""The shard's gRPC service: receive, decode, run it under the lock, encode. No arithmetic, no decision."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc

from parashard._proto import shard_pb2, shard_pb2_grpc
from parashard.checkpoints.catalogue import part_of
from parashard.client.proto_conversion import interval_messages
from parashard.errors import LimitExceeded, MalformedFrame, StaleIncarnation, Superseded, Unreachable, WrongRun
from parashard.protocol import wire
from parashard.protocol.messages import MESSAGE_BYTES_MAX
from parashard.protocol.rpc import Server, data_deadline_s, data_handlers
from parashard.transports import memory
from parashard.transports.grpc import SERVICE
from parashard_server.core.shard import Shard
from parashard_server.durability.checkpointer import Checkpointer
from parashard_server.durability.lifecycle import ShardLifecycle
from parashard_server.push_memory import PushMemory
from parashard_server.serving.live_reads import LiveReads
from parashard_server.serving.request_handler import RequestHandler
from parashard_server.shard_host import ShardHost
from parashard_server.state.rows.table_rows import TableRows


class ShardService(shard_pb2_grpc.ShardServicer):
    """Serves one shard: its requests, the coordinator's commands, and readers.

    Pushes of several messages are received into `memory`, others counted in it.
    """

    def __init__(
        self,
        plane: RequestHandler,
        host: ShardHost,
        checkpointer: Checkpointer,
        lifecycle: ShardLifecycle,
        memory: PushMemory,
    ) -> None:
        self._plane = plane
        self._host = host
        self._checkpointer = checkpointer
        self._lifecycle = lifecycle
        self._memory = memory
        self._live = LiveReads(plane, host)
        self.coordinator_incarnation = 0

    def add_to(self, server: Server) -> None:
        """Register every method of the shard with a server."""
        shard_pb2_grpc.add_ShardServicer_to_server(self, server.grpc)  # type: ignore[no-untyped-call]
        server.grpc.add_generic_rpc_handlers((data_handlers(SERVICE, self.push, self.pull),))

    def push(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Take a push: a single message is used in place, several are received whole into a buffer first.

        A partly received push is discarded with its call.
        """
        until_s = self._until_s(context)
        header, payload = wire.decode_push(next(messages))
        self._plane.check(wire.target(header.target))
        missing_bytes = header.total_bytes - payload.nbytes
        if missing_bytes and header.total_bytes > self._plane.push_bytes_max:
            raise LimitExceeded(
                f"step {header.step}: a push of {header.total_bytes} bytes; this shard's plan allows "
                f"{self._plane.push_bytes_max}"
            )
        with self._memory.buffer(header.total_bytes) if missing_bytes else self._memory.lent(payload.nbytes) as buffer:
            if buffer is not None:
                payload = _received(buffer, payload, messages, until_s)
            ack = self._plane.push(wire.push_from(header, payload), _left_s(until_s))
        return wire.encode_ack(ack)

    def pull(self, frame: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer with a run of the weights; the lock is taken for each message."""
        until_s = self._until_s(context)
        run = wire.decode_pull(frame)
        for part in wire.parts_of(run):
            yield self._plane.pull(part, max(0.0, until_s - time.monotonic()), wire.encode_weights)

    def Inspect(self, request: shard_pb2.InspectRequest, context: Any) -> shard_pb2.InspectReply:
        """Return the shard's state and counters."""
        self._check_run(request.run_id)
        with self._host.lock.held(_left_s(self._until_s(context))):
            reply = inspection(self._host.shard)
        reply.queue_bytes_max = self._memory.held_bytes_max
        counted = self._checkpointer.record
        reply.checkpoint_rounds.extend(self._lifecycle.returnable())
        reply.checkpoints, reply.failed_checkpoints = counted.stored, counted.failed
        reply.checkpoint_error, reply.checkpoint_bytes = counted.error, counted.bytes
        reply.checkpoint_s, reply.checkpoint_stall_s = counted.seconds, counted.stall_s
        return reply

    def TakeCheckpoint(self, request: shard_pb2.TakeCheckpointRequest, context: Any) -> shard_pb2.TakeCheckpointReply:
        """Save the shard's state, or note a round to save."""
        self._check_command(request)
        round_ = request.round if request.HasField("round") else None
        if request.ahead:
            if round_ is None:
                raise MalformedFrame("a checkpoint that is asked for ahead of time names no round")
            self._checkpointer.name_ahead(round_)
            return shard_pb2.TakeCheckpointReply()
        stored = self._checkpointer.take(round_, damaged=request.damaged)
        part = part_of(stored)
        return shard_pb2.TakeCheckpointReply(
            folder=part.name,
            manifest_bytes=part.size_bytes,
            manifest_sha256=part.sha256,
            applied=interval_messages(stored.steps),
            skipped=interval_messages(stored.skipped_steps),
        )

    def Rollback(self, request: shard_pb2.RollbackRequest, context: Any) -> shard_pb2.RollbackReply:
        """Go back to a round under a new incarnation."""
        self._check_command(request)
        return shard_pb2.RollbackReply(incarnation=self._lifecycle.roll_back(request.round, request.incarnation))

    def Read(self, request: shard_pb2.ReadRequest, context: Any) -> shard_pb2.ReadReply:
        """Answer a reader; changes nothing."""
        return self._live.read(request, _left_s(self._until_s(context)))

    def _until_s(self, context: grpc.ServicerContext) -> float:
        """Return a call's deadline: its caller's, but at most that of a push or a pull."""
        bound_s, left_s = data_deadline_s(self._plane.push_bytes_max), context.time_remaining()
        return time.monotonic() + (bound_s if left_s is None else min(bound_s, left_s))

    def _check_run(self, run_id: str) -> None:
        mine = self._host.shard.identity.run_id
        if run_id != mine:
            raise WrongRun(f"this shard is of run {mine}, the call names {run_id or '(none)'}")

    def _check_command(self, request: shard_pb2.TakeCheckpointRequest | shard_pb2.RollbackRequest) -> None:
        """Refuse a command of another run, to another shard or incarnation, or of a superseded coordinator."""
        self._check_run(request.run_id)
        if request.coordinator_incarnation < self.coordinator_incarnation:
            raise Superseded(
                f"this shard obeys incarnation {self.coordinator_incarnation} of the coordinator, "
                f"not {request.coordinator_incarnation}"
            )
        mine = self._host.shard.identity
        if (request.shard, request.incarnation) != (mine.shard, mine.incarnation):
            raise StaleIncarnation(
                f"the command names incarnation {request.incarnation} of shard {request.shard}; this is "
                f"{mine.incarnation} of shard {mine.shard}"
            )
        self.coordinator_incarnation = request.coordinator_incarnation


def inspection(shard: Shard) -> shard_pb2.InspectReply:
    """Return a shard's record as its message."""
    record = shard.record
    return shard_pb2.InspectReply(
        shard=shard.identity.shard,
        incarnation=shard.identity.incarnation,
        version=shard.updates.version,
        applied=interval_messages(shard.updates.applied),
        buffered_steps=shard.updates.buffered_steps,
        duplicate_pushes=record.duplicate_pushes,
        skipped_steps=record.skipped_steps,
        refused_pushes=record.refused_pushes,
        staleness=[
            shard_pb2.StalenessCount(staleness=staleness, pushes=pushes)
            for staleness, pushes in sorted(record.staleness.items())
        ],
        unknown_staleness=record.unknown_staleness,
        step_lag_max=record.step_lag_max,
        variable_bytes=shard.storage.weights.nbytes,
        slot_bytes=shard.storage.slot_bytes,
        push_bytes=record.push_bytes,
        pull_bytes=record.pull_bytes,
        held=interval_messages(shard.updates.held),
        push_float32_bytes=record.push_float32_bytes,
        pull_unmoved_bytes=record.pull_unmoved_bytes,
        tables=[
            _rows_of(table, shard.updates.version)
            for table in (() if shard.tables is None else shard.tables.by_name.values())
        ],
    )


def _rows_of(table: TableRows, now: int) -> shard_pb2.TableFigures:
    return shard_pb2.TableFigures(
        table=table.table.name,
        rows=table.rows,
        rows_max=table.table.rows_max,
        memory_bytes=table.memory_bytes,
        candidates=table.counted_keys,
        added_rows=table.added_rows,
        evicted_rows=table.records.evicted,
        pulled_keys=table.pulled_keys,
        pulled_rows=table.pulled_rows,
        hottest_keys=[shard_pb2.HotKey(key=key, pushes=pushes) for key, pushes in table.hottest_keys(now)],
    )


def _received(buffer: memoryview, first: memoryview, messages: Iterator[bytes], until_s: float) -> memoryview:
    """Fill a buffer with the beginning of a push and the messages that follow, and return it."""
    memory.copy(first, buffer[: first.nbytes])
    position = first.nbytes
    while position < buffer.nbytes:
        if time.monotonic() > until_s:
            raise Unreachable(f"{position} bytes of a push of {buffer.nbytes} came before the deadline")
        piece = next(messages, b"")
        if not 0 < len(piece) <= min(MESSAGE_BYTES_MAX, buffer.nbytes - position):
            raise MalformedFrame(
                f"after {position} of the {buffer.nbytes} bytes of a push came a message of {len(piece)}"
            )
        memory.copy(memoryview(piece), buffer[position : position + len(piece)])
        position += len(piece)
    return buffer


def _left_s(until_s: float) -> float:
    return max(0.0, until_s - time.monotonic())
