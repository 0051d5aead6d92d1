"""An `auto` job is steered by what its workers report: who gets parts, the lag, and what of it is stored."""

from __future__ import annotations

from collections.abc import Mapping

from parashard_coordinator.core.auto_jobs import figures, in_words
from parashard_coordinator.core.controller import FIRST_POINT, MEASURED, PAUSE_S, SETTLED, Drift
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.job_record import EVENTS_KEPT
from parashard_coordinator.core.learning import RISES
from parashard_coordinator.core.policies import Auto
from support.coordinator_cases import Caller, announce_all, core_after, core_of, done

WAITS = {"lease": 1.0, "pull": 0.0, "compute": 1.0, "push": 0.0, "transfer": 0.0}
TRANSFERS = {"lease": 0.0, "pull": 1.0, "compute": 1.0, "push": 0.0, "transfer": 1.0}


def spent(per_batch: Mapping[str, float], batch: int) -> dict[str, float]:
    return {phase: seconds * batch for phase, seconds in per_batch.items()}


def trained(core: Core, batches: int, per_batch: Mapping[str, float] = TRANSFERS, drift: float = 0.01) -> list[Caller]:
    """Have two workers train so many batches of two parts, a second each, and measure this drift where it is asked."""
    callers, held = [Caller(core), Caller(core)], {}
    for batch in range(batches):
        for place, caller in enumerate(callers):
            before = held.pop(place, None)
            reported = [] if before is None else [Drift(g.step, drift, 1) for g in before if g.probe]
            finished = [] if before is None else done(*[g.step for g in before])
            answer = caller.call(
                want=1, completed=finished, drifts=reported, phases_s=spent(per_batch, batch), now_s=float(batch)
            )
            held[place] = list(answer.granted)
        if not held[0]:  # the batch was complete only with the second one's report
            held[0] = list(callers[0].call(want=1, now_s=float(batch)).granted)
    return callers


def test_a_worker_holds_at_most_its_share_of_a_batch() -> None:
    core = core_of(Auto(4))
    one, two, three = Caller(core), Caller(core), Caller(core)
    assert one.lease(8) == [0]  # 4 parts for 3 workers: one each, and the first that is done has the last one
    assert one.call(want=8, held=[0]).reason == "it has its share of the batch"
    assert (two.lease(8), three.lease(8)) == ([1], [2])
    assert two.complete_all(want=8) == [3]
    alone = Caller(core_of(Auto(4)))
    assert alone.lease(8) == [0, 1, 2, 3]


def test_a_slow_worker_is_left_out_while_another_one_is_there() -> None:
    core = core_of(Auto(3), workers=3, steps_total=600)
    quick, other, slow = callers = [Caller(core, f"worker-{i}") for i in range(3)]
    now_s = 0.0
    for _ in range(MEASURED):
        for caller in callers:
            assert len(caller.lease(8, now_s=now_s)) == 1
        for caller in (quick, other):
            caller.call(completed=done(*caller.held), now_s=now_s + 0.1)
        slow.call(completed=done(*slow.held), now_s=now_s + 1.0)
        now_s += 1.0
    assert "worker-2 gets no parts for 30 s: a part takes it 1 s, the others 0.1 s" in core.job.events
    assert slow.lease(8, now_s=now_s) == []
    assert "worker-2 gets no parts" in in_words(core.job, now_s)
    assert len(quick.lease(8, now_s=now_s)) == 1
    assert len(other.lease(8, now_s=now_s)) == 1
    quick.call(leaving=True, now_s=now_s)
    other.call(leaving=True, now_s=now_s)
    assert len(slow.lease(8, now_s=now_s)) == 3  # there is no other
    assert "gets no parts" not in in_words(core.job, now_s)


def test_who_waits_for_a_slow_worker_with_a_part_leased_ahead_does_not_look_slow() -> None:
    core = core_of(Auto(2), steps_total=600)
    quick, slow = Caller(core, "worker-0"), Caller(core, "worker-1")
    assert core.job.controller is not None
    core.job.controller.ahead = 1
    for batch in range(MEASURED + 1):
        now_s = 0.4 * batch
        for caller, waited_s in (quick, 0.3), (slow, 0.0):
            caller.call(completed=done(*caller.held[:1]), phases_s={"lease": waited_s * batch}, now_s=now_s)
            caller.lease(2, now_s=now_s)
            assert len(caller.held) == 2 or batch == MEASURED, "a part of this batch, and of the next one"
    assert "worker-1 gets no parts for 30 s: a part takes it 0.4 s, the others 0.1 s" in core.job.events


def test_a_slow_worker_is_tried_again_whatever_it_reports_meanwhile() -> None:
    core = core_of(Auto(2), steps_total=600)
    quick, slow = Caller(core, "worker-0"), Caller(core, "worker-1")
    assert (quick.lease(1), slow.lease(1)) == ([0], [1])
    assert core.job.controller is not None
    core.job.controller.judge_worker(slow.name, [9.0] * MEASURED, 0.1, 0.0)
    quick.call(completed=done(0), now_s=0.1)
    assert slow.lease(1, now_s=9.0, completed=done(1)) == []
    assert quick.lease(1, now_s=9.0) == [2]
    assert slow.lease(1, now_s=PAUSE_S + 1) == [3]


def test_a_slow_worker_still_evaluates() -> None:
    core = core_of(Auto(1), evaluate_after=[0], steps_total=9)
    _, slow = Caller(core, "worker-0"), Caller(core, "worker-1")
    assert core.job.controller is not None
    core.job.controller.judge_worker(slow.worker.name, [9.0] * MEASURED, 0.1, 0.0)
    assert [found.after_step for found in slow.call(want=1).evaluations] == [0]


def test_the_lag_rises_where_workers_wait_and_updates_change_little() -> None:
    core = core_of(Auto(2), steps_total=4000)
    trained(core, 2 * FIRST_POINT + SETTLED + 3)
    assert core.job.policy.limit(144) == 148  # the lowest incomplete batch, and one more
    (change,) = figures(core.job)["lags"]
    assert (change["lag"], change["first_batch"]) == (1, 2 * FIRST_POINT + SETTLED)
    assert {found["batch"] for found in figures(core.job)["drifts"]} == {32, 34, 36, 64, 66, 68}
    assert core.job.events[-1] == f"from batch 72 on the lag is 1: {change['reason']}"
    assert in_words(core.job, 50.0) == f"lag 1 ({change['reason']})"


def test_a_worker_holds_another_part_only_with_a_lag_and_long_transfers() -> None:
    core = core_of(Auto(2), steps_total=4000)
    caller, _ = trained(core, 2 * FIRST_POINT + SETTLED + 3)
    assert caller.call().depth == 1
    waiting = core_of(Auto(2), steps_total=4000)
    caller, _ = trained(waiting, 2 * FIRST_POINT + SETTLED + 3, WAITS)
    assert caller.call().depth == 0
    assert Caller(core_of()).call().depth is None, "other policies hold what the job says"


def test_every_change_of_the_lag_is_a_decision_that_a_new_coordinator_has() -> None:
    core = core_of(Auto(2), steps_total=4000)
    decisions = core.job.decisions
    trained(core, 2 * FIRST_POINT + SETTLED + 3)
    assert core.job.decisions == decisions + 2  # with the first worker's arithmetic
    policy = Auto(2)
    later = core_after(core, policy, steps_total=4000)
    announce_all(later, [(0, 80)], [(0, 80)], incarnation=1)
    assert policy.lag == 1
    assert figures(later.job) == figures(core.job)
    later.job.warn(RISES, "the loss rises")
    Caller(later).call(now_s=60.0)
    assert policy.lag == 0
    assert figures(later.job)["lags"][-1]["reason"] == "the training loss does not fall"


def test_of_a_run_that_returns_to_a_checkpoint_later_changes_are_gone() -> None:
    core = core_of(Auto(2), steps_total=4000)
    trained(core, 2 * FIRST_POINT + SETTLED + 3)
    saved = core.job.saved()
    assert [lag[:2] for lag in saved.returned_to(200).lags] == [(144, 1)]
    assert saved.returned_to(66) == saved.returned_to(66).replaced(lags=())
    assert [drift[0] // 2 for drift in saved.returned_to(66).drifts] == [32]


def test_other_policies_report_no_lag() -> None:
    core = core_of()
    assert (figures(core.job), in_words(core.job, 0.0), core.job.controller) == ({}, "", None)
    assert len(core.job.events) < EVENTS_KEPT


def test_where_batches_are_quick_a_worker_holds_its_share_of_the_next_ones() -> None:
    core = core_of(Auto(2), steps_total=4000)
    one, two = Caller(core), Caller(core)
    for batch in range(20):
        for caller in (one, two):
            if not caller.held:
                caller.lease(1, now_s=0.012 * batch)
            caller.call(completed=done(caller.held[0]), now_s=0.012 * batch)
    assert core.job.controller is not None
    assert core.job.controller.ahead == 5
    answer = one.call(want=9, now_s=0.2)
    assert [grant.step for grant in answer.granted] == [40, 42, 44, 46, 48, 50]
    assert [grant.least_version for grant in answer.granted] == [20, 21, 22, 23, 24, 25]
    assert (answer.ahead, answer.depth) == (2, 0)
    assert two.lease(9, now_s=0.2) == [41, 43, 45, 47, 49, 51]
