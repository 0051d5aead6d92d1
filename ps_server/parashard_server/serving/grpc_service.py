"""The shard's gRPC service: decode, run it under the lock, encode. No arithmetic, no decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc

from parashard._proto import shard_pb2, shard_pb2_grpc
from parashard.errors import LimitExceeded, MalformedFrame, StaleIncarnation, Superseded, WrongRun
from parashard.protocol import wire
from parashard.protocol.messages import CHUNK_BYTES_MAX
from parashard.protocol.proto_conversion import interval_messages
from parashard.protocol.rpc import DATA_DEADLINE_S, Server, raw_handlers
from parashard.security.grpc_admission import peer_of_call
from parashard.transports.grpc import SERVICE
from parashard_server.core.shard import Shard
from parashard_server.durability.checkpointer import Checkpointer
from parashard_server.durability.lifecycle import ShardLifecycle
from parashard_server.serving.push_memory import PushMemory
from parashard_server.serving.request_handler import RequestHandler
from parashard_server.serving.shard_host import ShardHost


class ShardService(shard_pb2_grpc.ShardServicer):
    """Serves one shard.

    Parameters
    ----------
    plane : RequestHandler
        Takes pushes, gives weights.
    host : ShardHost
        The pure core and its lock.
    checkpointer : Checkpointer
        Saves the state.
    lifecycle : ShardLifecycle
        Gives the shard another life for a rollback, and has the log.
    memory : PushMemory
        Where a push of one message is counted while it is served.
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
        memory.reclaim = lambda: host.run_exclusive(lambda shard: shard.assemblies.expire(memory.clock()))
        self.coordinator_incarnation = 0

    def add_to(self, server: Server) -> None:
        """Register every method of the shard with a server."""
        shard_pb2_grpc.add_ShardServicer_to_server(self, server.grpc)  # type: ignore[no-untyped-call]
        server.grpc.add_generic_rpc_handlers((raw_handlers(SERVICE, {"Push": self.push, "Pull": self.pull}),))

    def push(self, frame: bytes, context: grpc.ServicerContext) -> bytes:
        """Take a chunk of a push."""
        chunk = wire.decode_push(frame)
        peer = peer_of_call(context)
        if len(chunk.payload) < chunk.total_bytes:  # its assembly holds memory for all of it
            receipt = self._plane.push(replace(chunk, peer=peer), _time_left_s(context))
        else:
            with self._memory.lent(peer, len(chunk.payload)):
                receipt = self._plane.push(chunk, _time_left_s(context))
        return wire.encode_receipt(receipt)

    def pull(self, frame: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer with a run of the weights."""
        run = wire.decode_pull(frame)
        if run.length_bytes > CHUNK_BYTES_MAX:
            raise LimitExceeded(f"a pull of {run.length_bytes} bytes; over gRPC allowed are {CHUNK_BYTES_MAX}")
        return self._plane.pull(run, _time_left_s(context), wire.encode_weights)

    def Inspect(self, request: shard_pb2.InspectRequest, context: Any) -> shard_pb2.InspectReply:
        """Tell what the shard holds and has counted."""
        self._check_run(request.run_id)
        reply = self._host.run_request(inspection, _time_left_s(context))
        reply.queue_bytes_max = self._memory.held_bytes_max
        counted = self._checkpointer.record
        reply.checkpoint_rounds.extend(self._lifecycle.returnable())
        reply.checkpoints, reply.failed_checkpoints = counted.stored, counted.failed
        reply.checkpoint_error, reply.checkpoint_bytes = counted.error, counted.bytes
        reply.checkpoint_s, reply.checkpoint_stall_s = counted.seconds, counted.stall_s
        self._lifecycle.log.describe(reply)
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
        return shard_pb2.TakeCheckpointReply(
            folder=stored.id.folder,
            manifest_bytes=stored.manifest_bytes,
            manifest_sha256=stored.manifest_sha256,
            applied=interval_messages(stored.applied),
            skipped=interval_messages(stored.skipped),
        )

    def Rollback(self, request: shard_pb2.RollbackRequest, context: Any) -> shard_pb2.RollbackReply:
        """Go back to a round under a new incarnation (P12)."""
        self._check_command(request)
        return shard_pb2.RollbackReply(incarnation=self._lifecycle.roll_back(request.round, request.incarnation))

    def _check_run(self, run_id: str) -> None:
        mine = self._host.shard.identity.run_id
        if run_id != mine:
            raise WrongRun(f"this shard is of run {mine}, the call names {run_id or '(none)'}")

    def _check_command(self, request: shard_pb2.TakeCheckpointRequest | shard_pb2.RollbackRequest) -> None:
        """Refuse a command of another run, to another life or shard, or from a coordinator with a successor (P3)."""
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
    )


def _time_left_s(context: grpc.ServicerContext) -> float:
    left_s = context.time_remaining()
    return DATA_DEADLINE_S if left_s is None else max(0.0, min(DATA_DEADLINE_S, left_s))
