"""A coordinator's process around the real core, service and run store, in virtual time.

Does what `parashard_coordinator.run.coordination` and `parashard_coordinator.__main__` do: claims an incarnation, takes
up what its predecessor saved, leases, sends shards back, names rounds, takes drained checkpoints, and ends the job.
Knows no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sim_held_calls import HeldCalls
from sim_jobs import Job
from sim_network import Network
from sim_parts import COORDINATOR, DIGEST, RUN_ID, Parts
from sim_store import SimulatedStore
from sim_world import Process, Promise, World

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.errors import Fenced, ParashardError, RetryLater, StaleRequest, StoreFailed, Superseded
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import Plan
from parashard.plan.variables import Float32s
from parashard.process.shell import AwakeClock
from parashard.store.claims import claim_incarnation
from parashard_coordinator.core.auto_jobs import set_lag
from parashard_coordinator.core.callback_progress import DecidedRate
from parashard_coordinator.core.controller import Lag, LagDecision
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.draining import Answer
from parashard_coordinator.core.job_record import DueCheckpoint
from parashard_coordinator.core.membership import ShardRegistration
from parashard_coordinator.endpoints.service import CoordinatorService
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_coordinator.shards import saved_shard

TICK_S = 0.05
SAVE_S = 1.0
COMMAND_DEADLINE_S = 0.5
STALL_S = 1.0  # less than a lease lasts, as in a real coordinator
DECISION_TRIES = 10
LAG_CHANGES = 0.3  # of the looks after which another lag is decided


@dataclass
class Ending:
    """What became known of the job's end, whichever incarnation of the coordinator told it."""

    stops: set[int] = field(default_factory=set)  # where workers were told that it ends early
    registrations: dict[int, list[ShardRegistration]] = field(default_factory=dict)  # of the shards, by the last step
    by: CoordinatorProcess | None = None  # who has ended it
    decided: dict[int, float] = field(default_factory=dict)  # learning rates that callbacks decided, by milestone
    told_rates: set[DecidedRate] = field(default_factory=set)  # that they were told to hold
    lags: list[Lag] = field(default_factory=list)  # by which steps were leased
    lags_of: int = 0  # the incarnation that last leased by them


class CoordinatorProcess(Process):
    """One incarnation of the coordinator.

    Parameters
    ----------
    network : Network
        Carries its calls.
    store : SimulatedStore
        Of the run.
    job, plan
        What it is about.
    new_core : callable
        From an incarnation to a core at the job's start.
    parts : Parts
        What it is made of, and what it leaves out, by rule.
    ending : Ending
        Told of the job's end.
    lag_max : int
        Most that it decides on in `auto`.
    """

    crash = "coordinator_crash"
    pause = "coordinator_pause"
    hang = "coordinator_hang"

    def __init__(
        self,
        world: World,
        network: Network,
        store: SimulatedStore,
        job: Job,
        plan: Plan,
        new_core: Callable[[int], Core],
        parts: Parts,
        ending: Ending,
        lag_max: int = 0,
    ) -> None:
        self._lag_max = lag_max
        self.incarnation = claim_incarnation(store, "coordinator")
        super().__init__(world, COORDINATOR)
        self._network = network
        self._policy = job.policy
        self._plan = plan
        self._habits = parts.habits
        self._ending = ending
        self._run_store = parts.run_store(store, self.incarnation)
        self._run_store.open_plan(plan)
        self.core = new_core(self.incarnation)
        saved = self._run_store.load_saved()
        if saved is not None:
            self.core.job.resume(saved)
            world.fired["end taken over"] += self.core.job.ending is not None
        self._run_store.save(self.core.job.saved())  # before it serves (P23)
        self._stored_skips = frozenset(self.core.job.leases.skips)
        self._stored_steering = _steered(self.core)
        self._stop_stored = bool(self.core.job.early_stop)
        self.exclusive = ExclusiveCore(self.core, AwakeClock(STALL_S, lambda: world.now_s).now_s)
        self.exclusive.on_decision = self._save_decision
        status = StatusView("job", "")
        self.service = CoordinatorService(self.exclusive, pb.GetJobReply(run_id=RUN_ID), status)
        self.final: dict[str, Float32s] | None = None
        self.metrics: Mapping[str, float] | None = None  # what the report says of them
        self.registrations: list[ShardRegistration] = []  # of the shards, when the end was decided
        self._held = HeldCalls(world, self.exclusive, self.core, self._watch)
        self._events = 0
        world.note(f"coordinator {self.incarnation} starts")
        network.hosts[COORDINATOR] = self

    def start(self) -> None:
        """Begin to coordinate."""
        self.spawn(self._run)

    def receive(self, request: Any) -> Any:
        """Answer a call."""
        service = self.service
        match request:
            case pb.RegisterShardRequest():
                answer: Any = service.RegisterShard(request, None)
            case pb.RegisterWorkerRequest():
                answer = service.RegisterWorker(request, None)
            case pb.GetViewRequest():
                return service.GetView(request, None)
            case pb.CreateCheckpointRequest():
                answer = service.CreateCheckpoint(request, None)
            case pb.SuperviseRequest():
                answer = service.Supervise(request, None)
            case pb.FollowRequest():
                answer = service.Follow(request, None)
            case _:
                answer = self._lease(request)
        self.wake()
        return answer

    def _lease(self, request: pb.LeaseRequest) -> pb.LeaseReply | Promise[pb.LeaseReply]:
        """Answer at once, or hold the call until there is something to say, as the service does."""
        at_once = pb.LeaseRequest()
        at_once.CopyFrom(request)
        at_once.wait_s = 0.0
        answer: pb.LeaseReply = self.service.Lease(at_once, None)
        self._watch(answer)
        over = answer.state in (pb.JOB_STATE_DONE, pb.JOB_STATE_FAILED)
        if not (request.want and request.wait_s > 0) or answer.granted or answer.evaluations or answer.revoked or over:
            return answer
        self.world.after(request.wait_s, self.wake)
        return self._held.hold(request)

    def wake(self) -> None:
        """Look again at who waits: something has changed, or the time is up."""
        if self.alive and not self.paused:
            self._held.answer()

    def _watch(self, reply: pb.LeaseReply) -> None:
        """Check what a worker is told, as it leaves (P7, P9)."""
        core, policy = self.core, self._policy
        lag_max = max((grant.step - core.job.leases.lowest_incomplete for grant in reply.granted), default=0)
        if policy.kind == "ssp" and lag_max > policy.bound:
            self.world.violated(f"ssp: a step was leased at a step lag of {lag_max}")
        controller = core.job.controller
        if controller is not None and reply.granted:
            if self.incarnation >= self._ending.lags_of:  # one that is superseded does not know the newest
                if controller.lags[: len(self._ending.lags)] != self._ending.lags:
                    self.world.violated(f"lag: {self._ending.lags} held before, and now {controller.lags}")
                self._ending.lags, self._ending.lags_of = list(controller.lags), self.incarnation
            if lag_max >= controller.parts * (controller.lag + 1 + 2 * controller.ahead):
                self.world.violated(f"lag: a part was leased at a step lag of {lag_max}")
        if self._stop_stored and reply.state == pb.JOB_STATE_DRAINING:
            self._ending.stops.add(core.job.leases.target)

    # --- what it does by itself ---

    async def _run(self) -> None:
        core, world = self.core, self.world
        next_save_s = world.now_s + SAVE_S
        while not core.job.over:
            self.exclusive.run_exclusive(lambda core, now_s: core.tick(now_s))
            self._decide_lag()
            self._note_events()
            if world.now_s >= next_save_s:
                next_save_s = world.now_s + SAVE_S
                self._save_if_changed()
            await self._command_shards()
            due = core.job.due_checkpoint()
            if due is not None:
                await (self._finish(due) if due.final else self._save_drained(due))
            self.wake()
            await world.sleep(TICK_S)
        self.wake()
        self._ending.by = self._ending.by or self

    def _decide_lag(self) -> None:
        """Decide on another lag, or window, now and then, as the controller does where the figures say so."""
        controller = self.core.job.controller
        if controller is not None and self.world.rng.random() < LAG_CHANGES:
            controller.ahead = self.world.rng.choice((0, 1, 4))
            self.world.fired["leased ahead"] += controller.ahead > 0
        if controller is not None and self._lag_max and self.world.rng.random() < LAG_CHANGES:
            decision = LagDecision(self.world.rng.randint(0, self._lag_max), "drawn")
            self.world.fired["lag changed"] += decision.lag != controller.lag
            self.exclusive.run_exclusive(lambda core, _: set_lag(core.job, decision))

    def _note_events(self) -> None:
        new = self.core.job.events_total - self._events
        self._events = self.core.job.events_total
        for event in list(self.core.job.events)[-new:] if new else ():
            self.world.note(event)
            self.world.fired["silent worker"] += " was silent " in event
            self.world.fired["void evaluation"] += " is void: " in event
            self.world.fired["early stop"] += event.startswith("draining")

    async def _command_shards(self) -> None:
        """Send shards back that have to return (P12), and name the round that all save next."""
        core = self.core
        if not core.job.shards.all_registered:
            return
        registrations = core.job.shards.registrations()
        await self._command(
            [
                (
                    registrations[shard],
                    shard_pb2.RollbackRequest(
                        run_id=RUN_ID,
                        incarnation=registrations[shard].incarnation,
                        coordinator_incarnation=self.incarnation,
                        round=round_,
                        shard=shard,
                    ),
                )
                for shard, round_ in core.job.rounds.out_of_round()
            ]
        )
        round_ = self.exclusive.run_exclusive(
            lambda core, now_s: core.job.rounds.round_to_save(core.job.leases.lowest_incomplete, now_s)
        )
        if round_ is not None:
            await self._command(self._saves(round_, core.job.shards.registrations(), ahead=True))
            self.exclusive.run_exclusive(lambda core, _: core.job.rounds.round_announced())

    async def _command(self, commands: Sequence[tuple[ShardRegistration, Any]]) -> list[Any]:
        """Send commands at once; return the answers, or the errors in their place."""
        calls = [
            self._network.call(self, registration.address, request, COMMAND_DEADLINE_S)
            for registration, request in commands
        ]
        answers: list[Any] = []
        for call in calls:
            try:
                answers.append(await call)
            except ParashardError as error:
                self.world.note(f"command: {error.code}")
                answers.append(error)
        return answers

    def _saves(
        self, round_: int | None, registrations: Sequence[ShardRegistration], *, ahead: bool
    ) -> list[tuple[ShardRegistration, shard_pb2.TakeCheckpointRequest]]:
        """Return the order to save for every shard."""
        return [
            (
                registration,
                shard_pb2.TakeCheckpointRequest(
                    run_id=RUN_ID,
                    incarnation=registration.incarnation,
                    coordinator_incarnation=self.incarnation,
                    round=round_,
                    ahead=ahead,
                    shard=shard,
                ),
            )
            for shard, registration in enumerate(registrations)
        ]

    async def _save_drained(self, due: DueCheckpoint) -> None:
        try:
            id_ = await self._checkpoint_of_all(due)
        except (RetryLater, StaleRequest, Fenced) as error:
            why = str(error)
            given_up = self.exclusive.run_exclusive(
                lambda core, now_s: core.job.draining.failed(why, core.job.shards.view, now_s)
            )
            if given_up is None:
                return  # leasing stays paused until the shard is back
            answer = given_up
        except ParashardError as error:
            answer = Answer(error=str(error), steps=due.steps)
        else:
            if not id_:
                return
            answer = Answer(checkpoint=id_, steps=due.steps)
            self.world.fired["drained checkpoint"] += 1
        self.exclusive.run_exclusive(lambda core, _: core.checkpoint_ended(answer))

    async def _checkpoint_of_all(self, due: DueCheckpoint) -> str:
        steps = due.steps
        parts = await self._command(self._saves(due.round, due.registrations, ahead=False))
        for part in parts:
            if isinstance(part, ParashardError):
                raise part
        saved = [saved_shard(self._plan.version, shard, part) for shard, part in enumerate(parts)]
        applied = [shard.applied for shard in saved]
        self.exclusive.run_exclusive(
            lambda core, _: core.shards_saved([(shard.applied, shard.skipped) for shard in saved])
        )
        unequal = any(steps_of != IntervalSet([(0, steps)]) for steps_of in applied)
        if unequal and "P8-unequal-sets" not in self._habits:
            furthest = max(stop for steps_of in applied for _, stop in [(0, 0), *steps_of.intervals()])
            self.exclusive.run_exclusive(lambda core, _: core.drain_further(furthest))
            return ""
        await self.moment()
        if due.final and not self._save_if_changed():
            self.world.note("end waits: its records are not stored")
            return ""
        return self._run_store.add_job_manifest(
            RUN_ID, DIGEST, self._plan, steps, [shard.part for shard in saved], final=due.final
        )

    async def _finish(self, due: DueCheckpoint) -> None:
        """Store the last checkpoint, whose weights are the final ones; then the job is done (P7)."""
        try:
            if "P7-no-checkpoint" not in self._habits:
                if not due.stored:
                    # First: it may be stored though this coordinator does not learn so.
                    self._ending.registrations[due.steps] = list(due.registrations)
                    due = due._replace(stored=await self._checkpoint_of_all(due))
                    if not due.stored:
                        return
                    self.exclusive.run_exclusive(lambda core, _: core.job.set_final_checkpoint(due))
                    await self.moment()
                self.final = self._run_store.model(due.stored).variables
        except Superseded:
            self.end("superseded")
            return
        except ParashardError as error:
            self.world.note(f"end waits: {error.code}")
            return
        self.metrics, self.registrations = due.metrics, self._ending.registrations.get(due.steps, [])
        self.exclusive.run_exclusive(lambda core, _: core.job.mark_done())

    def _save_decision(self, core: Core) -> None:
        """Store what a successor has to know before it acts; where there is one already, this is the end (P7)."""
        if "P7-decision-not-stored" in self._habits:
            self._stop_stored = bool(core.job.early_stop)
            return
        try:
            for _ in range(DECISION_TRIES):
                stored = core.job.leases.skips <= self._stored_skips and _steered(core) == self._stored_steering
                if self._save(core) or stored:
                    return  # what is not stored, a successor finds out again (P21)
        except Superseded:
            self.end("superseded")
            raise
        self.end("a decision could not be stored")
        raise StoreFailed("a decision could not be stored")

    def _save_if_changed(self) -> bool:
        return "P7-decision-not-stored" in self._habits or self._save(self.core)

    def _save(self, core: Core) -> bool:
        try:
            self._run_store.save(core.job.saved())
        except StoreFailed:
            return False
        self._stored_skips, self._stop_stored = frozenset(core.job.leases.skips), bool(core.job.early_stop)
        self._stored_steering = _steered(core)
        return True

    def ended(self, why: str) -> None:
        """Drop the calls that wait."""
        self._held.drop()


def _steered(core: Core) -> tuple[int, int, int]:
    """Return what must be stored of learning rates and lags before it acts (P37, P39)."""
    controller, progress = core.job.controller, core.job.callback_progress
    return progress.decided, progress.leased_to, 0 if controller is None else len(controller.lags)
