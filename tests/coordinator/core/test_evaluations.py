"""Evaluations: when they are due, who does them, and what they hold back."""

from __future__ import annotations

import pytest

from parashard_coordinator.core.evaluations import ATTEMPTS_MAX, RESULTS_KEPT, Evaluations, evaluation_steps
from parashard_coordinator.core.policies import Async, LeasingPolicy, Sync
from parashard_coordinator.core.saved import Saved

FREE = 1 << 62
INCARNATIONS = (1, 1)


def evaluations_of(*after: int, policy: LeasingPolicy | None = None, total: int = 100) -> Evaluations:
    return Evaluations(list(after), policy or Async(), total)


def granted(evaluations: Evaluations, worker: str = "a", lowest: int = 100) -> list[int]:
    return [evaluation.after_step for evaluation in evaluations.grant(worker, lowest, INCARNATIONS)]


@pytest.mark.parametrize(
    ("total", "per_epoch", "every", "expected"),
    [
        (30, 10, 1.0, [10, 20, 30]),
        (30, 10, 0.0, [30]),
        (30, 10, 0.5, [5, 10, 15, 20, 25, 30]),
        (30, 10, 2.0, [20, 30]),
        (30, 10, 100.0, [30]),
        (7, 7, 0.25, [2, 4, 5, 7]),
        (3, 1, 0.001, [1, 2, 3]),  # at most one for each step
        (3, 1, 1e-12, [1, 2, 3]),
    ],
)
def test_the_schedule(total: int, per_epoch: int, every: float, expected: list[int]) -> None:
    assert evaluation_steps(total, per_epoch, every) == expected


def test_one_is_granted_when_its_steps_are_complete() -> None:
    evaluations = evaluations_of(10, 20)
    assert granted(evaluations, lowest=9) == []
    assert granted(evaluations, "a", lowest=10) == [10]
    assert granted(evaluations, "b", lowest=10) == [], "it is leased to another worker"
    assert granted(evaluations, "b", lowest=20) == [20]
    assert not evaluations.finished


def test_the_latest_result_is_the_one_after_the_most_steps() -> None:
    evaluations = evaluations_of(10, 20)
    granted(evaluations, "slow")
    granted(evaluations, "fast")
    evaluations.finish(20, {"accuracy": 0.9})
    assert evaluations.finish(10, {"accuracy": 0.5})
    assert evaluations.results() == {10: {"accuracy": 0.5}, 20: {"accuracy": 0.9}}
    assert evaluations.latest is not None
    assert evaluations.latest.metrics == {"accuracy": 0.9}
    assert evaluations.finished


def test_only_the_first_result_counts() -> None:
    evaluations = evaluations_of(10)
    assert evaluations.finish(10, {"loss": 1.0})
    assert not evaluations.finish(10, {"loss": 2.0})
    assert not evaluations.finish(7, {"loss": 2.0})
    assert evaluations.latest is not None
    assert evaluations.latest.metrics == {"loss": 1.0}


def test_one_that_its_holder_does_not_list_is_free() -> None:
    evaluations = evaluations_of(10, 20)
    assert granted(evaluations, "a") + granted(evaluations, "a") == [10, 20]
    evaluations.renew("b", [])
    assert granted(evaluations, "b") == []
    evaluations.renew("a", [20])
    assert granted(evaluations, "b") == [10]
    evaluations.renew("a", [])
    assert granted(evaluations, "b") == [20]


def test_a_failed_one_is_tried_again_so_many_times() -> None:
    evaluations = evaluations_of(10)
    for _ in range(ATTEMPTS_MAX - 1):
        assert granted(evaluations) == [10]
        assert evaluations.fail(10, "no memory") is None
    assert granted(evaluations) == [10]
    assert evaluations.fail(10, "no memory") == f"no memory; the evaluation after step 10 failed {ATTEMPTS_MAX} times"


def test_a_failure_after_the_result_does_not_count() -> None:
    evaluations = evaluations_of(10)
    evaluations.finish(10, {})
    assert evaluations.fail(10, "late") is None
    assert evaluations.finished


def test_without_rounds_nothing_is_held_back() -> None:
    assert evaluations_of(10).lease_limit() == FREE


def test_in_rounds_it_names_the_round_whose_starting_weights_it_judges() -> None:  # P11
    evaluations = evaluations_of(10, 20, policy=Sync(8), total=20)
    due = evaluations.grant("a", 16, INCARNATIONS)
    assert [(e.after_step, e.round) for e in due] == [(16, 2)]
    assert [(e.after_step, e.round) for e in evaluations.grant("b", 20, INCARNATIONS)] == [(20, 3)]


def test_in_rounds_no_step_past_it_is_leased_until_its_result_is_in() -> None:  # P7
    evaluations = evaluations_of(10, 20, policy=Sync(8), total=20)
    assert evaluations.lease_limit() == 16
    granted(evaluations)
    assert evaluations.lease_limit() == 16
    evaluations.finish(16, {})
    assert evaluations.lease_limit() == 20
    evaluations.finish(20, {})
    assert evaluations.lease_limit() == FREE


def test_two_that_fall_on_one_boundary_are_one() -> None:
    evaluations = evaluations_of(9, 10, 15, policy=Sync(8), total=20)
    evaluations.finish(16, {})
    assert evaluations.finished


def test_an_early_stop_drops_what_lies_beyond_and_judges_the_end() -> None:  # P8
    evaluations = evaluations_of(10, 20, 30)
    evaluations.finish(10, {"accuracy": 0.9})
    evaluations.stop_at(13)
    assert granted(evaluations, lowest=12) == []
    assert granted(evaluations, lowest=13) == [13]
    assert not evaluations.finish(20, {"accuracy": 0.1})
    assert not evaluations.finished
    evaluations.finish(13, {"accuracy": 0.95})
    assert evaluations.finished


def test_an_early_stop_where_the_weights_are_judged_already_adds_nothing() -> None:
    evaluations = evaluations_of(8, 16, 20, policy=Sync(8), total=20)
    evaluations.finish(8, {})
    evaluations.stop_at(8)
    assert evaluations.finished
    assert evaluations.lease_limit() == FREE


def test_an_early_stop_keeps_one_that_is_due_there_already() -> None:
    evaluations = evaluations_of(10, 20, 30)
    evaluations.finish(10, {})
    assert granted(evaluations, "a", 20) == [20]
    evaluations.stop_at(20)
    assert granted(evaluations, "b") == [], "a is at it"
    evaluations.finish(20, {})
    assert evaluations.finished


def test_a_job_without_evaluations_is_finished() -> None:
    assert evaluations_of().finished
    assert evaluations_of().latest is None


@pytest.mark.parametrize("policy", [Async(), Sync(4)], ids=["async", "sync:4"])
def test_what_was_judged_after_lost_steps_is_judged_again(policy: LeasingPolicy) -> None:  # P25
    evaluations = evaluations_of(4, 8, policy=policy)
    for after_step in (4, 8):
        evaluations.finish(after_step, {"accuracy": 0.9})
    [again] = evaluations.shard_returned(5)
    assert (again.after_step, evaluations.finished, evaluations.results().keys()) == (8, False, {4})
    assert granted(evaluations, lowest=8) == [8]
    evaluations.finish(8, {"accuracy": 0.8})
    assert evaluations.latest is not None
    assert evaluations.latest.metrics == {"accuracy": 0.8}


def test_an_evaluation_in_progress_when_a_shard_restarts_can_be_leased_again() -> None:  # P25: its result will be void
    evaluations = evaluations_of(4, 8)
    [first] = evaluations.grant("a", 4, (1, 1))
    assert evaluations.shard_returned(4) == []
    [again] = evaluations.grant("b", 4, (1, 2))
    assert (first.after_step, again.after_step, again.incarnations) == (4, 4, (1, 2))
    evaluations.renew("a", [])
    assert granted(evaluations, "c", 4) == [], "b is at it"


def test_a_result_of_an_earlier_coordinator_is_taken_for_the_same_steps_only() -> None:
    evaluations = evaluations_of(4, 8)
    evaluations.restore_result(8, {"loss": 1.0})
    evaluations.restore_result(6, {"loss": 2.0})
    assert evaluations.results() == {8: {"loss": 1.0}}


def test_results_that_are_lost_or_known_from_before_are_not_reported() -> None:
    evaluations = evaluations_of(10, 20, 30)
    evaluations.restore_result(10, {"loss": 1.0})
    evaluations.finish(20, {"loss": 2.0})
    assert [e.after_step for e in evaluations.unreported()] == [20]
    evaluations.finish(30, {"loss": 3.0})
    evaluations.shard_returned(15)
    assert evaluations.unreported() == [], "30 is judged again, and 20 is to come first"


# --- how much is kept ---

MANY = 5 * RESULTS_KEPT


def judged_all(evaluations: Evaluations, first: int = 1, last: int = MANY) -> Evaluations:
    """Return them with a result after each tenth step, from ten times `first` to ten times `last`."""
    for number in range(first, last + 1):
        assert evaluations.finish(10 * number, {"loss": float(number)})
        evaluations.unreported()
    return evaluations


def many(policy: LeasingPolicy | None = None) -> Evaluations:
    return evaluations_of(*range(10, 10 * MANY + 1, 10), policy=policy, total=10 * MANY)


@pytest.mark.parametrize("policy", [Async(), Sync(10)], ids=["async", "sync:10"])
def test_the_metrics_of_the_newest_results_are_kept(policy: LeasingPolicy) -> None:
    evaluations = judged_all(many(policy))
    newest = range(10 * (MANY - RESULTS_KEPT + 1), 10 * MANY + 1, 10)
    assert list(evaluations.results()) == list(newest)
    assert evaluations.saved()["evaluated"] == ((0, newest[0] - 9),), "one range, however many there were"
    assert evaluations.finished
    assert not evaluations.finish(10, {"loss": 0.0}), "its result is in"


def test_results_that_wait_for_an_earlier_one_are_told_and_forgotten_in_the_end() -> None:
    evaluations = many()
    told: list[int] = []
    for number in range(2, MANY + 1):
        evaluations.finish(10 * number, {"loss": float(number)})
        told += [one.after_step for one in evaluations.unreported()]
        assert len(evaluations.results()) <= 2 * RESULTS_KEPT + 1
    assert told == list(range(20, 10 * len(told) + 11, 10)), "each once, in order"
    assert len(told) >= MANY - RESULTS_KEPT - 1
    assert granted(evaluations, lowest=10) == [10]
    assert evaluations.finish(10, {"loss": 0.0})
    assert evaluations.unreported()[0].after_step == 10
    assert evaluations.finished


def test_results_behind_an_open_one_wait_however_many_are_told_before_it() -> None:
    evaluations, ready = many(), RESULTS_KEPT * 3 // 5
    for number in (*range(1, ready + 1), *range(ready + 2, 2 * ready + 2)):
        evaluations.finish(10 * number, {"loss": float(number)})
    assert [one.after_step for one in evaluations.unreported()] == list(range(10, 10 * ready + 1, 10))


def test_forgotten_results_that_a_shard_lost_are_judged_again() -> None:  # P25
    evaluations = judged_all(many())
    again = evaluations.shard_returned(25)
    assert [e.after_step for e in again] == list(range(30, 10 * MANY + 1, 10))
    assert (evaluations.results(), evaluations.latest, evaluations.finished) == ({}, None, False)
    assert granted(evaluations, lowest=30) == [30]
    judged_all(evaluations, first=3)
    assert evaluations.finished
    assert len(evaluations.results()) == RESULTS_KEPT


def test_forgotten_results_are_not_judged_anew_by_a_later_coordinator() -> None:  # P7
    earlier = many()
    judged_all(earlier, last=MANY - 1)
    evaluations = many()
    evaluations.resume(Saved(target=10 * MANY, **earlier.saved()))
    assert granted(evaluations, "a", 10 * MANY) + granted(evaluations, "b", 10 * MANY) == [10 * MANY]
    assert evaluations.saved() == earlier.saved()


def test_an_evaluation_without_a_result_is_in_no_forgotten_range() -> None:
    earlier = judged_all(many(), first=2)
    assert len(earlier.results()) <= 2 * RESULTS_KEPT
    evaluations = many()
    evaluations.resume(Saved(target=10 * MANY, evaluated=earlier.saved()["evaluated"]))
    assert granted(evaluations, lowest=10) == [10]


def test_an_early_stop_judges_weights_between_forgotten_results() -> None:  # P8
    evaluations = judged_all(many())
    evaluations.shard_returned(40)
    evaluations.stop_at(35)
    assert granted(evaluations, lowest=35) == [35]
    evaluations.finish(35, {})
    assert evaluations.finished
