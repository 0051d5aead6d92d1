"""Watch: looks at every shard once a second, for the status, the history and the metrics."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from coordinator.membership import ShardLife
from parashard import rpc
from parashard.errors import ParashardError
from protos import shard_pb2, shard_pb2_grpc

DEADLINE_S = 5.0

log = structlog.get_logger("coordinator")


class ShardWatch:
    """Asks shards for their records.

    Parameters
    ----------
    run_id : str
        What the shards must be of.
    """

    def __init__(self, run_id: str) -> None:
        self._request = shard_pb2.InspectRequest(run_id=run_id)
        self._stubs: dict[str, shard_pb2_grpc.ShardStub] = {}

    def look(self, lives: list[ShardLife], saw: Callable[[shard_pb2.InspectReply], None]) -> list[ParashardError]:
        """Ask every shard at once and hand on each record; return what went wrong, one error a shard."""
        calls = [(life, self._stub(life.address).Inspect.future(self._request, timeout=DEADLINE_S)) for life in lives]
        errors = []
        for life, call in calls:
            try:
                with rpc.our_errors(life.address):
                    saw(call.result())
            except ParashardError as error:
                errors.append(error)
        return errors

    def _stub(self, address: str) -> shard_pb2_grpc.ShardStub:
        if address not in self._stubs:
            self._stubs[address] = shard_pb2_grpc.ShardStub(rpc.connect(address))  # type: ignore[no-untyped-call]
        return self._stubs[address]
