"""A worker's process: leases by the real `worker.leased`, works as `worker.loop` does, and may die at any moment.

One task makes every call to the coordinator, one at a time; `depth + 1` lanes take steps, pull, compute and push, so
that steps overlap as in the pipeline. Knows no policy but the length of a round.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from sim_client import SimulatedClient
from sim_coordinator import GetView, RegisterWorker
from sim_jobs import Job
from sim_network import Network
from sim_world import Process, Promise, World

from parashard.errors import InvalidRequest, ParashardError, Redo, RetryLater
from parashard.variables import Float32s
from protos import coordinator_pb2 as pb
from worker.leased import RETRY_PAUSE_S, Joined, LeasedWork

CALL_DEADLINE_S = 0.3
POLL_S = 1.0
COMPUTE_S = (0.002, 0.02)
STEP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Habits:
    """How a worker goes about its work."""

    depth: int
    lease_batch: int


class WorkerProcess(Process):
    """One life of one worker.

    Parameters
    ----------
    name : str
        Under which it wants to be known; "" leaves it to the coordinator.
    network, coordinator
        Carries its calls; whom to ask for steps.
    job : Job
        What to compute.
    habits : Habits
        How many steps at a time.

    Attributes
    ----------
    client : SimulatedClient
        Its connection to the shards; given before `start`.
    """

    mortal = True
    client: SimulatedClient

    def __init__(
        self, world: World, name: str, network: Network, coordinator: Process, job: Job, habits: Habits
    ) -> None:
        super().__init__(world, name or "worker-new")
        self._asked_name = name
        self._network = network
        self._coordinator = coordinator
        self._job = job
        self._habits = habits
        self._joined: Joined | None = None
        self._work: LeasedWork
        self._stopping = False
        self._lanes = habits.depth + 1
        self._listening: list[Promise[None]] = []

    def start(self) -> None:
        """Join and work."""
        self.spawn(self._live)

    def crashing(self) -> None:
        """Count what the crash cuts in two."""
        self.world.fired["crash between two shards"] += any(p.between_shards for p in self.client.pushing)
        self.world.fired["crash between two chunks"] += any(p.between_chunks for p in self.client.pushing)

    def pausing(self, pause_s: float) -> None:
        """Count a pause that costs the leases."""
        if self._joined is not None:
            self.world.fired["pause past the lease time"] += pause_s > self._joined.lease_ttl_s

    async def _live(self) -> None:
        joined: Joined = await self._patiently(RegisterWorker(self._asked_name))
        self._joined, self.name = joined, joined.name
        self._work = LeasedWork(
            joined,
            batch=self._habits.lease_batch,
            ahead=self._habits.depth,
            step_timeout_s=STEP_TIMEOUT_S,
            now_s=self.world.now_s,
        )
        await self._refresh()
        for _ in range(self._lanes):
            self.spawn(self._lane)
        while True:
            while (pause_s := self._work.due_in_s(self.world.now_s)) > 0:
                await self._changed(pause_s)
            request = self._work.request(self.world.now_s, {})
            if request is None:
                break
            deadline_s = CALL_DEADLINE_S + request.wait_s
            try:
                reply = await self._network.call(self, self._coordinator, request, deadline_s)
            except ParashardError as error:
                self._work.lost(error, self.world.now_s)
            else:
                self._work.accept(request, reply, self.world.now_s)
            self._notify()
        self.end(f"left: {self._work.failure or self._work.reason}")

    # --- work ---

    async def _lane(self) -> None:
        while not (self._stopping or self._work.over):
            if self.world.strikes("leave"):
                self._stopping = True
                break
            work = self._work.take(self.world.now_s)
            if work is None:
                await self._changed(POLL_S)
                continue
            self._notify()
            if isinstance(work, pb.EvaluationGrant):
                await self._evaluate(work)
            else:
                await self._step_of(work)
        self._lanes -= 1
        if not self._lanes:
            self._work.leave()
        self._notify()

    async def _step_of(self, grant: pb.Grant) -> None:
        step, rng = grant.step, self.world.rng
        try:
            pulled = await self.client.pull(step, self._round(step))
            await self.world.sleep(rng.uniform(*COMPUTE_S))
            gradients = self._job.gradients(step, pulled.variables, rng)
            if self.world.strikes("poison"):
                _poison(gradients, rng)
            incarnations = await self.client.push(step, gradients, pulled)
        except InvalidRequest as error:
            self._work.failed(step, str(error), self.world.now_s)
        except (Redo, RetryLater):  # whoever leases the step next knows more
            self._work.dropped(step, self.world.now_s)
            if self._work.view != self.client.view.number:
                await self._refresh()
        else:
            self._work.completed(pb.CompletedStep(step=step, incarnations=incarnations, examples=1), self.world.now_s)
        self._notify()

    async def _evaluate(self, work: pb.EvaluationGrant) -> None:
        try:
            await self.client.pull(round_=work.round if work.for_round else None)
        except ParashardError as error:
            self._work.evaluated(work.evaluation, {}, str(error))
        else:
            self._work.evaluated(work.evaluation, {"accuracy": 0.0})
        self._notify()

    def _round(self, step: int) -> int | None:
        return step // self._job.round_steps if self._job.round_steps else None

    # --- waiting ---

    async def _refresh(self) -> None:
        self.client.view = await self._patiently(GetView())

    async def _patiently(self, request: RegisterWorker | GetView) -> Any:
        while True:
            try:
                return await self._network.call(self, self._coordinator, request, CALL_DEADLINE_S)
            except RetryLater:
                await self.world.sleep(RETRY_PAUSE_S)

    def _changed(self, timeout_s: float) -> Promise[None]:
        promise = self.world.sleep(timeout_s)
        self._listening.append(promise)
        return promise

    def _notify(self) -> None:
        for promise in self._listening:
            promise.settle()
        self._listening.clear()


def _poison(gradients: dict[str, Float32s], rng: random.Random) -> None:
    name = rng.choice(sorted(gradients))
    gradients[name].flat[rng.randrange(gradients[name].size)] = np.nan
