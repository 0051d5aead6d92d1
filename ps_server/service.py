"""The shard's gRPC service: decode, let the owner delegate, encode. No arithmetic, no decision."""

from __future__ import annotations

import time
from typing import Any

import grpc

from parashard import wire
from parashard.contracts import interval_messages
from parashard.errors import NotReady, WrongRun
from parashard.messages import Receipt
from parashard.rpc import DATA_DEADLINE_S, Server, raw_handlers
from parashard.transports.grpc import SERVICE
from protos import shard_pb2, shard_pb2_grpc
from ps_server.owner import Owner
from ps_server.shard import Shard


class ShardService(shard_pb2_grpc.ShardServicer):
    """Serves one shard.

    Parameters
    ----------
    shard : Shard
        The pure core; touched only through `owner`.
    owner : Owner
        Lets one request at a time touch it.
    """

    def __init__(self, shard: Shard, owner: Owner) -> None:
        self._shard = shard
        self._owner = owner
        self.draining = False

    def add_to(self, server: Server) -> None:
        """Register every method of the shard with a server."""
        shard_pb2_grpc.add_ShardServicer_to_server(self, server.grpc)  # type: ignore[no-untyped-call]
        server.grpc.add_generic_rpc_handlers((raw_handlers(SERVICE, {"Push": self.push, "Pull": self.pull}),))

    def push(self, frame: bytes, context: grpc.ServicerContext) -> bytes:
        """Take a chunk of a push."""
        if self.draining:
            raise NotReady(f"shard {self._shard.identity.shard} is stopping")
        chunk = wire.decode_push(frame)

        def take() -> Receipt:
            started_s = time.monotonic()
            try:
                return self._shard.push(chunk, started_s)
            finally:
                self._shard.record.push_s += time.monotonic() - started_s

        return wire.encode_receipt(self._owner.run(take, _time_left_s(context)))

    def pull(self, frame: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer with a run of the weights, copied while nobody moves them."""
        run = wire.decode_pull(frame)

        def read() -> bytes:
            started_s = time.monotonic()
            try:
                return wire.encode_weights(self._shard.pull(run))
            finally:
                self._shard.record.pull_s += time.monotonic() - started_s

        return self._owner.run(read, _time_left_s(context))

    def Inspect(self, request: shard_pb2.InspectRequest, context: Any) -> shard_pb2.InspectReply:
        """Tell what the shard holds and has counted."""
        mine = self._shard.identity.run_id
        if request.run_id != mine:
            raise WrongRun(f"this shard is of run {mine}, the call names {request.run_id or '(none)'}")
        return self._owner.run(lambda: inspection(self._shard), _time_left_s(context))


def inspection(shard: Shard) -> shard_pb2.InspectReply:
    """Return a shard's record as its message."""
    record = shard.record
    return shard_pb2.InspectReply(
        shard=shard.identity.shard,
        incarnation=shard.identity.incarnation,
        version=shard.ingest.version,
        applied=interval_messages(shard.ingest.applied),
        buffered_steps=shard.ingest.buffered_steps,
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
        queue_bytes_max=shard.assemblies.held_bytes_max,
    )


def _time_left_s(context: grpc.ServicerContext) -> float:
    left_s = context.time_remaining()
    return DATA_DEADLINE_S if left_s is None else max(0.0, min(DATA_DEADLINE_S, left_s))
