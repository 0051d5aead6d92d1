"""One run of the simulation: a setting in, an outcome out. Draws settings from seeds, and judges what came of them.

The whole system in one process: the real cores of the coordinator and of the shards, simulated workers, and a network
between them. Called by the tests and by `__main__`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from sim_client import SimulatedClient, joined
from sim_coordinator import CoordinatorProcess, Supervisor
from sim_jobs import EPOCHS, Job, digest, job
from sim_network import Network
from sim_shard import DIGEST, REAL, RUN_ID, Parts, ShardProcess, build_shard
from sim_worker import Habits, WorkerProcess
from sim_world import CALM, Faults, Stuck, World

from coordinator.core import Core, JobState, Options
from coordinator.evaluations import Evaluations, evaluation_steps
from coordinator.launchers import ExternalLauncher, Launcher, LocalLauncher
from coordinator.policies import leasing_policy
from coordinator.restarts import Restarts
from parashard.job.policy import Policy

LEASE_TTL_S = 1.5
REGISTER_S = 0.3
DRAIN_EVENTS_MAX = 20_000

JOBS: tuple[tuple[str, str], ...] = (
    ("ledger", "async"),
    ("ledger", "ssp:3"),
    ("ledger", "sync:4"),
    ("torn", "async"),
    ("torn", "ssp:2"),
    ("torn", "sync:4"),
    ("digest", "sync:4"),
)
"""Oracles and policies that the tests and `__main__` run."""
NEVER = 1_000_000


@dataclass(frozen=True)
class Setting:
    """What a run is made of, beside its seed."""

    oracle: str
    policy: Policy
    shards: int = 1
    workers: int = 1
    depth: int = 0
    lease_batch: int = 4
    chunks: int = 1  # of a push to the largest shard, about
    queue_pushes: float = 100.0  # how many pushes the shards' budget for assemblies has room for
    retry_budget_s: float = 30.0
    evaluate_every_epochs: float = 0.0  # 0: never
    supervised: bool = True  # the coordinator is told of exits
    faults: Faults = CALM
    calm_events_max: int = 50_000


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    violations: list[str]
    weights: str
    trace: str
    events: int
    calm_events: int
    step_lag_max: int
    fired: Counter[str]


def drawn_setting(seed: int, oracle: str, policy: str) -> Setting:
    """Return a setting with faults of every kind, some more often than others."""
    rng = random.Random(f"{oracle} {policy} {seed}")

    def some(most: float) -> float:
        return rng.choice((0.0, 0.3, 1.0)) * most

    faults = Faults(
        lost=some(0.05),
        late=some(0.05),
        duplicated=some(0.1),
        crash=some(0.01),
        pause=some(0.004),
        leave=some(0.01),
        replaced=some(0.3),
        poison=some(0.05),
        until_s=rng.uniform(1.0, 5.0),
    )
    return Setting(
        oracle,
        Policy.parse(policy),
        shards=rng.randint(2 if oracle == "digest" else 1, 4),
        workers=rng.randint(1, 4),
        depth=rng.choice((0, 0, 1, 2)),
        lease_batch=rng.choice((1, 2, 4, 16)),
        chunks=rng.choice((1, 2, 2, 3, 4)),
        queue_pushes=rng.choice((0.5, 2.5, 100.0, 100.0, 100.0)),
        retry_budget_s=rng.choice((1.0, 30.0, 30.0)),
        evaluate_every_epochs=rng.choice((0.0, 0.4, 1.0)),
        supervised=rng.random() < 0.5,
        faults=faults,
    )


def simulate(seed: int, setting: Setting, parts: Parts = REAL) -> Outcome:
    """Run a job to its end, or until it is stuck, and judge it."""
    return _Run(seed, setting, parts).outcome()


@lru_cache
def faultless_digest(oracle: str, policy: Policy) -> str:
    """Return the digest of the final weights on one shard, by one worker, without faults."""
    outcome = simulate(0, Setting(oracle, policy))
    assert not outcome.violations, outcome.violations
    return outcome.weights


class _Run:
    def __init__(self, seed: int, setting: Setting, parts: Parts) -> None:
        self._setting = setting
        self._job = job(setting.oracle, setting.policy)
        self._plan = self._job.plan(setting.shards)
        self._world = World(seed, setting.faults)
        self._network = Network(self._world)
        elements = max(self._plan.shard_elements(s) for s in range(setting.shards))
        # One element more than a part: chunks end in the middle of variables, where a tear can be seen.
        self._chunk_bytes = 4 * (elements // setting.chunks + 1)
        queue_bytes = int(4 * elements * setting.queue_pushes)
        self._shards = [
            ShardProcess(self._world, build_shard(self._job, self._plan, s, 1, queue_bytes, parts))
            for s in range(setting.shards)
        ]
        self._coordinator = CoordinatorProcess(self._world, build_core(self._job, setting))
        self._coordinator.client = self._client(self._coordinator)

    def outcome(self) -> Outcome:
        """Run and judge."""
        world, coordinator = self._world, self._coordinator
        for shard in self._shards:
            world.after(world.rng.uniform(0.0, REGISTER_S), lambda s=shard: coordinator.receive(s.registration()))  # type: ignore[misc]
        coordinator.start()
        Supervisor(world, coordinator, self._start_worker, self._setting.workers, self._setting.supervised)
        violations = []
        try:
            world.run(lambda: coordinator.core.over, self._setting.calm_events_max)
        except Stuck as stuck:
            violations.append(f"progress: {stuck}")
        weights = digest(coordinator.final) if coordinator.final is not None else ""
        if not violations:
            world.drain(DRAIN_EVENTS_MAX)  # what dead workers have sent may still come, and must not matter
            violations += self._violations()
        world.note(weights)
        world.fired["speculative lease"] += coordinator.core.leases.speculative_leases
        world.fired["worker started again"] += coordinator.core.worker_restarts
        lag = max(shard.shard.record.step_lag_max for shard in self._shards)
        return Outcome(violations, weights, world.trace, world.events, world.calm_events, lag, world.fired)

    def _start_worker(self, name: str) -> WorkerProcess:
        habits = Habits(self._setting.depth, self._setting.lease_batch)
        worker = WorkerProcess(self._world, name, self._network, self._coordinator, self._job, habits)
        worker.client = self._client(worker)
        worker.start()
        return worker

    def _client(self, owner: WorkerProcess | CoordinatorProcess) -> SimulatedClient:
        return SimulatedClient(
            owner,
            self._network,
            self._shards,
            self._plan,
            chunk_bytes=self._chunk_bytes,
            retry_budget_s=self._setting.retry_budget_s,
        )

    def _violations(self) -> list[str]:
        core, final, policy = self._coordinator.core, self._coordinator.final, self._setting.policy
        if core.state is not JobState.DONE or final is None:
            return [f"progress: the job is {core.state.name}: {core.reason}"]
        found = [f"{self._setting.oracle}: {text}" for text in self._job.audit(final)]
        stored = joined(self._plan, [shard.shard.storage.weights for shard in self._shards])
        if digest(stored) != digest(final):
            found.append("exactly once: the weights moved after the job was done")
        for process in self._shards:
            shard = process.shard
            applied = list(shard.ingest.applied.intervals())
            if applied != [(0, self._job.steps_total)]:
                found.append(f"exactly once: {process.name} applied the steps {applied}")
            if policy.kind == "ssp" and shard.record.step_lag_max > policy.bound:
                found.append(f"ssp: {process.name} saw a step lag of {shard.record.step_lag_max}")
        faultless = self._setting.faults == CALM
        if policy.kind == "sync" and self._setting.oracle == "digest" and not faultless:
            expected = faultless_digest("digest", policy)
            if digest(final) != expected:
                found.append(f"digest: {digest(final)[:12]} is not the faultless {expected[:12]}")
        return found


def build_core(job_: Job, setting: Setting) -> Core:
    """Return the coordinator's core, as `coordinator.__main__` builds it from a job file."""
    policy = leasing_policy(setting.policy)
    after: list[int] = []
    if setting.evaluate_every_epochs:
        after = evaluation_steps(job_.steps_total, job_.steps_total // EPOCHS, setting.evaluate_every_epochs)
    launcher: Launcher = ExternalLauncher()
    if setting.supervised:
        launcher = LocalLauncher(0, Restarts(backoff_s=0.05, budget=NEVER))
    options = Options(
        RUN_ID,
        DIGEST,
        job_.steps_total,
        setting.shards,
        setting.workers,
        lease_batch=setting.lease_batch,
        lease_ttl_s=LEASE_TTL_S,
        max_attempts=NEVER,
        same_arithmetic=setting.policy.kind == "sync",
    )
    return Core(options, policy, Evaluations(after, policy, job_.steps_total), launcher)
