"""ShardWatcher: the live weights and rows of a job's running shards, looked at again and again.

Owns which shard is asked where, and what is published: each shard as it was last read, of one plan. What a later
incarnation lacks is taken back, and told. Knows the coordinator and the shards' calls, and no thread.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from parashard._proto import shard_pb2 as pb
from parashard._proto import shard_pb2_grpc
from parashard.client.proto_conversion import plan_from, view_from
from parashard.client.pulled_rows import TableSet
from parashard.errors import ParashardError, StalePlan, WrongRun
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.partition import Plan
from parashard.process.logs import log
from parashard.protocol import rpc
from parashard.protocol.coordinator_client import CoordinatorClient
from parashard.security.credentials import Credentials
from parashard.serving.checkpoint_watcher import Published, Sight
from parashard.serving.live_shard import Ask, LiveShard
from parashard.transports.base import ShardAddress


class LiveSource:
    """The coordinator and the shards of a running job, over gRPC."""

    def __init__(self, coordinator: CoordinatorClient, credentials: Credentials | None = None) -> None:
        self._coordinator = coordinator
        self._credentials = credentials
        self._channels: dict[str, Any] = {}

    def job(self) -> tuple[str, Plan]:
        """Return the run and its plan; raises as the call."""
        reply = self._coordinator.get_job()
        return reply.run_id, plan_from(reply.plan)

    def view(self, run_id: str) -> Sequence[ShardAddress]:
        """Return where the shards are, in their order; raises as the call."""
        found = view_from(self._coordinator.get_view(run_id)).shards
        for left in self._channels.keys() - {place.address for place in found}:
            self._channels.pop(left).close()
        return found

    def ask(self, address: str) -> Ask:
        """Return a function that asks the shard at an address."""
        if address not in self._channels:
            self._channels[address] = rpc.connect(address, self._credentials)
        stub = shard_pb2_grpc.ShardStub(self._channels[address])  # type: ignore[no-untyped-call]

        def ask(request: pb.ReadRequest) -> pb.ReadReply:
            with rpc.our_errors(address):
                reply: pb.ReadReply = stub.Read(request, timeout=rpc.DATA_DEADLINE_S)
                return reply

        return ask


class ShardWatcher:
    """Follows the shards of a running job."""

    fresh: ClassVar[bool] = True

    def __init__(self, source: LiveSource, tables: TableSet, clock: Callable[[], float] = time.time) -> None:
        self._source = source
        self._tables: Mapping[str, EmbeddingTable] = tables.by_name
        self._clock = clock
        self._name = secrets.token_hex(8)
        self._plan: Plan | None = None
        self._shards: list[LiveShard] = []
        self._places: Sequence[ShardAddress] = ()
        self._read_at: dict[int, float] = {}
        self.published: Published | None = None
        self.sight = Sight(problem="no look at the shards yet")
        self.run_id = ""
        self.resyncs = 0

    def look(self) -> bool:
        """Read what every shard has now; return whether something of it is newer."""
        if self._plan is None:
            self._begin(*self._source.job())
        problem = self._find()
        changed = False
        for place, shard in zip(self._places, self._shards, strict=False):
            try:
                changed |= self._read(shard, place)
            except (StalePlan, WrongRun) as error:
                self._plan, problem = None, str(error)  # resumed on another number of shards: ask what the job is
                break
            except ParashardError as error:
                problem = problem or f"shard {shard.shard}: {error}"
        read = [shard.published for shard in self._shards if shard.published is not None]
        if changed and len(read) == len(self._shards):
            self.published = Published(self._shards[0].plan, tuple(read))
        whole = self.published is not None and len(self._read_at) == len(self._shards)
        looked_at = min(self._read_at.values()) if whole else 0.0
        self.sight = Sight(tuple(one.version.id for one in read), None, problem, looked_at)
        return changed and len(read) == len(self._shards)

    def _begin(self, run_id: str, plan: Plan) -> None:
        if self.run_id and run_id != self.run_id:
            raise WrongRun(f"run {run_id} is where run {self.run_id} was: start the server again to serve it")
        if not self._shards or self._shards[0].plan.version != plan.version:
            shards = range(len(plan.shards))
            self._shards = [LiveShard(plan, shard, run_id, self._tables, self._name) for shard in shards]
            self._read_at = {}
        self._plan, self.run_id = plan, run_id

    def _find(self) -> str:
        """Ask where the shards are; return why that is not known, then the last places count."""
        try:
            places = self._source.view(self.run_id)
        except ParashardError as error:
            return f"coordinator: {error}"
        if len(places) != len(self._shards):
            return f"the coordinator tells of {len(places)} shards, the plan has {len(self._shards)}"
        self._places = places
        return ""

    def _read(self, shard: LiveShard, place: ShardAddress) -> bool:
        before = shard.incarnation
        changed = shard.look(self._source.ask(place.address), place.incarnation, self._clock())
        self._read_at[shard.shard] = self._clock()
        if changed and before and place.incarnation != before:
            self.resyncs += 1
            log.info(
                "resync",
                shard=shard.shard,
                incarnation=place.incarnation,
                before=before,
                differing_buckets=shard.differing_buckets,
            )
        return changed
