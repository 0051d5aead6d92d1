"""A worker's process: leases by the real `LeasedWork`, works as `StepLoop` does, and may die at any moment.

One task makes every call to the coordinator, one at a time; `depth + 1` lanes take steps, pull, compute and push, so
that steps overlap as in the pipeline. Where a shard is away, an operation is done again as a whole, with a fresh view.
Knows no policy but the length of a round.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from sim_client import SimulatedClient
from sim_jobs import Job, fingerprint
from sim_network import Network
from sim_parts import COORDINATOR, DIGEST, RUN_ID
from sim_world import Process, Promise, World

from parashard._proto import coordinator_pb2 as pb
from parashard.client.proto_conversion import view_from
from parashard.client.pulled import Pulled
from parashard.errors import (
    InvalidRequest,
    NonFiniteGradient,
    NotReady,
    ParashardError,
    RetryLater,
    StaleIncarnation,
    StaleRequest,
    TooEarly,
    Unreachable,
)
from parashard.plan.variables import Float32s
from parashard.transports.base import View
from parashard_worker.leased import RETRY_PAUSE_S, Joined, LeasedWork, LeaseLimits, result_of

CALL_DEADLINE_S = 0.3
POLL_S = 1.0
COMPUTE_S = (0.002, 0.02)
WAITS_S = (0.001, 0.05)  # for the version that a step needs
EVALUATE_S = (0.002, 2.0)  # over in no time, or long enough for a shard to die and come back meanwhile
STEP_TIMEOUT_S = 120.0
RIDING_PAUSE_S = (0.01, 0.3)
RETRY_BUDGET_S = 60.0

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Habits:
    """How a worker goes about its work."""

    depth: int
    lease_batch: int
    checks_finite: bool = True  # P6
    stops_early: bool = False  # some evaluations reach the job's target
    bad_step: int | None = None  # its gradient is not finite
    bad_step_fails: float = 1.0
    bad_step_kills: bool = False


class WorkerProcess(Process):
    """One incarnation of one worker.

    Parameters
    ----------
    name : str
        Under which it wants to be known; "" leaves it to the coordinator.
    network : Network
        Carries its calls.
    job : Job
        What to compute.
    habits : Habits
        How many steps at a time.

    Attributes
    ----------
    client : SimulatedClient
        Its connection to the shards; given before `start`.
    """

    crash = "crash"
    pause = "pause"
    hang = "hang"
    client: SimulatedClient

    def __init__(self, world: World, name: str, network: Network, job: Job, habits: Habits) -> None:
        super().__init__(world, name or "worker-new")
        self._asked_name = name
        self._network = network
        self._token = world.rng.getrandbits(64)
        self._job = job
        self._habits = habits
        self._joined: Joined | None = None
        self._work: LeasedWork
        self._stopping = False
        self._lanes = habits.depth + 1
        self._announcing = False  # a lane computes a step that it has announced; a real worker computes one at a time
        self._listening: list[Promise[None]] = []

    def start(self) -> None:
        """Join and work."""
        self.spawn(self._live)

    def crashing(self) -> None:
        """Count what the crash cuts in two."""
        self.world.fired["crash between two shards"] += any(p.between_shards for p in self.client.pushing)
        self.world.fired["crash between two messages"] += any(p.between_messages for p in self.client.pushing)

    def pausing(self, pause_s: float) -> None:
        """Count a pause that costs the leases."""
        if self._joined is not None:
            self.world.fired["pause past the lease time"] += pause_s > self._joined.lease_ttl_s

    async def _live(self) -> None:
        joined = await self._join(self._asked_name)
        self._joined, self.name = joined, joined.name
        self._work = LeasedWork(
            joined,
            LeaseLimits(self._habits.lease_batch, self._habits.depth, STEP_TIMEOUT_S, RETRY_BUDGET_S),
            self.world.now_s,
        )
        self.spawn(self._begin)
        while True:
            while (pause_s := self._work.due_in_s(self.world.now_s)) > 0:
                await self._changed(pause_s)
            spent = {"compute": 1.0, "transfer": float(self._habits.depth)}  # `auto`: whether transfers are long
            request = self._work.request(self.world.now_s, spent)
            if request is None:
                break
            deadline_s = CALL_DEADLINE_S + request.wait_s
            try:
                if self._work.must_rejoin:
                    self._work.joined_again(await self._join(self.name))
                    self.world.fired["worker joined again"] += 1
                    continue
                reply = await self._network.call(self, COORDINATOR, request, deadline_s)
            except ParashardError as error:
                self._work.lost(error, self.world.now_s)
            else:
                self._work.accept(request, reply, self.world.now_s)
            self._notify()
        self.end(f"left: {self._work.failure or self._work.reason}")

    # --- work ---

    async def _begin(self) -> None:
        """Work as soon as the shards are there; leases are asked for meanwhile (P22)."""
        self.client.use(await self._patiently(self._view))
        for _ in range(self._lanes):
            self.spawn(self._lane)

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
        pulled: Pulled | None = None
        gradients: dict[str, Float32s] = {}
        try:
            if not grant.skip:
                pulled = await self._pulled(grant)
                gradients = await self._computed(grant, pulled)
                if self._habits.checks_finite and not all(np.isfinite(g).all() for g in gradients.values()):
                    raise NonFiniteGradient(f"step {step}: the gradient has a value that is not finite")
                if self.world.strikes("poison"):
                    _poison(gradients, rng)
            incarnations = await self._retry_across_restarts(
                lambda: self.client.push(
                    step,
                    gradients,
                    pulled,
                    skipped=grant.skip,
                    learning_rate=grant.learning_rate or None,
                    rows={} if grant.skip else self._job.rows(step),
                ),
            )
        except InvalidRequest as error:
            self._work.failed(step, str(error), self.world.now_s)
        except TooEarly:
            self._work.dropped(step, self.world.now_s, queue_too=True)
        except (StaleRequest, RetryLater):  # its next attempt may succeed
            self._work.dropped(step, self.world.now_s)
            await self._refresh()
        else:
            if pulled is not None:
                pulled.release()
            self.world.fired["skipped"] += grant.skip
            done = pb.CompletedStep(step=step, incarnations=incarnations, examples=1, skipped=grant.skip)
            self._work.completed(done, self.world.now_s)
        self._notify()

    async def _pulled(self, grant: pb.Grant) -> Pulled:
        """Pull for a step, and again after a while where that was too early: a shard waits instead."""

        def pull() -> Awaitable[Pulled]:
            return self.client.pull(grant.step, self._round(grant.step), grant.least_version)

        try:
            return await self._retry_across_restarts(pull)
        except TooEarly:
            self.world.fired["pull too early"] += 1
            await self.world.sleep(self.world.rng.uniform(*WAITS_S))
            return await self._retry_across_restarts(pull)

    async def _computed(self, grant: pb.Grant, pulled: Pulled) -> dict[str, Float32s]:
        """Return a step's gradients; one at which a worker died is announced before, and may end this one too (P26)."""
        step, rng, habits = grant.step, self.world.rng, self._habits
        if grant.announce:
            while self._announcing:
                await self._changed(POLL_S)
            self._announcing = True
        try:
            if grant.announce:
                self._work.announce(step)
                self._notify()
                while not (self._work.announced or self._work.over):
                    await self._changed(POLL_S)
                if not self._work.announced:
                    raise NotReady("there is no more work")
            await self.world.sleep(rng.uniform(*COMPUTE_S))
            bad = step == habits.bad_step and rng.random() < habits.bad_step_fails
            if bad and habits.bad_step_kills:
                self.world.fired["killed by its model"] += 1
                self.crashing()
                self.end("killed by its model")
                await self.moment()
            gradients = self._job.gradients(step, pulled.variables, rng)
            if bad:
                _poison(gradients, rng)
            if grant.announce:
                self._work.computing(None, self.world.now_s)
                self._notify()
                while self._work.retracting and not self._work.over:
                    await self._changed(POLL_S)
            return gradients
        finally:
            if grant.announce:
                self._announcing = False

    async def _evaluate(self, work: pb.EvaluationGrant) -> None:
        round_ = work.round if work.for_round else None
        try:
            pulled = await self._retry_across_restarts(lambda: self.client.pull(round_=round_))
        except (StaleRequest, RetryLater):
            self._work.evaluation_dropped(work.evaluation)
            await self._refresh()
        else:
            metrics = {"weights": fingerprint(pulled.variables)}
            incarnations = pulled.incarnations
            pulled.release()
            if incarnations != tuple(work.incarnations):
                self._work.evaluation_dropped(work.evaluation)
                await self._refresh()
                return
            await self.world.sleep(self.world.rng.uniform(*EVALUATE_S))
            best = self._habits.stops_early and self.world.rng.random() < 0.4
            self._work.evaluated(result_of(work, metrics=metrics | {"accuracy": float(best)}))
        self._notify()

    def _round(self, step: int) -> int | None:
        return step // self._job.round_steps if self._job.round_steps else None

    # --- waiting ---

    async def _retry_across_restarts(self, operation: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run an operation; retry it after a new view while a shard is away or has another incarnation."""
        since_s = self.world.now_s
        while True:
            try:
                return await operation()
            except (Unreachable, NotReady, StaleIncarnation):
                if self.world.now_s - since_s > RETRY_BUDGET_S:
                    raise
                self.world.fired["operation done again"] += 1
            await self._refresh()
            await self.world.sleep(self.world.rng.uniform(*RIDING_PAUSE_S))

    async def _refresh(self) -> None:
        try:
            self.client.use(await self._view())
        except RetryLater as error:
            self.world.note(str(error))  # a requester asks again

    async def _view(self) -> View:
        reply = await self._network.call(self, COORDINATOR, pb.GetViewRequest(run_id=RUN_ID), CALL_DEADLINE_S)
        return view_from(reply)

    async def _join(self, name: str) -> Joined:
        request = pb.RegisterWorkerRequest(
            run_id=RUN_ID, job_digest=DIGEST, name=name, fingerprint="same", device="cpu", token=self._token
        )

        async def ask() -> Joined:
            reply = await self._network.call(self, COORDINATOR, request, CALL_DEADLINE_S)
            return Joined(RUN_ID, reply.name, reply.incarnation, reply.lease_ttl_s)

        return await self._patiently(ask)

    async def _patiently(self, call: Callable[[], Awaitable[_Result]]) -> _Result:
        while True:
            try:
                return await call()
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
    if not gradients:  # of a step without examples
        return
    name = rng.choice(sorted(gradients))
    gradients[name].flat[rng.randrange(gradients[name].size)] = np.nan
