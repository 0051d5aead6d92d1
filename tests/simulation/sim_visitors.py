"""Visitors: an operator that asks for drained checkpoints, callbacks that decide learning rates (P37), and strays.

Strays are of another run (P2), or of this one (P23).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from sim_coordinator import Ending
from sim_jobs import Job, learning_rate_after
from sim_network import Network
from sim_parts import COORDINATOR, DIGEST, RUN_ID, PushMessage
from sim_shard import ShardProcess
from sim_world import Process, World

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import JobFailed, ParashardError, RetryLater
from parashard.plan.partition import Plan
from parashard.protocol import wire
from parashard.protocol.messages import Buffers, Push, Slice, Target
from parashard.store import Store
from parashard.store.claims import claim_incarnation
from parashard_coordinator.core.callback_progress import DecidedRate

DEADLINE_S = 0.3
OPERATOR_PAUSE_S = (0.2, 3.0)
FOLLOW_PAUSE_S = (0.02, 0.3)
STRAY_PAUSE_S = (0.05, 0.5)


class Operator(Process):
    """Asks for drained checkpoints, one after the other, until the job is over."""

    def __init__(self, world: World, network: Network, checkpoints: int) -> None:
        super().__init__(world, "operator")
        self._network = network
        self._checkpoints = checkpoints
        self.stored: list[str] = []  # what it was told

    async def work(self) -> None:
        """Ask for each until it is there."""
        rng = self.world.rng
        for _ in range(self._checkpoints):
            await self.world.sleep(rng.uniform(*OPERATOR_PAUSE_S))
            request = pb.CreateCheckpointRequest(request=rng.getrandbits(63))
            reply = pb.CreateCheckpointReply()
            while not (reply.checkpoint or reply.error):
                try:
                    reply = await self._network.call(self, COORDINATOR, request, DEADLINE_S)
                except RetryLater:
                    pass
                except JobFailed:
                    return
                await self.world.sleep(0.05)
            if reply.checkpoint:
                self.stored.append(reply.checkpoint)


class Follower(Process):
    """Callbacks of the job: each milestone sets the learning rate, and is repeated until the next one is told (P38).

    With a plan, rates by epoch, the first one sets them all.
    """

    def __init__(self, world: World, network: Network, ending: Ending, plan: Mapping[int, float]) -> None:
        super().__init__(world, "follower")
        self._network = network
        self._ending = ending
        self._plan = [pb.PlannedRate(epoch=epoch, learning_rate=rate) for epoch, rate in plan.items()]

    async def work(self) -> None:
        """Follow the job to its end."""
        ending, handled, seen, coordinator = self._ending, 0, 0, 0
        if self._plan:
            ending.decided[0] = self._plan[0].learning_rate
        while ending.by is None:
            rate, number = ending.decided.get(handled), len(ending.decided)
            request = pb.FollowRequest(
                run_id=RUN_ID, handled=handled, learning_rate=rate, decision=number, wants_steps=True
            )
            request.planned.extend(self._plan[1:] if not handled else [])
            request.steps_seen, request.coordinator = seen, coordinator
            try:
                reply: pb.FollowReply = await self._network.call(self, COORDINATOR, request, DEADLINE_S)
            except RetryLater:
                await self.world.sleep(self.world.rng.uniform(*FOLLOW_PAUSE_S))
                continue
            seen, coordinator = reply.steps_seen, reply.coordinator
            if reply.HasField("learning_rate"):
                now = reply.learning_rate
                rate = DecidedRate(now.first_step, now.learning_rate, now.after_steps)
                self.world.fired["learning rate changed"] += rate not in ending.told_rates
                ending.told_rates.add(rate)
            if reply.HasField("milestone"):
                handled = reply.milestone.after_steps
                if not self._plan:
                    ending.decided[handled] = learning_rate_after(handled)
            else:
                await self.world.sleep(self.world.rng.uniform(*FOLLOW_PAUSE_S))


class Claimer(Process):
    """Second processes of this run, each started by mistake: it claims an incarnation, and dies (P23)."""

    def __init__(self, world: World, store: Store, shards: int) -> None:
        super().__init__(world, "claimer")
        self._store = store
        self._names = [COORDINATOR, *(f"shard-{shard}" for shard in range(shards))]

    async def work(self) -> None:
        """Claim now and then."""
        while not self.world.calm:
            await self.world.sleep(self.world.rng.uniform(*STRAY_PAUSE_S))
            if self.world.strikes("stray_claim"):
                name = self.world.rng.choice(self._names)
                self.world.fired["stray coordinator" if name == COORDINATOR else "stray shard"] += 1
                claim_incarnation(self._store, name)


class Stray(Process):
    """A shard and a worker of another run, which found this run's addresses."""

    def __init__(self, world: World, network: Network, job: Job, plan: Plan, shards: Sequence[ShardProcess]) -> None:
        super().__init__(world, "stray")
        self._network = network
        self._job = job
        self._plan = plan
        self._shards = shards  # all that were ever started; more are added as they are

    async def work(self) -> None:
        """Say what would do harm, were it taken for one of this run."""
        world, rng = self.world, self.world.rng
        while not world.calm:
            await world.sleep(rng.uniform(*STRAY_PAUSE_S))
            run_id, digest = rng.choice((("other", DIGEST), (RUN_ID, "e" * 64)))
            calls = [self._network.call(self, COORDINATOR, self._registration(run_id, digest), DEADLINE_S)]
            if self._shards:
                shard = self._shards[-1]
                calls.append(self._network.call(self, shard.address, self._push(shard, run_id, digest), DEADLINE_S))
            for call in calls:
                try:
                    await call
                except ParashardError as error:
                    world.fired[f"stray: {error.code}"] += 1

    def _registration(self, run_id: str, digest: str) -> pb.RegisterWorkerRequest:
        return pb.RegisterWorkerRequest(run_id=run_id, job_digest=digest, name="worker-0", fingerprint="same")

    def _push(self, shard: ShardProcess, run_id: str, digest: str) -> PushMessage:
        mine, layout = shard.shard.identity, self._plan.layouts[shard.index]
        slices = tuple(
            Slice(placed.partition, self._plan.variables[placed.partition.variable].row_elements) for placed in layout
        )
        content = np.full(self._plan.shard_elements(shard.index), 0.25, np.float32).tobytes()
        step = shard.shard.updates.held.lowest_missing() % self._job.steps_total
        target = Target(run_id, digest, mine.plan_version, mine.shard, mine.incarnation)
        push = Push(target, "stray", step, slices, False, None, Buffers([content]))
        first, _ = wire.encode_push(push)
        return PushMessage(first, self.world.rng.getrandbits(64), 0, last=True, step=step)
