"""One run of the simulation: a setting in, an outcome out.

The whole system in one process: the real cores of the coordinator and of the shards with the real code around them,
simulated workers, and a network between them. Called by the tests and by `__main__`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sim_client import SimulatedClient
from sim_coordinator import CoordinatorProcess, Ending
from sim_jobs import EPOCHS, digest, job, planned_rates
from sim_judge import violations
from sim_network import Network
from sim_parts import COORDINATOR, DIGEST, REAL, RUN_ID, Builder, Parts
from sim_settings import Setting
from sim_shard import ShardProcess
from sim_store import SimulatedStore
from sim_supervisor import SILENCE_S, Starts, Supervisor
from sim_visitors import Claimer, Follower, Operator, Stray
from sim_worker import Habits, WorkerProcess
from sim_world import CALM, Process, Stillborn, Stuck, World

from parashard.checkpoints.catalogue import plan_name
from parashard.checkpoints.encoding import encode
from parashard.checkpoints.manifest import PlanRecord
from parashard.errors import StoreFailed, Superseded
from parashard.job.sections import CheckpointOptions
from parashard_coordinator.core.callback_progress import CallbackOptions
from parashard_coordinator.core.calls import CoreSettings
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.evaluations import Evaluations, evaluation_steps
from parashard_coordinator.core.policies import leasing_policy
from parashard_coordinator.core.rounds import Rounds
from parashard_coordinator.core.supervision import LocalLauncher

LEASE_TTL_S = 1.5
START_S = 4.0
BAD_STEP_ATTEMPTS = 3
NEVER = 1_000_000


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


def simulate(seed: int, setting: Setting, parts: Parts = REAL) -> Outcome:
    """Run a job to its end, or until it is stuck, and judge it."""
    return _Run(seed, setting, parts).outcome()


class _Run:
    def __init__(self, seed: int, setting: Setting, parts: Parts) -> None:
        self._setting = setting
        self._parts = parts
        self._job = job(setting.oracle, setting.policy)
        self._plan = self._job.plan(setting.shards)
        self._world = World(seed, setting.faults)
        self._network = Network(self._world)
        self._store = SimulatedStore(self._world)
        self._store.sound.create(
            plan_name(1), encode(PlanRecord.of(self._plan, source=None, coordinator_incarnation=1))
        )
        self._shards: list[ShardProcess] = []
        self._ending = Ending()
        self._coordinators: list[CoordinatorProcess] = []
        elements = max(self._plan.shard_elements(s) for s in range(setting.shards))
        # One element more than a part: messages end in the middle of variables, where a tear can be seen.
        self._message_bytes = 4 * (elements // setting.messages + 1)
        rows_bytes = sum(table.push_bytes_max for table in self._job.tables)
        self._queue_bytes = int((4 * elements + rows_bytes) * setting.queue_pushes)
        every_s = setting.checkpoint_every_s if setting.policy.kind != "sync" else 0.0
        self._options = CheckpointOptions(
            every_s=every_s,
            every_steps=setting.checkpoint_every_steps,
            keep=setting.checkpoints_kept,
        )

    def outcome(self) -> Outcome:
        """Run and judge."""
        world, setting = self._world, self._setting
        starts = Starts(self._start_coordinator, self._start_shard, self._start_worker)
        Supervisor(world, starts, setting.shards, setting.workers, tells=setting.supervised, ending=self._ending)
        operator = Operator(world, self._network, setting.drained_checkpoints)
        operator.spawn(operator.work)
        if setting.decides:
            follower = Follower(world, self._network, self._ending, planned_rates() if setting.plans else {})
            follower.spawn(follower.work)
        if setting.faults.stray_claim:
            claimer = Claimer(world, self._store.sound, setting.shards)
            claimer.spawn(claimer.work)
        if setting.strays:
            stray = Stray(world, self._network, self._job, self._plan, self._shards)
            stray.spawn(stray.work)
        weights, found = "", world.violations
        try:
            world.run(lambda: self._ending.by is not None, setting.calm_events_max)
        except Stuck as stuck:
            world.violated(f"progress: {stuck}")
        coordinator = self._ending.by
        if coordinator is not None and not found:
            weights = "" if coordinator.final is None else digest(coordinator.final)
            world.faults = CALM
            world.work_on(lambda: not self._network.under_way)  # what dead workers have sent must not matter
            store = self._store.sound
            found += violations(setting, self._job, coordinator, self._shards, store, self._ending, self._plan)
        world.note(weights)
        cores = [coordinator.core for coordinator in self._coordinators]
        world.fired["speculative lease"] += sum(core.job.leases.speculative_leases for core in cores)
        world.fired["worker started again"] += sum(
            w.restarts for core in cores for w in core.job.workers.by_name.values()
        )
        lag = max((shard.shard.record.step_lag_max for shard in self._shards), default=0)
        return Outcome(found, weights, world.trace, world.events, world.calm_events, lag, world.fired)

    # --- processes ---

    def _start_coordinator(self) -> Process:
        world = self._world
        world.acting = None
        try:
            coordinator = CoordinatorProcess(
                world,
                self._network,
                self._store,
                self._job,
                self._plan,
                self._core,
                self._parts,
                self._ending,
                self._setting.lag_max,
            )
        except (StoreFailed, Superseded) as error:
            return Stillborn(world, COORDINATOR, str(error))
        self._coordinators.append(coordinator)
        coordinator.start()
        return coordinator

    def _start_shard(self, index: int) -> Process:
        self._world.acting = None
        builder = Builder(self._job, self._plan, index, self._queue_bytes, self._parts, self._options)
        incarnation = "" if self._setting.same_address else f":{len(self._shards)}"
        try:
            shard = ShardProcess(
                self._world,
                builder,
                self._network,
                f"shard-{index}{incarnation}",
                self._store,
                self._parts,
            )
        except StoreFailed as error:
            return Stillborn(self._world, f"shard-{index}", str(error))
        self._shards.append(shard)
        shard.start()
        return shard

    def _start_worker(self, name: str) -> WorkerProcess:
        setting = self._setting
        habits = Habits(
            setting.depth,
            setting.lease_batch,
            checks_finite="P6-unchecked" not in self._parts.habits,
            stops_early=setting.stops_early,
            bad_step=setting.bad_step,
            bad_step_fails=setting.bad_step_fails,
            bad_step_kills=setting.bad_step_kills,
        )
        worker = WorkerProcess(self._world, name, self._network, self._job, habits)
        worker.client = self._client(worker)
        worker.start()
        return worker

    def _client(self, owner: Process) -> SimulatedClient:
        return SimulatedClient(
            owner,
            self._network,
            self._plan,
            message_bytes=self._message_bytes,
            retry_budget_s=self._setting.retry_budget_s,
        )

    def _core(self, incarnation: int) -> Core:
        """Return the coordinator's core, as `parashard_coordinator.__main__` builds it from a job file."""
        setting, steps, parts = self._setting, self._job.steps_total, self._parts
        policy = leasing_policy(setting.policy)
        after: list[int] = []
        if setting.evaluate_every_epochs:
            after = evaluation_steps(steps, steps // EPOCHS, setting.evaluate_every_epochs)
        launcher = None
        if setting.supervised:
            launcher = LocalLauncher(setting.shards, backoff_s=0.05, budget=NEVER)
        options = CoreSettings(
            RUN_ID,
            DIGEST,
            steps,
            setting.shards,
            setting.workers,
            lease_batch=setting.lease_batch,
            lease_ttl_s=LEASE_TTL_S,
            silence_s=SILENCE_S,
            start_s=START_S,
            max_attempts=NEVER if setting.bad_step is None else BAD_STEP_ATTEMPTS,
            skip_bad_steps=setting.bad_step is not None,
            target_accuracy=0.5,
            same_arithmetic=setting.policy.kind == "sync",
            incarnation=incarnation,
            steps_per_epoch=steps // EPOCHS if setting.decides else 0,
            callbacks=CallbackOptions(
                followed=True,
                decide=setting.decides,
                ahead=(0 if setting.waits else 1) if setting.decides and not setting.plans else None,
            ),
        )
        book = Rounds()
        if setting.policy.kind == "sync":
            book = parts.book(setting.shards, setting.policy.bound, steps, setting.checkpoint_every_s)
        return parts.core(parts.job_record(options, policy, Evaluations(after, policy, steps), launcher, book))
