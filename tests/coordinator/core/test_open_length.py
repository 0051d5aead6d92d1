"""A job of open length: only what is scheduled is leased, and the job ends once the schedule is closed (P8)."""

from __future__ import annotations

import pytest

from parashard_coordinator.core.calls import JobState, LeaseCall
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.policies import Async, LeasingPolicy, Ssp
from support.coordinator_cases import announce, core_of, done


class Opened:
    """A core of a job of open length, and one worker."""

    def __init__(self, policy: LeasingPolicy | None = None, core: Core | None = None) -> None:
        self.core = core or core_of(policy or Async(), open=True, steps_total=1 << 32)
        self.worker = self.core.register_worker("worker-0", "", "cpu", "", 0.0, 1)
        self.sequence = 0

    def ask(self, *complete: int, want: int = 100, steps_only: bool = False) -> list[int]:
        self.sequence += 1
        call = LeaseCall(
            "worker-0",
            self.worker.incarnation,
            self.sequence,
            completed=done(*complete),
            want=want,
            steps_only=steps_only,
        )
        return [grant.step for grant in self.core.lease(call, 0.0).granted]


def all_granted(it: Opened) -> list[int]:
    granted: list[int] = []
    while step := it.ask(*granted):
        granted += step
    return granted


@pytest.mark.parametrize("policy", [Async(), Ssp(3)])
def test_only_what_is_scheduled_is_leased(policy: LeasingPolicy) -> None:
    it = Opened(policy)
    assert it.ask() == []
    assert it.core.job.why_no_step == "nothing is scheduled"
    it.core.job.open_steps(5, closed=False)
    assert all_granted(it) == [0, 1, 2, 3, 4]
    it.core.job.open_steps(3, closed=False)  # said again, late
    assert (it.ask(0, 1, 2, 3, 4), it.core.job.steps_due) == ([], 5)
    assert (it.core.job.complete, it.core.job.state) == (False, JobState.RUNNING), "more may be scheduled"
    it.core.job.open_steps(6, closed=False)
    assert it.ask() == [5]


def test_a_closed_schedule_ends_the_job_with_its_last_step() -> None:  # P7
    it = Opened()
    it.core.job.open_steps(3, closed=True)
    assert (it.core.job.state, it.core.job.early_stop) == (JobState.DRAINING, "the schedule is closed")
    decisions = it.core.job.decisions
    it.core.job.open_steps(3, closed=True)
    assert it.core.job.decisions == decisions, "decided once"
    assert all_granted(it) == [0, 1, 2]
    assert it.core.job.complete
    due = it.core.job.due_checkpoint()
    assert due is not None
    assert (due.final, due.steps) == (True, 3)


def test_what_a_shard_lost_is_leased_again_though_it_was_complete() -> None:
    it = Opened()
    it.core.job.open_steps(4, closed=False)
    assert all_granted(it) == [0, 1, 2, 3]
    announce(it.core, 1, 2, [(0, 1), (3, 4)])
    assert list(it.core.job.leases.complete.intervals()) == [(0, 1), (3, 4)]
    assert it.ask() == [1]


def test_a_later_coordinator_leases_nothing_until_it_is_told_again() -> None:
    first = Opened()
    first.core.job.open_steps(4, closed=True)
    saved = first.core.job.saved()
    second = core_of(Async(), open=True, steps_total=1 << 32, registered=False, incarnation=2)
    second.job.resume(saved)
    announce(second, 0)
    announce(second, 1)
    it = Opened(core=second)
    assert (it.ask(), second.job.state) == ([], JobState.DRAINING)
    second.job.open_steps(4, closed=True)
    assert all_granted(it) == [0, 1, 2, 3]
    assert second.job.complete


def test_a_job_of_a_known_length_is_not_scheduled() -> None:
    core = core_of(Async())
    core.job.open_steps(3, closed=True)
    assert (core.job.scheduled, core.job.state, core.job.steps_due) == (None, JobState.RUNNING, 40)


def test_a_worker_without_a_model_gets_steps_and_no_evaluation() -> None:
    it = Opened(core=core_of(Async(), evaluate_after=[2], steps_total=10))
    assert it.ask(want=2) == [0, 1]
    assert it.ask(0, 1, want=2, steps_only=True) == [2, 3]
    assert it.ask(want=2) == [], "to others it goes first"
