"""What each figure says after each kind of restart: a step counts once, whatever dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from parashard.checkpoints.encoding import decode, encode
from parashard_coordinator.core.calls import CompletedStep, FollowCall
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.results import follow
from parashard_coordinator.core.saved import Saved
from parashard_coordinator.core.supervision import Exit, ProcessName
from parashard_coordinator.core.training_figures import MetricSums
from support.coordinator_cases import Caller, announce, announce_all, core_after, core_of

STEPS, EPOCH, EXAMPLES = 40, 20, 8
OPTIONS = {"steps_per_epoch": EPOCH, "steps_total": STEPS}


def completed(step: int, incarnations: list[int]) -> CompletedStep:
    """Return the report of a step whose loss, and whose metric, are its number."""
    metric = MetricSums("number", "mean", [float(step * EXAMPLES), EXAMPLES])
    return CompletedStep(step, list(incarnations), float(step), EXAMPLES, metrics=[metric])


class Cluster:
    """A coordinator, two workers that tell each step's number as its loss, and two shards, in virtual time."""

    def __init__(self) -> None:
        self.core = core_of(**OPTIONS)
        self.workers = [Caller(self.core, f"worker-{i}", token=i + 1) for i in range(2)]
        self.incarnations = [1, 1]
        self.stored = encode(self.core.job.saved())
        self.reported: list[list[CompletedStep]] = [[], []]  # by worker, since `store`
        self.now_s = 0.0

    def store(self) -> None:
        self.stored = encode(self.core.job.saved())
        self.core.job.mark_stored()
        self.reported = [[], []]

    def work(self, steps: int) -> None:
        """Have workers complete so many steps in turn."""
        for number in range(steps):
            index = number % 2
            self.now_s += 1.0
            caller = self.workers[index]
            if caller.lease(1, self.now_s):
                done = [completed(step, self.incarnations) for step in caller.held]
                self.reported[index] += done
                caller.call(self.now_s, completed=done)

    def work_to_the_end(self) -> None:
        while not self.core.job.leases.finished:
            self.work(2)

    # --- restarts ---

    def restart_worker(self) -> None:
        self.workers[0].lease(2, self.now_s)
        self.core.supervise([Exit(ProcessName("worker", 0), -9, "killed", 1)], [], self.now_s)
        self.workers[0] = Caller(self.core, "worker-0", self.now_s, token=11)
        self.reported[0] = []

    def restart_shard(self) -> None:
        """Begin the first shard's next incarnation with half of the steps that it had."""
        self.incarnations[0] += 1
        applied = self.core.job.leases.held_by_shard(0)
        announce(self.core, 0, self.incarnations[0], [(0, len(applied) // 2)], now_s=self.now_s)

    def restart_coordinator(self) -> None:
        """Begin the next coordinator with what was stored last; the workers join it, and report again."""
        held = [list(self.core.job.leases.held_by_shard(shard).intervals()) for shard in range(2)]
        incarnation = self.core.job.options.incarnation
        self.core = core_of(registered=False, incarnation=incarnation + 1, **OPTIONS)
        self.core.job.resume(decode(Saved, self.stored, "saved"))
        self.core.tick(self.now_s)
        for shard, steps in enumerate(held):
            announce(self.core, shard, self.incarnations[shard], steps, now_s=self.now_s)
        for index, caller in enumerate(self.workers):
            caller.join(self.core, caller.name, self.now_s)
            caller.sequence = 0
            caller.call(self.now_s, completed=self.reported[index])

    def resume(self) -> None:
        """Begin the run again with new processes, after a stop that saved all."""
        self.store()
        self.restart_coordinator_only()
        self.workers = [Caller(self.core, f"worker-{i}", self.now_s, token=100 + i) for i in range(2)]

    def restart_coordinator_only(self) -> None:
        steps = [[(0, len(self.core.job.leases.held_by_shard(shard)) // 2)] for shard in range(2)]
        self.core = core_after(self.core, **OPTIONS)
        self.core.job.reset_for_resume()
        self.incarnations = [one + 1 for one in self.incarnations]
        for shard, kept in enumerate(steps):
            announce(self.core, shard, self.incarnations[shard], kept, now_s=self.now_s)


class Restarts(NamedTuple):
    """How often what is said to have been restarted: workers, worker-0, shards, the coordinator."""

    workers: int = 0
    worker_0: int = 0
    shards: int = 0
    coordinator: int = 0


def restarts_of(core: Core) -> Restarts:
    job = core.job
    one = job.workers.by_name["worker-0"].restarts
    return Restarts(job.supervision.worker_restarts, one, job.shard_restarts, job.coordinator_restarts)


CASES: list[tuple[list[Callable[[Cluster], None]]]] = [
    ([], Restarts()),
    ([Cluster.restart_worker], Restarts(workers=1, worker_0=1)),
    ([Cluster.restart_shard], Restarts(shards=1)),
    ([Cluster.restart_coordinator], Restarts(coordinator=1)),
    ([Cluster.resume], Restarts()),
    ([Cluster.restart_shard, Cluster.restart_coordinator], Restarts(shards=1, coordinator=1)),
    ([Cluster.restart_coordinator, Cluster.restart_shard], Restarts(shards=1, coordinator=1)),
    ([Cluster.restart_worker, Cluster.store, Cluster.restart_coordinator], Restarts(1, 1, 0, 1)),
    ([Cluster.restart_coordinator, Cluster.restart_coordinator, Cluster.restart_worker], Restarts(1, 1, 0, 2)),
    ([Cluster.restart_shard, Cluster.resume, Cluster.restart_worker], Restarts(1, 1, 1, 0)),
]
NAMES = ["+".join(call.__name__.removeprefix("restart_") for call in calls) or "nothing" for calls, _ in CASES]


@pytest.mark.parametrize(("calls", "restarts"), CASES, ids=NAMES)
def test_each_figure_counts_a_step_once_whatever_is_restarted(
    calls: list[Callable[[Cluster], None]], restarts: Restarts
) -> None:
    cluster = Cluster()
    cluster.work(6)
    cluster.store()
    cluster.work(4)
    for call in calls:
        call(cluster)
    cluster.work_to_the_end()
    job = cluster.core.job
    milestone = follow(job, FollowCall()).milestone
    assert milestone is not None
    later = follow(job, FollowCall(handled=milestone.after_steps)).milestone
    assert later is not None
    assert [*milestone.epoch_losses, *later.epoch_losses] == [9.5, 29.5], "each step's loss is its number"
    assert [*milestone.epoch_metrics, *later.epoch_metrics] == [{"number": 9.5}, {"number": 29.5}]
    assert job.figures.newest() == {"number": 29.5}
    assert job.figures.examples == STEPS * EXAMPLES
    by_worker = [worker.steps_complete for worker in job.workers.by_name.values()]
    assert sum(by_worker) == len(job.leases.complete) == STEPS
    assert min(by_worker) > 1, "what both have done is known"
    assert restarts_of(cluster.core) == restarts
    assert 20.0 < job.learning.loss < 40.0, "smoothed over the last steps"
    assert job.progress.training_s() == pytest.approx(cluster.now_s, abs=6.0)


# --- a worker's restarts, over coordinators ---


def test_a_process_that_goes_on_under_a_new_coordinator_is_no_restart() -> None:
    cluster = Cluster()
    cluster.restart_worker()
    cluster.store()
    for _ in range(2):
        cluster.restart_coordinator()
        cluster.store()
    assert restarts_of(cluster.core) == Restarts(1, 1, 0, 2)
    assert cluster.core.job.events[-1] == "worker-1 joined (cpu)"


def test_a_worker_that_died_with_its_coordinator_is_a_restart() -> None:
    cluster = Cluster()
    cluster.store()
    core = core_after(cluster.core, **OPTIONS)
    announce_all(core, [], [])
    Caller(core, "worker-0", token=11)
    Caller(core, "worker-1", token=2)
    assert restarts_of(core) == Restarts(1, 1, 0, 1)


def test_an_exit_that_the_earlier_coordinator_has_counted_counts_once() -> None:
    earlier = core_of(**OPTIONS)
    Caller(earlier, "worker-0", token=1)
    earlier.supervise([Exit(ProcessName("worker", 0), -9, "killed", 1)], [], 0.0)
    core = core_after(earlier, **OPTIONS)
    announce_all(core, [], [])
    Caller(core, "worker-0", token=2)
    assert restarts_of(core) == Restarts(1, 1, 0, 1)


# --- what a new coordinator waits for ---


def test_an_epoch_is_told_once_the_workers_have_reported_again_or_their_lease_time_is_up() -> None:
    cluster = Cluster()
    cluster.work(16)
    cluster.store()
    cluster.work(4)
    for report, expected in ((True, 9.5), (False, sum(range(16)) / 16)):
        core = core_of(registered=False, incarnation=2, **OPTIONS)
        core.job.resume(decode(Saved, cluster.stored, "saved"))
        core.tick(100.0)
        announce_all(core, [(0, 20)], [(0, 20)])
        assert follow(core.job, FollowCall()).milestone is None, "two workers may report steps that are not stored"
        if report:
            for index, caller in enumerate(cluster.workers):
                again = Caller(core, caller.name, 100.0, token=caller.token)
                again.call(100.0, completed=cluster.reported[index])
        else:
            core.tick(100.1 + core.job.options.lease_ttl_s)
        milestone = follow(core.job, FollowCall()).milestone
        assert milestone is not None
        assert milestone.epoch_losses == [expected]


def test_a_coordinator_says_which_of_a_worker_s_reports_are_stored() -> None:
    cluster = Cluster()
    cluster.work(2)
    caller = cluster.workers[0]
    assert caller.call(cluster.now_s).stored == 0
    cluster.store()
    stored = caller.sequence
    assert caller.call(cluster.now_s).stored == stored
    assert caller.call(cluster.now_s).stored == stored, "the call after it is not stored yet"
