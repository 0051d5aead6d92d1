"""The worker's side of the data plane, as `parashard.client` has it: chunks, attempts, receipts, retries.

Cuts by itself, into chunks of a few bytes, so that tiny pushes have several. Waits for virtual time only. Used by the
simulated workers, and by the coordinator for the final weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from sim_network import Network
from sim_parts import Pull, Push, identity
from sim_world import Process, Promise

from parashard import wire
from parashard.errors import RetryLater, UnknownAttempt, Unreachable
from parashard.messages import PullRun, PushChunk, PushResult, Receipt, Slice
from parashard.partition import ELEMENT_BYTES, Plan
from parashard.variables import Float32s

DEADLINE_S = 0.25
RETRY_PAUSE_S = 0.02
AWAY_BUDGET_S = 0.3
WHOLE_ATTEMPTS_MAX = 5


@dataclass(frozen=True)
class View:
    """Which life every shard leads; `number` rises with every change."""

    number: int
    addresses: tuple[str, ...]
    incarnations: tuple[int, ...]


@dataclass(frozen=True)
class Pulled:
    """Variables by name, and by shard the version they have and the life that gave them."""

    variables: dict[str, Float32s]
    versions: tuple[int, ...]
    incarnations: tuple[int, ...]


@dataclass(eq=False)
class UnderWay:
    """A push in progress: how many chunks each shard was sent, and which shards gave their receipt."""

    chunks: list[int]
    sent: list[int] = field(default_factory=list)
    receipts: set[int] = field(default_factory=set)

    @property
    def between_shards(self) -> bool:
        """Some shards have the push and others do not, for all the worker knows."""
        return 0 < len(self.receipts) < len(self.chunks)

    @property
    def between_chunks(self) -> bool:
        """Some shard was sent a part of the push."""
        return any(0 < sent < chunks for sent, chunks in zip(self.sent, self.chunks, strict=True))


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
    chunk_bytes : int
        Greatest payload of one message, a multiple of 4.
    retry_budget_s : float
        How long one request may wait and be sent again.
    """

    def __init__(
        self,
        owner: Process,
        network: Network,
        plan: Plan,
        *,
        chunk_bytes: int,
        retry_budget_s: float,
    ) -> None:
        self.owner = owner
        self._network = network
        self.plan = plan
        self.chunk_bytes = chunk_bytes
        self._retry_budget_s = retry_budget_s
        self.view = View(0, (), ())
        self.pushing: list[UnderWay] = []

    def use(self, view: View) -> None:
        """Send to these shards from now on, unless a newer view is in use."""
        if view.number >= self.view.number:
            self.view = view

    async def pull(self, step: int | None = None, round_: int | None = None) -> Pulled:
        """Pull every variable from all shards."""
        view = self.view
        asked: list[tuple[PullRun, Promise[bytes]]] = []
        for shard in range(len(view.addresses)):
            size_bytes = self.plan.shard_elements(shard) * ELEMENT_BYTES
            for offset in range(0, max(size_bytes, 1), self.chunk_bytes):
                length = min(self.chunk_bytes, size_bytes - offset)
                run = PullRun(identity(shard, view.incarnations[shard]), round_, step, offset, length)
                asked.append((run, self._send(view, shard, Pull(wire.encode_pull(run)))))
            await self.owner.moment()
        vectors = [np.empty(self.plan.shard_elements(s), np.float32) for s in range(len(view.addresses))]
        versions: list[int | None] = [None] * len(vectors)
        for run, reply in asked:
            again = Pull(wire.encode_pull(run))
            weights = wire.decode_weights(await self._settled(reply, again, view, run.target.shard))
            content = vectors[run.target.shard].data.cast("B")
            content[run.offset_bytes : run.offset_bytes + run.length_bytes] = weights.values
            known = versions[run.target.shard]
            versions[run.target.shard] = weights.version if known is None else min(known, weights.version)
        return Pulled(joined(self.plan, vectors), tuple(v or 0 for v in versions), view.incarnations)

    async def push(
        self, step: int, gradients: Mapping[str, Float32s], pulled: Pulled | None, *, skipped: bool = False
    ) -> tuple[int, ...]:
        """Push to all shards; return the lives that gave receipts, by shard."""
        view = self.view
        shards = range(len(view.addresses))
        pushes = [_ShardPush(self, s, view, step, gradients, pulled, skipped) for s in shards]
        under_way = UnderWay([push.chunks for push in pushes], [0] * len(pushes))
        self.pushing.append(under_way)
        try:
            firsts = []
            for push in pushes:
                firsts.append(self._push(push.chunk(0), view))
                under_way.sent[push.shard] = 1
                await self.owner.moment()
            for push, first in zip(pushes, firsts, strict=True):
                await self._finish(push, first, view, under_way)
                under_way.receipts.add(push.shard)
        finally:
            self.pushing.remove(under_way)
        return view.incarnations

    async def _finish(self, push: _ShardPush, first: Promise[bytes], view: View, under_way: UnderWay) -> Receipt:
        for _ in range(WHOLE_ATTEMPTS_MAX):
            try:
                return await self._send_rest(push, first, view, under_way)
            except UnknownAttempt:  # P4: the assembly is gone; send it again whole
                push.attempt = self.owner.world.rng.getrandbits(64)
                first = self._push(push.chunk(0), view)
        raise UnknownAttempt(f"step {push.step}: the shard lost {WHOLE_ATTEMPTS_MAX} attempts in a row")

    async def _send_rest(self, push: _ShardPush, first: Promise[bytes], view: View, under_way: UnderWay) -> Receipt:
        receipt = await self._receipt(push.chunk(0), first, view)
        if receipt.result is not PushResult.PENDING:
            return receipt
        chunks = [push.chunk(i) for i in range(1, push.chunks)]
        replies = []
        for sent, chunk in enumerate(chunks, 2):
            replies.append(self._push(chunk, view))
            under_way.sent[push.shard] = sent
            await self.owner.moment()
        receipts = [await self._receipt(chunk, reply, view) for chunk, reply in zip(chunks, replies, strict=True)]
        done = [r for r in receipts if r.result is not PushResult.PENDING]
        if not done:
            raise UnknownAttempt(f"step {push.step}: every chunk is in and the push is not")
        return next((r for r in done if r.result is not PushResult.DUPLICATE), done[0])

    async def _receipt(self, chunk: PushChunk, reply: Promise[bytes], view: View) -> Receipt:
        again = Push(wire.encode_push(chunk))
        return wire.decode_receipt(await self._settled(reply, again, view, chunk.target.shard))

    async def _settled(self, reply: Promise[bytes], again: Push | Pull, view: View, shard: int) -> bytes:
        """Wait for a reply; while the shard asks for patience, send again, within the budget."""
        world, pause_s = self.owner.world, RETRY_PAUSE_S
        asked_s: float | None = None
        while True:
            try:
                return await reply
            except RetryLater as error:
                asked_s = world.now_s if asked_s is None else asked_s
                budget_s = AWAY_BUDGET_S if isinstance(error, Unreachable) else self._retry_budget_s
                if world.now_s - asked_s >= budget_s:
                    raise
            await world.sleep(world.rng.uniform(0.0, pause_s))
            pause_s = min(1.0, 2 * pause_s)
            reply = self._send(view, shard, again)

    def _push(self, chunk: PushChunk, view: View) -> Promise[bytes]:
        return self._send(view, chunk.target.shard, Push(wire.encode_push(chunk)))

    def _send(self, view: View, shard: int, request: Push | Pull) -> Promise[bytes]:
        return self._network.call(self.owner, view.addresses[shard], request, DEADLINE_S)


class _ShardPush:
    """One push as it goes to one shard."""

    def __init__(
        self,
        client: SimulatedClient,
        shard: int,
        view: View,
        step: int,
        gradients: Mapping[str, Float32s],
        pulled: Pulled | None,
        skipped: bool,
    ) -> None:
        self.shard, self.step = shard, step
        self.attempt = client.owner.world.rng.getrandbits(64)
        self._target = identity(shard, view.incarnations[shard])
        self._worker, self._chunk_bytes = client.owner.name, client.chunk_bytes
        partitions = [p for p in client.plan.shards[shard] if p.variable in gradients]
        self._slices = tuple(Slice(p, client.plan.variables[p.variable].row_elements) for p in partitions)
        known = pulled is not None and pulled.incarnations[shard] == view.incarnations[shard]  # P16
        self._version = pulled.versions[shard] if pulled is not None and known else None
        self._skipped = skipped
        self._content = b"".join(gradients[p.variable][p.row_start : p.row_stop].tobytes() for p in partitions)

    @property
    def chunks(self) -> int:
        """Number of chunks; an empty push has one."""
        return max(1, -(-len(self._content) // self._chunk_bytes))

    def chunk(self, index: int) -> PushChunk:
        """Return a chunk of the present attempt."""
        begin = index * self._chunk_bytes
        return PushChunk(
            self._target,
            self._worker,
            self.step,
            self.attempt,
            begin,
            len(self._content),
            self._slices if index == 0 else (),
            self._skipped,
            self._version,
            self._content[begin : begin + self._chunk_bytes],
        )


def joined(plan: Plan, vectors: Sequence[Float32s]) -> dict[str, Float32s]:
    """Return variables by name, copied out of the shards' flat vectors."""
    variables = {name: np.empty(declared.shape, np.float32) for name, declared in plan.variables.items()}
    for vector, layout in zip(vectors, plan.layouts, strict=True):
        for placed in layout:
            p = placed.partition
            rows = variables[p.variable][p.row_start : p.row_stop]
            rows[...] = vector[placed.offset : placed.stop].reshape(rows.shape)
    return variables
