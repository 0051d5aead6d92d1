"""A step or an evaluation that takes far too long is told of while it does, and is taken back when it is over."""

from __future__ import annotations

import pytest

from parashard_coordinator.core import evaluations, leases
from parashard_coordinator.core.core import SLOW, Core
from parashard_coordinator.core.failures import PROBLEMS_MAX
from support.coordinator_cases import Caller, core_of, done, judged


def told(core: Core) -> list[str]:
    return [event for event in core.job.events if event.startswith(("warning: ", "resolved: "))]


def kept_alive(core: Core, *callers: Caller, until_s: float, since_s: float = 0.0) -> None:
    """Let workers renew what they hold, and the clock tick, once a second."""
    for now_s in range(int(since_s), int(until_s) + 1):
        for caller in callers:
            caller.call(float(now_s))
        core.tick(float(now_s))


def test_a_step_that_hangs_is_reported_until_it_is_over() -> None:
    core = core_of(speculate_after=0.0)
    hung, other = Caller(core), Caller(core)
    assert hung.lease(1) == [0]
    kept_alive(core, hung, other, until_s=leases.SLOW_S)
    assert core.job.problems.texts == []
    kept_alive(core, hung, other, since_s=31, until_s=40)
    assert core.job.problems.texts == ["guest-0 has been at step 0 for 40 s"]
    hung.call(41.0, completed=done(0))
    core.tick(41.0)
    assert core.job.problems.texts == []
    assert told(core) == [
        "warning: guest-0 has been at step 0 for 31 s",
        "resolved: guest-0 has been at step 0 for 40 s",
    ]


def test_where_every_step_takes_long_none_is_reported() -> None:
    core = core_of(lease_ttl_s=1000.0)
    caller, now_s = Caller(core), 0.0
    for _ in range(3):
        caller.lease(1, now_s)
        now_s += 20.0
        caller.call(now_s, completed=done(*caller.held))
    caller.lease(1, now_s)
    core.tick(now_s + 4 * 20.0)
    assert told(core) == []
    core.tick(now_s + 4 * 20.0 + 1.0)
    assert told(core) == ["warning: guest-0 has been at step 3 for 81 s"]


def test_an_evaluation_that_hangs_is_reported_likewise() -> None:
    core = core_of(evaluate_after=[1])
    judge, other = Caller(core), Caller(core)
    judge.lease(1)
    judge.call(completed=done(0), want=1)
    assert judge.evaluating == [1]
    kept_alive(core, judge, other, until_s=evaluations.SLOW_S)
    assert core.job.problems.texts == []
    kept_alive(core, judge, other, since_s=61, until_s=70)
    assert core.job.problems.texts == ["guest-0 has been at the evaluation after step 1 for 70 s"]
    judge.call(71.0, evaluated=judged(1, loss=0.5))
    core.tick(71.0)
    assert core.job.problems.texts == []


@pytest.mark.parametrize("others", [0, PROBLEMS_MAX])
def test_it_is_told_once_however_many_problems_there_are(others: int) -> None:
    core = core_of()
    for i in range(others):
        core.job.problems.begin(f"other {i}", "another problem")
    caller = Caller(core)
    caller.lease(1)
    kept_alive(core, caller, until_s=50)
    assert (len(told(core)), SLOW in core.job.problems) == (1, not others)
