"""A step whose computation kills its worker is counted as failed, named, and handled like any bad step (P26)."""

from __future__ import annotations

from typing import Any

import pytest

from parashard_coordinator.core.calls import JobState
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.supervision import Exit, LocalLauncher, ProcessName
from support.coordinator_cases import Caller, core_of, done


class Cluster:
    """A core and workers that die; every exit is told by the launcher."""

    def __init__(self, **options: Any) -> None:
        launcher = LocalLauncher(2, 1.0, budget=3)
        self.core = core_of(launcher=launcher, examples_of=lambda step: f" (examples {step}, 7)", **options)
        self.exits = 0
        self.now_s = 0.0

    def start(self, index: int = 0) -> Caller:
        self.now_s += 1.0
        return Caller(self.core, f"worker-{index}", self.now_s)

    def die(self, index: int = 0) -> None:
        self.exits += 1
        process = ProcessName("worker", index)
        self.core.supervise([Exit(process, -11, "killed by SIGSEGV", self.exits)], [], self.now_s)


def announce(caller: Caller, step: int) -> None:
    """Say that a step is computed from now on."""
    caller.call(computing=[step])


def test_a_step_that_was_held_at_a_death_is_to_be_announced_from_then_on() -> None:
    it = Cluster()
    first = it.start()
    assert [(g.step, g.announce) for g in first.call(want=2).granted] == [(0, False), (1, False)]
    it.die()
    grants = it.start().call(want=3).granted
    assert [(g.step, g.announce) for g in grants] == [(0, True), (1, True), (2, False)]


def test_steps_that_a_worker_gives_back_are_under_no_suspicion() -> None:
    it = Cluster()
    first = it.start()
    first.lease(2)
    first.held = []
    first.call(leaving=True)
    assert [g.announce for g in it.start().call(want=2).granted] == [False, False]


def test_a_step_that_kills_its_workers_stops_the_job_with_its_name_and_examples() -> None:
    it = Cluster(max_attempts=5)
    for _ in range(6):  # the first death does not say which of the steps it was
        assert it.core.job.state is JobState.RUNNING
        worker = it.start()
        if any(grant.announce for grant in worker.call(it.now_s, want=4).granted):
            announce(worker, 1)
        it.die()
    assert it.core.job.state is JobState.FAILED
    assert it.core.job.reason == (
        "computing step 1 ended worker-0: killed by SIGSEGV; step 1 failed 5 times (examples 1, 7)"
    )
    told = [event for event in it.core.job.events if event.startswith("computing step 1 ended")]
    assert told == [
        f"computing step 1 ended worker-0: killed by SIGSEGV (attempt {attempt} of 5) (examples 1, 7)"
        for attempt in range(1, 6)
    ]


def test_steps_that_were_only_held_do_not_count() -> None:
    it = Cluster(max_attempts=2, skip_bad_steps=True)
    for _ in range(9):
        worker = it.start()
        held = worker.lease(4, it.now_s)
        skipped = [step for step in held if step in it.core.job.leases.skips]
        worker.call(completed=done(*skipped, skipped=True))
        if 1 in worker.held:
            announce(worker, 1)
            it.die()
    assert (it.core.job.leases.skips, it.core.job.state) == ({1}, JobState.RUNNING)
    assert "warning: step 1 is skipped after 2 attempts (examples 1, 7): computing step 1 ended worker-0" in "".join(
        it.core.job.events
    )


def test_a_death_that_counts_as_an_attempt_does_not_use_up_the_budget_of_restarts() -> None:
    it = Cluster(max_attempts=100)
    for _ in range(50):
        worker = it.start()
        worker.lease(1, it.now_s)
        announce(worker, 0)
        it.die()
        assert it.core.job.state is JobState.RUNNING


def test_a_death_after_the_computation_counts_for_nothing() -> None:
    it = Cluster(max_attempts=1)
    it.start().lease(1, it.now_s)
    it.die()
    worker = it.start()
    worker.lease(1, it.now_s)
    announce(worker, 0)
    worker.call(want=1)  # the next call lists it no more
    it.die()
    assert it.core.job.state is JobState.RUNNING


def silence(core: Core) -> None:
    core.tick(1000.0)


def namesake(core: Core) -> None:
    Caller(core, "worker-0", 20.0)


@pytest.mark.parametrize("happens", [silence, namesake])
def test_without_exit_reports_silence_and_a_replacement_count_as_deaths(happens: Any) -> None:
    core = core_of(max_attempts=1)
    Caller(core, "worker-0").lease(1)
    happens(core)
    worker = Caller(core, "worker-0", 10.0)
    worker.lease(1, 10.0)
    worker.call(10.0, computing=[0])
    happens(core)
    assert core.job.state is JobState.FAILED
    assert core.job.reason.startswith("computing step 0 ended worker-0: ")


def test_one_death_is_seen_in_two_ways_and_counts_once() -> None:
    it = Cluster(max_attempts=2)
    it.start().lease(1)
    it.die()
    worker = it.start()
    worker.lease(1, it.now_s)
    announce(worker, 0)
    silence(it.core)
    it.die()
    assert it.core.job.state is JobState.RUNNING
