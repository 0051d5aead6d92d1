"""Under any interleaving of leases, acks, failures, deaths, lost replies and restarts of shards no step is lost.

A model keeps what each shard has really applied and what the coordinator may believe of it (P3, P5). At the end the
faults stop, and the job must finish.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parashard.errors import Superseded
from parashard_coordinator.core.calls import CompletedStep, JobState
from parashard_coordinator.core.policies import Async, LeasingPolicy, Ssp, Sync
from support.coordinator_cases import Caller, announce, core_of

STEPS, SHARDS, TTL_S, ATTEMPTS = 14, 2, 10.0, 2
HOLDERS_MAX = 2  # at a time: a straggling step is computed twice at most
NAMES = ("worker-0", "worker-1", "worker-2")
POLICIES: tuple[LeasingPolicy, ...] = (Async(), Ssp(0), Ssp(3), Sync(1), Sync(4))

workers = st.sampled_from(NAMES)
shards = st.integers(0, SHARDS - 1)


class Pushing(Caller):
    """A worker's incarnation that keeps its acks until a reply to their report has come."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.acks: dict[int, list[int]] = {}  # step -> by shard the incarnation that acknowledged it; 0: none yet
        self.skipping: set[int] = set()  # steps that it was told to push empty
        self.unreported: list[CompletedStep] = []
        self.failed: list[tuple[int, str]] = []


class Interleavings(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(POLICIES), speculate_after=st.sampled_from((0.0, 2.0)))
    def start(self, policy: LeasingPolicy, speculate_after: float) -> None:
        self.policy = policy
        self.core = core_of(
            policy,
            steps_total=STEPS,
            shards=SHARDS,
            workers=len(NAMES),
            lease_ttl_s=TTL_S,
            speculate_after=speculate_after,
            max_attempts=ATTEMPTS,
            skip_bad_steps=True,
        )
        self.now_s = 0.0
        self.applied: list[set[int]] = [set() for _ in range(SHARDS)]
        self.incarnations = [1] * SHARDS
        self.registered = [1] * SHARDS
        self.believed: list[set[int]] = [set() for _ in range(SHARDS)]
        self.failures: dict[int, int] = {}
        self.given_up: set[int] = set()
        self.skipped: list[set[int]] = [set() for _ in range(SHARDS)]
        self.callers = {name: Pushing(self.core, name) for name in NAMES}
        self.zombies: list[Pushing] = []

    # --- what the coordinator may believe ---

    def complete(self) -> set[int]:
        return set.intersection(*self.believed)

    def lowest_incomplete(self) -> int:
        complete = self.complete()
        return next(step for step in range(STEPS + 1) if step not in complete)

    # --- workers ---

    @rule(name=workers, want=st.integers(0, 6), lost=st.booleans(), listed=st.booleans())
    def call(self, name: str, want: int, lost: bool, listed: bool) -> None:
        self._call(self.callers[name], want, lost=lost, listed=listed)

    def _call(self, caller: Pushing, want: int, *, lost: bool = False, listed: bool = True) -> None:
        if not listed:
            caller.held = []
        reported, failed = list(caller.unreported), list(caller.failed)
        leased = self.core.job.leases.held_by(name_of(caller))
        self._believe(reported)
        for step in dict.fromkeys(step for step, _ in failed):
            if step in leased and step not in self.complete():  # a report made again after a lost reply counts once
                self.failures[step] = self.failures.get(step, 0) + 1
                if self.failures[step] >= ATTEMPTS:
                    self.given_up.add(step)
        ended = {step for step, _ in failed} | {step.step for step in reported}
        held = [step for step in caller.held if step not in ended]
        answer = caller.call(self.now_s, want=want, lost=lost, completed=reported, failed=failed)
        limit = min(self.core.job.leases.target, self.policy.limit(self.lowest_incomplete()))
        granted = [grant.step for grant in answer.granted]
        assert len(granted) <= want
        assert sorted(set(granted)) == granted
        for grant in answer.granted:
            assert grant.step < limit, "P9, P10: nothing is leased at or past the limit"
            assert grant.step not in self.complete(), "a complete step is not leased again"
            assert grant.step not in held, "a worker is not granted a step that it holds"
            assert grant.skip == (grant.step in self.given_up), "P6"
            holders = [other for other in NAMES if grant.step in self.core.job.leases.held_by(other)]
            assert name_of(caller) in holders
            assert len(holders) <= HOLDERS_MAX
        if not lost:
            caller.unreported.clear()
            caller.failed.clear()
            caller.acks = {step: caller.acks.get(step, [0] * SHARDS) for step in caller.held}
            caller.skipping |= {grant.step for grant in answer.granted if grant.skip}

    def _believe(self, reported: list[CompletedStep]) -> None:
        for step in reported:
            if step.step in self.given_up and not step.skipped:
                continue  # P24
            for shard, incarnation in enumerate(step.incarnations):
                if incarnation == self.registered[shard]:
                    self.believed[shard].add(step.step)
        for step in self.complete():
            self.failures.pop(step, None)

    @rule(name=workers, pick=st.integers(0, 20), shard=shards)
    def push(self, name: str, pick: int, shard: int) -> None:
        caller = self.callers[name]
        if caller.acks:
            self._push(caller, sorted(caller.acks)[pick % len(caller.acks)], shard)

    def _push(self, caller: Pushing, step: int, shard: int) -> None:
        self.applied[shard].add(step)
        skipped = step in caller.skipping
        if skipped:
            self.skipped[shard].add(step)  # in place of what it holds
        acks = caller.acks[step]
        acks[shard] = self.incarnations[shard]
        if all(acks):
            caller.unreported.append(CompletedStep(step, list(acks), 0.5, 8, skipped))
            del caller.acks[step]

    @rule(name=workers, pick=st.integers(0, 20))
    def fail(self, name: str, pick: int) -> None:
        caller = self.callers[name]
        if caller.acks:
            step = sorted(caller.acks)[pick % len(caller.acks)]
            del caller.acks[step]
            caller.failed.append((step, "broken"))

    @rule(name=workers)
    def die(self, name: str) -> None:
        self.zombies.append(self.callers[name])
        self.callers[name] = Pushing(self.core, name, self.now_s)

    @precondition(lambda self: self.zombies)
    @rule(pick=st.integers(0, 20))
    def a_zombie_pushes_and_calls(self, pick: int) -> None:
        zombie = self.zombies[pick % len(self.zombies)]
        for step in list(zombie.acks):
            for shard in range(SHARDS):
                if step in zombie.acks:
                    self._push(zombie, step, shard)
        try:
            zombie.call(self.now_s, want=4, completed=zombie.unreported)
        except Superseded:
            return
        raise AssertionError("a newer incarnation has its name")

    @rule(elapsed_s=st.sampled_from((0.3, 3.0, TTL_S + 1.0)))
    def wait(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        self.core.tick(self.now_s)

    # --- shards ---

    @rule(shard=shards, kept=st.sets(st.integers(0, STEPS - 1)))
    def restart_shard(self, shard: int, kept: set[int]) -> None:
        if not isinstance(self.core.job.policy, Sync):  # a round that is lost takes all shards back (P12): test_rounds
            self.applied[shard] &= kept
        self.incarnations[shard] += 1

    @rule(shard=shards)
    def register_shard(self, shard: int) -> None:
        held, empty = [(step, step + 1) for step in self.applied[shard]], self.skipped[shard] & self.applied[shard]
        failed = set(self.core.job.leases._paused)
        announce(self.core, shard, self.incarnations[shard], held=held, skipped=empty)
        if self.registered[shard] == self.incarnations[shard]:
            self.believed[shard] |= failed & self.applied[shard]  # P24: one that failed may be in
            for step in self.complete():
                self.failures.pop(step, None)
            return  # it says that once a second, and acks have told more
        self.registered[shard] = self.incarnations[shard]
        self.believed[shard] = self.applied[shard] - (self.given_up - empty)
        for step in self.complete():
            self.failures.pop(step, None)

    # --- people ---

    @rule()
    def stop_early(self) -> None:
        before = self.core.job.leases.target
        assert self.core.job.leases.stop_at_frontier() <= before

    # --- what always holds ---

    @invariant()
    def complete_is_what_every_registered_incarnation_has(self) -> None:
        leases = self.core.job.leases
        assert {s for start, stop in leases.complete.intervals() for s in range(start, stop)} == self.complete()
        assert leases.lowest_incomplete == self.lowest_incomplete()
        for name in NAMES:
            assert not leases.held_by(name) & self.complete()

    @invariant()
    def shards_have_what_is_believed_of_them(self) -> None:
        for shard in range(SHARDS):
            if self.registered[shard] == self.incarnations[shard]:
                assert self.believed[shard] <= self.applied[shard]

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for shard in range(SHARDS):
            self.register_shard(shard)
        for name in NAMES[1:]:
            self.core.job.leases.end(name)  # the launcher saw them end
        caller = Pushing(self.core, NAMES[0], self.now_s)
        for _ in range(3 * STEPS):
            self.now_s += 0.1
            self._call(caller, 4)
            for step in list(caller.acks):
                for shard in range(SHARDS):
                    self._push(caller, step, shard)
        assert self.core.job.leases.finished, "a step was lost"
        assert self.complete() >= set(range(self.core.job.leases.target))
        assert self.core.job.state is JobState.RUNNING


def name_of(caller: Caller) -> str:
    return caller.worker.name


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(stateful_step_count=40)
