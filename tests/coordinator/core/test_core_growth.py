"""How the core's work grows with workers and shards, counted in instructions.

That of a call must not grow with the number of workers, and that of a look at all of them only in proportion.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.calls import Announcement
from parashard_coordinator.core.controller import MEASURED
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.policies import Async, Auto, LeasingPolicy, Ssp, Sync
from parashard_coordinator.endpoints.status import StatusView
from support.coordinator_cases import Caller, core_of, done, registration
from support.counted_work import instructions
from support.tiers import by_tier

FEW, MANY = 10, by_tier(quick=300, full=1000)
CONSTANT = 1.3  # times as much at 30 or 100 times as many workers: a list may be a little deeper
STEP_S = 1.0
POLICIES: dict[str, Callable[[int], LeasingPolicy]] = {
    "async": lambda _: Async(),
    "ssp": Ssp,
    "sync": Sync,
    "auto": Auto,
}


def crowd(policy: LeasingPolicy, workers: int, batches: int = MEASURED + 3) -> tuple[Core, list[Caller], float]:
    """Return a job in which all workers hold a step after some batches of a second each, and the time."""
    core = core_of(policy, steps_total=10**6, workers=workers)
    callers = [Caller(core, f"worker-{i}", token=i + 1) for i in range(workers)]
    now_s = 0.0
    for batch in range(batches):
        now_s = batch * STEP_S
        for caller in callers:
            caller.call(now_s, completed=done(*caller.held))
        for caller in callers:
            assert caller.lease(1, now_s)
    return core, callers, now_s + STEP_S


def per_call(policy: Callable[[int], LeasingPolicy], workers: int) -> float:
    """Return the mean work of calls that report a step and ask for another one."""
    _, callers, now_s = crowd(policy(workers), workers)
    some = callers[:FEW]
    return instructions(lambda: [caller.complete_all(1, now_s) for caller in some]) / len(some)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_lease_costs_the_same_however_many_workers_there_are(policy: Callable[[int], LeasingPolicy]) -> None:
    assert per_call(policy, MANY) <= CONSTANT * per_call(policy, FEW)


def per_idle_call(workers: int) -> float:
    """Return the work of a call that gets nothing, while every step straggles, and each has two holders but one."""
    core, callers, now_s = crowd(Async(), workers)
    core.job.leases.target = core.job.leases.leased_so_far()
    late_s = now_s + 60.0
    for caller in callers:
        caller.call(late_s - 1.0)
    idle = [Caller(core, f"idle-{i}", now_s=late_s) for i in range(workers)]
    for caller in idle[:-1]:
        assert caller.lease(1, late_s)
    assert idle[-1].lease(1, late_s)
    return instructions(lambda: idle[-1].call(late_s, want=1, held=[]))


def test_an_idle_call_costs_the_same_however_many_steps_straggle() -> None:
    assert per_idle_call(MANY) <= CONSTANT * per_idle_call(FEW)


def per_call_ahead(workers: int) -> float:
    """Return the work of a call in a job of quick batches, whose steps are leased several batches ahead."""
    core = core_of(Auto(workers), steps_total=10**6, workers=workers)
    callers = [Caller(core, f"worker-{i}") for i in range(workers)]
    assert core.job.controller is not None
    core.job.controller.ahead = 8
    for caller in callers[1:]:
        caller.lease(16)
    return instructions(lambda: callers[0].lease(64))


def test_leases_ahead_cost_the_same_however_many_parts_a_batch_has() -> None:
    assert per_call_ahead(MANY) <= CONSTANT * per_call_ahead(FEW)


def per_call_beside_failures(workers: int) -> float:
    """Return the work of a call while a step of each other worker waits for its next attempt."""
    core, callers, now_s = crowd(Async(), workers)
    core.job.leases._retry_pause_s = 60.0
    for caller in callers[1:]:
        caller.call(now_s, failed=[(caller.held[0], "no memory")])
    return instructions(lambda: callers[0].complete_all(1, now_s))


def test_steps_that_pause_after_a_failure_cost_other_calls_nothing() -> None:
    assert per_call_beside_failures(MANY) <= CONSTANT * per_call_beside_failures(FEW)


def per_member(workers: int) -> tuple[float, float, float]:
    """Return the work of joining as a guest, of joining again after a lost answer, and of leaving."""
    core = core_of(steps_total=10**6)
    guests = [Caller(core, token=i + 1) for i in range(workers)]
    last = guests[-1]
    return (
        instructions(lambda: Caller(core)),
        instructions(lambda: last.join(core, last.name)),
        instructions(lambda: last.call(leaving=True)),
    )


def test_joining_and_leaving_cost_the_same_however_many_workers_there_are() -> None:
    for few, many in zip(per_member(FEW), per_member(MANY), strict=True):
        assert many <= CONSTANT * few


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_looking_at_all_workers_costs_in_proportion(policy: Callable[[int], LeasingPolicy]) -> None:
    status = StatusView("load", "async")

    def work(workers: int) -> tuple[float, float, float]:
        core, _, now_s = crowd(policy(workers), workers)
        return (
            instructions(lambda: core.tick(now_s)),
            instructions(lambda: status.message(core.job, now_s)),
            instructions(core.job.saved),
        )

    for few, many in zip(work(FEW), work(MANY), strict=True):
        assert many <= CONSTANT * few * MANY / FEW


def test_naming_slow_workers_costs_in_proportion() -> None:
    def work(workers: int) -> float:
        core, callers, now_s = crowd(Auto(workers), workers)
        assert core.job.controller is not None
        for caller in callers[: workers // 2]:
            core.job.controller.judge_worker(caller.name, [9.0] * MEASURED, 0.1, now_s)
        return instructions(lambda: StatusView("load", "auto").message(core.job, now_s))

    assert work(MANY) <= CONSTANT * work(FEW) * MANY / FEW


@pytest.mark.parametrize("policy", [Async(), Sync(64)], ids=["async", "sync"])
def test_a_shard_s_report_costs_at_most_in_proportion_to_the_shards(policy: LeasingPolicy) -> None:
    def work(shards: int) -> float:
        core = core_of(policy, steps_total=10**6, shards=shards)
        caller = Caller(core)
        for _ in range(64):
            caller.lease(1)
        caller.complete_all()
        applied = IntervalSet([(0, 64)])
        said = [Announcement(registration(shard), applied, applied, IntervalSet()) for shard in range(shards)]
        for shard, one in enumerate(said):
            core.announced(shard, one, 1.0)
        return instructions(lambda: core.announced(0, said[0], 2.0))

    assert work(128) <= CONSTANT * work(8) * 128 / 8


def test_a_step_that_all_shards_have_costs_the_same_however_many_there_are() -> None:
    def work(shards: int) -> float:
        core = core_of(steps_total=10**6, shards=shards)
        caller = Caller(core)
        caller.lease(4)
        completed = done(*caller.held, incarnations=[1] * shards)
        return instructions(lambda: caller.call(1.0, completed=completed))

    assert work(128) <= CONSTANT * work(2)
