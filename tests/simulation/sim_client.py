"""The worker's side of the data plane, as `ShardClient` and its gRPC transport have it: messages of a call, retries.

Cuts by itself, into messages of a few bytes, so that tiny pushes have several. Waits for virtual time only. Used by the
simulated workers, and by the coordinator for the final weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sim_network import Network
from sim_parts import Frame, PullFrame, PushMessage, identity
from sim_world import Process, Promise

from parashard.client.pulled import PullBuffer, PullBuffers, Pulled
from parashard.client.pulled_rows import NO_TABLES, PulledRows
from parashard.errors import RetryLater, Unreachable
from parashard.plan.embedding import cut_by_shard
from parashard.plan.partition import ELEMENT_BYTES, Plan
from parashard.plan.variables import Float32s
from parashard.protocol import wire
from parashard.protocol.messages import Ack, Buffers, PullRun, Push, RowSlice, Slice
from parashard.transports import memory
from parashard.transports.base import View
from parashard_server.state.rows.embedding_tables import RowGradients

DEADLINE_S = 0.25  # of an operation on one shard
RETRY_PAUSE_S = 0.02
AWAY_BUDGET_S = 0.3
NO_ROWS: Mapping[str, RowGradients] = {}

_Answer = TypeVar("_Answer")


@dataclass(eq=False)
class UnderWay:
    """A push in progress: how many messages each shard was sent, and which shards gave their ack."""

    messages: list[int]
    sent: list[int] = field(default_factory=list)
    acks: set[int] = field(default_factory=set)

    @property
    def between_shards(self) -> bool:
        """Some shards have the push and others do not, for all the worker knows."""
        return 0 < len(self.acks) < len(self.messages)

    @property
    def between_messages(self) -> bool:
        """Some shard was sent a part of the push."""
        return any(0 < sent < messages for sent, messages in zip(self.sent, self.messages, strict=True))


class SimulatedClient:
    """Pulls from and pushes to all shards, for one process.

    Parameters
    ----------
    owner : Process
        Who asks; when it dies, nothing more is sent.
    network : Network
        Carries the calls.
    plan : Plan
        How variables are cut.
    message_bytes : int
        Greatest payload of one message, a multiple of 4.
    retry_budget_s : float
        How long one operation may be done again.
    """

    def __init__(
        self,
        owner: Process,
        network: Network,
        plan: Plan,
        *,
        message_bytes: int,
        retry_budget_s: float,
    ) -> None:
        self.owner = owner
        self.network = network
        self.plan = plan
        self.message_bytes = message_bytes
        self._sets = PullBuffers(plan)
        self._retry_budget_s = retry_budget_s
        self.view = View(0, ())
        self.pushing: list[UnderWay] = []

    def use(self, view: View) -> None:
        """Send to these shards from now on, unless a newer view is in use."""
        if view.number >= self.view.number:
            self.view = view

    async def pull(self, step: int | None = None, round_: int | None = None, least_version: int = 0) -> Pulled:
        """Pull every variable from all shards; what has not moved since an earlier pull is not sent again."""
        view = self.view
        weights = self._sets.take(tuple(where.incarnation for where in view.shards))
        asked = PullRun(identity(0, 0), round_, step, 0, 0, least_version=least_version)
        pulls = [_ShardPull(self, view, shard, asked, weights) for shard in range(len(view.shards))]
        for pull in pulls:
            pull.begin()
            await self.owner.moment()
        # After an error the set is dropped: what its arrays hold is undefined.
        weights.versions = tuple([await self._patiently(pull) for pull in pulls])
        return Pulled(weights, self._sets, PulledRows(NO_TABLES))

    async def push(
        self,
        step: int,
        gradients: Mapping[str, Float32s],
        pulled: Pulled | None,
        *,
        skipped: bool = False,
        learning_rate: float | None = None,
        rows: Mapping[str, RowGradients] = NO_ROWS,
    ) -> tuple[int, ...]:
        """Push to all shards, with rows of tables; return the incarnations that gave acks, by shard."""
        view, under_way = self.view, UnderWay([])
        pushes = [
            _ShardPush(self, view, cut._replace(learning_rate=learning_rate), under_way)
            for cut in [
                self._cut(shard, view, step, gradients, pulled, skipped, rows) for shard in range(len(view.shards))
            ]
        ]
        self.pushing.append(under_way)
        try:
            for push in pushes:
                push.begin()
                await self.owner.moment()
            for push in pushes:
                await self._patiently(push)
                under_way.acks.add(push.shard)
        finally:
            self.pushing.remove(under_way)
        return tuple(where.incarnation for where in view.shards)

    def _cut(
        self,
        shard: int,
        view: View,
        step: int,
        gradients: Mapping[str, Float32s],
        pulled: Pulled | None,
        skipped: bool,
        rows: Mapping[str, RowGradients],
    ) -> Push:
        partitions = [p for p in self.plan.shards[shard] if p.variable in gradients]
        slices = tuple(Slice(p, self.plan.variables[p.variable].row_elements) for p in partitions)
        content = [gradients[p.variable][p.row_start : p.row_stop].tobytes() for p in partitions]
        known = pulled is not None and pulled.incarnations[shard] == view.shards[shard].incarnation  # P16
        version = pulled.versions[shard] if pulled is not None and known else None
        target = identity(shard, view.shards[shard].incarnation)
        own_rows = []
        for name, (keys, values) in rows.items():
            own = cut_by_shard(keys, len(view.shards))[shard]
            content += [keys[own].tobytes(), values[own].tobytes()]
            own_rows.append(RowSlice(name, len(keys[own]), values.shape[1]))
        pieces = Buffers([piece for piece in content if piece])
        return Push(target, self.owner.name, step, slices, skipped, version, pieces, rows=tuple(own_rows))

    async def _patiently(self, operation: _Operation[_Answer]) -> _Answer:
        """Wait for an operation; while its shard asks for patience, begin it again, within the budget."""
        world, pause_s = self.owner.world, RETRY_PAUSE_S
        asked_s: float | None = None
        while True:
            try:
                return await operation.result()
            except RetryLater as error:
                asked_s = world.now_s if asked_s is None else asked_s
                budget_s = AWAY_BUDGET_S if isinstance(error, Unreachable) else self._retry_budget_s
                if world.now_s - asked_s >= budget_s:
                    raise
            await world.sleep(world.rng.uniform(0.0, pause_s))
            pause_s = min(1.0, 2 * pause_s)
            operation.begin()


class _Operation(ABC, Generic[_Answer]):
    """A whole push to one shard, or a pull of its whole vector: several messages with one deadline."""

    def __init__(self, client: SimulatedClient, view: View, shard: int) -> None:
        self.shard = shard
        self.owner = client.owner
        self._network = client.network
        self._address = view.shards[shard].address
        self._deadline_s = 0.0

    def begin(self) -> None:
        """Send the first messages; the time of the operation begins."""
        self._deadline_s = self.owner.world.now_s + DEADLINE_S
        self._begin()

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    async def result(self) -> _Answer:
        """Wait for the answer; send the rest meanwhile."""

    def _send(self, frame: Frame) -> Promise[Any]:
        left_s = max(0.001, self._deadline_s - self.owner.world.now_s)
        return self._network.call(self.owner, self._address, frame, left_s)


class _ShardPull(_Operation[int]):
    def __init__(self, client: SimulatedClient, view: View, shard: int, asked: PullRun, weights: PullBuffer) -> None:
        super().__init__(client, view, shard)
        self._into = weights.by_shard[shard]
        size_bytes = client.plan.shard_elements(shard) * ELEMENT_BYTES
        target = identity(shard, view.shards[shard].incarnation)
        self._runs = [
            asked._replace(
                target=target,
                offset_bytes=at,
                length_bytes=min(client.message_bytes, size_bytes - at),
                known_version=weights.versions[shard],
            )
            for at in range(0, max(size_bytes, 1), client.message_bytes)
        ]
        self._replies: list[Promise[Any]] = []

    def _begin(self) -> None:
        self._replies = [self._send(PullFrame(wire.encode_pull(run))) for run in self._runs]

    async def result(self) -> int:
        versions = []
        for run, reply in zip(self._runs, self._replies, strict=True):
            frame = await reply
            weights = wire.decode_weights(frame, run)
            for offset, values in weights.runs:
                memory.scatter(values, self._into, offset)
            versions.append(weights.version)
        return min(versions)


class _ShardPush(_Operation[Ack]):
    def __init__(self, client: SimulatedClient, view: View, push: Push, under_way: UnderWay) -> None:
        super().__init__(client, view, push.target.shard)
        self._push = push
        payload, size = push.payload, client.message_bytes
        header = wire.push_header(push)
        self._messages = [wire.encode_frame(header, payload.run(0, min(size, payload.nbytes)))]
        self._messages += [
            b"".join(payload.run(at, min(payload.nbytes, at + size))) for at in range(size, payload.nbytes, size)
        ]
        self._under_way = under_way
        under_way.messages.append(len(self._messages))
        under_way.sent.append(0)
        self._call = 0
        self._replies: list[Promise[Any]] = []

    def _begin(self) -> None:
        self._call = self.owner.world.rng.getrandbits(64)
        self._replies = []
        self._send_next()

    def _send_next(self) -> None:
        index = len(self._replies)
        last = index == len(self._messages) - 1
        message = PushMessage(self._messages[index], self._call, index, last, self._push.step)
        self._replies.append(self._send(message))
        self._under_way.sent[self.shard] = index + 1

    async def result(self) -> Ack:
        while len(self._replies) < len(self._messages):
            await self.owner.moment()
            self._send_next()
        *others, last = self._replies
        for reply in others:  # only a refusal tells of these; a lost one breaks the connection, and so the call
            await reply
        return wire.decode_ack(await last)
