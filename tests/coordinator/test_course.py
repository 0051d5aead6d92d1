"""A job's course in virtual time: how it begins and ends, whose calls it takes, and what it tells of itself."""

from __future__ import annotations

import pytest
from coordinator_cases import DIGEST, RUN, Caller, core_of, done

from coordinator.calls import JobState
from parashard.errors import JobFailed, WrongRun


def test_the_first_reason_of_a_failure_stays() -> None:
    core = core_of()
    core.fail("the disk is full")
    core.fail("and then the lights went out")
    assert (core.state, core.reason, core.over) == (JobState.FAILED, "the disk is full", True)
    with pytest.raises(JobFailed, match="the disk is full"):
        Caller(core)


def test_a_job_that_is_done_cannot_fail() -> None:
    core = core_of(steps_total=1)
    caller = Caller(core)
    caller.lease(1)
    caller.complete_all()
    assert core.complete
    core.done()
    assert not core.complete, "the report is written once"
    core.fail("too late")
    assert (core.state, core.reason) == (JobState.DONE, "every step is in")
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
    core.check_run(RUN, DIGEST)
    core.check_run(RUN)
    with pytest.raises(WrongRun, match=told):
        core.check_run(run_id, digest)


def test_events_are_bounded_and_counted() -> None:
    core = core_of()
    for _ in range(100):
        Caller(core, "worker-0")
    assert len(core.events) == 50
    assert core.events_total == 103


def test_a_job_without_shards_runs_at_once() -> None:
    core = core_of(shards=0, steps_total=1)
    caller = Caller(core)
    caller.lease(1)
    caller.call(completed=done(0, incarnations=()))
    assert core.complete
