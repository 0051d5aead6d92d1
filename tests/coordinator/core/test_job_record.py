"""A job's course in virtual time: how it begins and ends, whose calls it takes, and what it tells of itself."""

from __future__ import annotations

import pytest

from parashard.errors import JobFailed, WrongRun
from parashard_coordinator.core.calls import JobState
from parashard_coordinator.core.supervision import FAILED
from support.coordinator_cases import DIGEST, RUN, Caller, core_of, done


def test_the_first_reason_of_a_failure_stays() -> None:
    core = core_of()
    core.job.fail("the disk is full")
    core.job.fail("and then the lights went out")
    assert (core.job.state, core.job.reason, core.job.over) == (JobState.FAILED, "the disk is full", True)
    assert core.job.exit_code == FAILED, "nothing is wrong with its model"
    with pytest.raises(JobFailed, match="the disk is full"):
        Caller(core)


def test_a_job_that_is_done_cannot_fail() -> None:
    core = core_of(steps_total=1)
    caller = Caller(core)
    caller.lease(1)
    caller.complete_all()
    assert core.job.complete
    core.job.mark_done()
    assert not core.job.complete, "the report is written once"
    core.job.fail("too late")
    assert (core.job.state, core.job.reason) == (JobState.DONE, "every step is in")
    answer = caller.call(want=3)
    assert (answer.granted, answer.state) == ([], JobState.DONE)


@pytest.mark.parametrize(
    ("run_id", "digest", "told"),
    [
        ("run-2", None, "this coordinator runs run-1, the call names run-2"),
        ("", None, r"the call names \(none\)"),
        (RUN, "e" * 64, "the call's job digest eeeeeeeeeeee is not this job's dddddddddddd"),
    ],
)
def test_a_call_for_another_run_or_job_is_refused(run_id: str, digest: str | None, told: str) -> None:  # P2
    core = core_of()
    core.job.check_run(RUN, DIGEST)
    core.job.check_run(RUN)
    with pytest.raises(WrongRun, match=told):
        core.job.check_run(run_id, digest)


def test_a_job_that_its_user_stops_has_not_failed() -> None:
    core = core_of()
    core.job.stop("interrupted")
    assert (core.job.over, core.job.state_name, core.job.events[-1]) == (True, "stopped", "stopped: interrupted")
    failed = core_of()
    failed.job.fail("the disk is full")
    failed.job.stop("interrupted")
    assert (failed.job.state_name, failed.job.reason) == ("failed", "the disk is full")


def test_a_problem_is_reported_once_and_when_it_is_over() -> None:
    core = core_of()
    before = core.job.events_total
    for left in (40, 20):
        core.job.warn("disk", f"checkpoint failed: no space left on device ({left} bytes)")
    assert core.job.problems.texts == ["checkpoint failed: no space left on device (20 bytes)"], "as it is now"
    core.job.resolve("disk")
    core.job.resolve("disk")
    assert list(core.job.events)[before - core.job.events_total :] == [
        "warning: checkpoint failed: no space left on device (40 bytes)",
        "resolved: checkpoint failed: no space left on device (20 bytes)",
    ]
    assert core.job.problems.texts == []


def test_a_job_without_workers_has_a_problem_until_one_is_heard() -> None:
    core = core_of(lease_ttl_s=10.0)
    caller = Caller(core)
    core.tick(11.0)
    assert core.job.problems.texts == ["no worker is up; training is paused until one joins"]
    caller.call(12.0)
    assert core.job.problems.texts == []


def test_events_are_bounded_and_counted() -> None:
    core = core_of()
    for _ in range(100):
        Caller(core, "worker-0")
    assert len(core.job.events) == 50
    assert core.job.events_total == 103


def test_a_job_without_shards_runs_at_once() -> None:
    core = core_of(shards=0, steps_total=1)
    caller = Caller(core)
    caller.lease(1)
    caller.call(completed=done(0, incarnations=()))
    assert core.job.complete
