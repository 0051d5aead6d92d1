"""Leases pace, acks decide: what one step goes through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.leases import (
    SLOW_MEDIANS,
    SLOW_S,
    SPECULATION_MIN_S,
    Failed,
    Grant,
    StepLeases,
)
from parashard_coordinator.core.policies import Async, LeasingPolicy, Ssp, Sync

FREE = 1 << 62
HOLDERS_MAX = 2
ALL = (0, 1)


def leases_of(steps: int = 10, policy: LeasingPolicy | None = None, shards: int = 2, **options: float) -> StepLeases:
    return StepLeases(steps, shards, policy or Async(), **{"retry_pause_s": 0.0, **options})  # type: ignore[arg-type]


def grant(leases: StepLeases, worker: str, want: int = 1, now_s: float = 0.0, limit: int = FREE) -> list[int]:
    return [granted.step for granted in leases.grant(worker, want, 1, now_s, limit)]


def straggler(**options: float) -> StepLeases:
    """Return leases where step 0 took 1 s, and `slow` has held step 1, the last one, since second 1."""
    leases = leases_of(2, **options)
    grant(leases, "fast", now_s=0.0)
    grant(leases, "slow", now_s=1.0)
    leases.acknowledge("fast", 0, ALL, 1.0)
    return leases


def test_steps_are_granted_once_and_lowest_first() -> None:
    leases = leases_of(4)
    assert grant(leases, "a", 2) == [0, 1]
    assert grant(leases, "b") == [2]
    assert leases.held_by("a") == {0, 1}
    assert leases.leased == 3


def test_a_step_that_came_back_is_granted_before_new_ones() -> None:
    leases = leases_of()
    grant(leases, "a", 3)
    leases.renew("a", [0, 2], 1.0)
    assert grant(leases, "b", 2) == [1, 3]


def test_a_step_is_complete_when_every_shard_acknowledged_it() -> None:  # P5
    leases = leases_of()
    grant(leases, "a")
    assert not leases.acknowledge("a", 0, [0], 1.0)
    assert leases.lowest_incomplete == 0
    assert leases.leased == 0, "an ack ends the lease"
    grant(leases, "b")
    assert leases.acknowledge("b", 0, [1], 2.0), "the two shards may have heard of it from two workers"
    assert leases.lowest_incomplete == 1


def test_a_step_that_every_shard_has_committed_is_complete_though_its_acks_were_lost() -> None:  # P11
    leases = leases_of(12, Sync(4))
    grant(leases, "a", 4)
    for step in (0, 1, 3):
        leases.acknowledge("a", step, ALL, 1.0)
    leases.end("a")  # it died before it could report step 2
    assert grant(leases, "b") == [2]
    leases.complete_committed(4)
    assert (leases.lowest_incomplete, leases.leased, leases.held_by("b")) == (4, 0, set())
    assert leases.renew("b", [2], 2.0) == [2]
    assert grant(leases, "b") == [4], "the next round"


def test_steps_that_are_known_to_be_complete_are_committed_already() -> None:
    leases = leases_of(12, Sync(4))
    for step in range(5):
        leases.acknowledge("a", step, ALL, 1.0)
    leases.complete_committed(4)
    assert leases.lowest_incomplete == 5


def test_a_lease_of_a_later_round_is_void_once_a_shard_has_lost_steps() -> None:  # P10
    leases = leases_of(12, Sync(4))
    for step in grant(leases, "a", 4):
        leases.acknowledge("a", step, ALL, 1.0)
    assert grant(leases, "a", 2) == [4, 5]
    leases.shard_registered(0, IntervalSet([(0, 2)]))
    assert leases.renew("a", [4, 5], 2.0) == [4, 5]
    assert grant(leases, "a", 2) == [2, 3]
    assert leases.renew("a", [2, 3], 2.0) == []


@pytest.mark.parametrize("policy", [Async(), Ssp(3)])
def test_without_rounds_a_lease_is_kept_whatever_a_shard_has_lost(policy: LeasingPolicy) -> None:  # P9
    leases = leases_of(12, policy)
    for step in range(4):
        leases.acknowledge("a", step, ALL, 1.0)
    assert grant(leases, "a", 2) == [4, 5]
    leases.shard_registered(0, IntervalSet())
    assert leases.renew("a", [4, 5], 2.0) == []


def test_an_ack_counts_whatever_became_of_the_lease() -> None:  # P5
    leases = leases_of()
    grant(leases, "a")
    leases.end("a")
    grant(leases, "b")
    assert leases.acknowledge("a", 0, ALL, 9.0)
    assert leases.held_by("b") == set()
    assert not leases.acknowledge("b", 0, ALL, 9.5), "complete already"
    assert 0 not in grant(leases, "c", 10)


def test_an_ack_for_a_step_that_was_never_granted_completes_it() -> None:  # an earlier coordinator's lease
    leases = leases_of(7)
    assert leases.acknowledge("a", 3, ALL, 0.0)
    assert grant(leases, "a", 3) == [0, 1, 2]
    assert grant(leases, "b") == [4]


def test_an_ack_past_the_target_is_ignored() -> None:
    leases = leases_of(2)
    assert not leases.acknowledge("a", 2, ALL, 0.0)
    assert len(leases.complete) == 0


def test_without_shards_a_report_completes_a_step() -> None:
    leases = leases_of(1, shards=0)
    grant(leases, "a")
    assert leases.acknowledge("a", 0, [], 0.0)
    assert leases.finished


def test_what_is_not_listed_is_free_and_what_is_listed_stays() -> None:  # P5
    leases = leases_of()
    grant(leases, "a", 3)
    assert leases.renew("a", [1], 1.0) == []
    assert leases.held_by("a") == {1}
    assert grant(leases, "b", 2) == [0, 2]


def test_a_listed_step_that_is_complete_is_revoked() -> None:
    leases = leases_of()
    grant(leases, "a", 2)
    leases.acknowledge("b", 0, ALL, 1.0)
    assert leases.renew("a", [0, 1], 1.0) == [0]
    assert leases.held_by("a") == {1}


@pytest.mark.parametrize("policy", [Async(), Sync(4)])
def test_a_listed_step_past_an_early_stop_is_revoked(policy: LeasingPolicy) -> None:  # P8
    leases = leases_of(8, policy)
    assert grant(leases, "a", 4) == [0, 1, 2, 3]
    leases.stop_at(2)
    assert leases.renew("a", [1, 2, 3], 1.0) == [2, 3]
    assert leases.held_by("a") == {1}
    assert grant(leases, "b", 4) == [0]


def test_a_listed_step_that_was_freed_is_held_again() -> None:
    leases = leases_of(2)
    grant(leases, "zombie")
    leases.end("zombie")
    assert leases.renew("zombie", [0], 5.0) == []
    assert leases.held_by("zombie") == {0}
    assert grant(leases, "b", 2) == [1], "step 0 is being computed"


def test_a_listed_step_past_the_frontier_leaves_no_hole() -> None:
    leases = leases_of(4, Sync(4))
    leases.renew("a", [2], 0.0)
    assert grant(leases, "b", 4) == [0, 1, 3]


def test_a_listed_step_far_ahead_costs_no_memory_for_each_step_before_it() -> None:
    steps = 10**12
    leases = leases_of(steps)
    leases.renew("a", [steps - 1], 1.0)
    assert grant(leases, "b", 3) == [0, 1, 2]
    leases.shard_registered(0, IntervalSet([(0, 2)]))
    leases.shard_registered(1, IntervalSet([(0, steps // 2)]))
    assert grant(leases, "b", 2) == [3, 4]


names = st.sampled_from(["a", "b"])
numbers = st.integers(0, 9)
changes = st.one_of(
    st.tuples(st.just("grant"), names, numbers),
    st.tuples(st.just("renew"), names, st.lists(numbers, unique=True)),
    st.tuples(st.just("acknowledge"), names, numbers, st.lists(st.sampled_from(ALL), unique=True)),
    st.tuples(st.just("fail"), names, numbers),
    st.tuples(st.just("end"), names),
    st.tuples(st.just("register"), st.sampled_from(ALL), st.lists(numbers)),
)


@given(st.lists(changes, max_size=25))
def test_after_any_history_what_is_not_complete_is_granted_and_nothing_else(history) -> None:  # P5
    leases = leases_of(10, max_attempts=100, speculate_after=0)
    for what, *arguments in history:
        match what, *arguments:
            case "grant", worker, want:
                leases.grant(worker, want, 1, 0.0, FREE)
            case "renew", worker, held:
                leases.renew(worker, held, 0.0)
            case "acknowledge", worker, step, shards:
                leases.acknowledge(worker, step, shards, 0.0)
            case "fail", worker, step:
                leases.fail(worker, step, 0.0, skip=False)
            case "end", worker:
                leases.end(worker)
            case "register", shard, applied:
                leases.shard_registered(shard, IntervalSet((step, step + 1) for step in applied))
    held = leases.held_by("a") | leases.held_by("b")
    assert not any(step in leases.complete for step in held)
    due = [step for step in range(10) if step not in leases.complete and step not in held]
    granted: list[int] = []
    while more := grant(leases, "c", 10):
        granted += more
    assert granted == due


def test_the_end_of_a_worker_frees_all_it_held() -> None:
    leases = leases_of()
    grant(leases, "a", 3)
    assert leases.end("a") == [0, 1, 2]
    assert leases.end("a") == []
    assert leases.end("never heard of") == []
    assert grant(leases, "b", 3) == [0, 1, 2]


def test_the_caller_s_limit_is_kept() -> None:
    leases = leases_of(10, Sync(10))
    assert grant(leases, "a", 4, limit=2) == [0, 1]
    assert grant(leases, "a", 4, limit=2) == []
    leases.end("a")
    assert grant(leases, "a", 4, limit=1) == [0]


def test_steps_that_came_back_are_shared_whole_though_the_limit_has_moved_below_what_was_leased() -> None:
    leases = leases_of(10)
    assert grant(leases, "a", 4) == [0, 1, 2, 3]
    leases.end("a")
    assert grant(leases, "b", 4, limit=3) == [0, 1], "half of the four, as guided scheduling has it"


def test_ssp_waits_for_the_lowest_incomplete_step() -> None:  # P9
    leases = leases_of(20, Ssp(2))
    assert [grant(leases, f"w{i}", 8) for i in range(4)] == [[0], [1], [2], []]
    leases.acknowledge("w1", 1, ALL, 1.0)
    assert grant(leases, "w1", 8) == []
    leases.acknowledge("w0", 0, ALL, 1.0)
    assert grant(leases, "w1", 1) == [3]


def test_a_round_is_leased_when_the_one_before_is_complete() -> None:  # P10
    leases = leases_of(20, Sync(2))
    assert grant(leases, "a", 8) == [0, 1]
    leases.acknowledge("a", 1, ALL, 1.0)
    leases.acknowledge("a", 0, [0], 1.0)
    assert grant(leases, "b", 8) == [0], "a shard lacks step 0: no step of round 1 may be leased"
    leases.acknowledge("b", 0, [1], 1.0)
    assert grant(leases, "b", 8) == [2, 3]


def test_a_shard_that_lacks_a_step_makes_it_due_again() -> None:  # P3, P5
    leases = leases_of(4)
    grant(leases, "a", 4)
    grant(leases, "a", 4)
    for step in range(3):
        leases.acknowledge("a", step, ALL, 1.0)
    leases.shard_registered(1, IntervalSet([(0, 1)]))
    assert leases.lowest_incomplete == 1
    assert sorted(leases.complete.intervals()) == [(0, 1)]
    leases.end("a")
    assert grant(leases, "b") == [1]
    assert leases.acknowledge("b", 1, [1], 2.0), "the other shard's ack still counts"


def test_a_shard_that_has_more_completes_steps_and_their_leases() -> None:  # P3
    leases = leases_of(4)
    grant(leases, "a", 2)
    leases.acknowledge("a", 0, [0], 1.0)
    leases.acknowledge("a", 1, [0], 1.0)
    grant(leases, "b")
    leases.shard_registered(1, IntervalSet([(0, 2)]))
    assert leases.lowest_incomplete == 2
    assert leases.held_by("b") == set()
    assert grant(leases, "b") == [2]


def test_after_a_new_coordinator_only_what_a_shard_lacks_is_granted() -> None:
    leases = leases_of(6, Sync(6))
    leases.shard_registered(0, IntervalSet([(0, 4)]))
    leases.shard_registered(1, IntervalSet([(0, 2), (3, 4)]))
    assert grant(leases, "a", 8) == [2, 4, 5]


def test_speculation_waits_for_the_right_delay() -> None:
    leases = straggler(speculate_after=4.0)  # the median step took 1 s
    assert grant(leases, "fast", now_s=5.0) == []
    assert grant(leases, "fast", now_s=5.001) == [1]
    assert leases.speculative_leases == 1


def test_speculation_never_comes_before_its_minimum() -> None:
    leases = straggler(speculate_after=0.001)
    assert grant(leases, "fast", now_s=1.0 + SPECULATION_MIN_S) == []
    assert grant(leases, "fast", now_s=1.001 + SPECULATION_MIN_S) == [1]


def test_speculation_never_comes_before_its_minimum_behind_an_older_lease_either() -> None:
    leases = straggler(speculate_after=0.001)
    assert leases.grant("fast", 1, 1, 2.0, FREE) == [Grant(1)]
    leases.shard_registered(0, IntervalSet())
    assert grant(leases, "other", now_s=3.0) == [0]
    assert grant(leases, "fast", now_s=3.1) == [], "its own step 1 is old, step 0 is not"
    assert grant(leases, "fast", now_s=3.6) == [0]


@pytest.mark.parametrize("speculate_after", [0.0, 1000.0])
def test_without_speculation_a_straggler_is_waited_for(speculate_after: float) -> None:
    assert grant(straggler(speculate_after=speculate_after), "fast", now_s=900.0) == []


def test_speculation_needs_a_step_time_to_compare_with() -> None:
    leases = leases_of(1)
    grant(leases, "slow")
    assert grant(leases, "fast", now_s=900.0) == []


def test_a_straggler_does_not_get_its_own_step_again() -> None:
    leases = straggler()
    assert grant(leases, "slow", now_s=900.0) == []


def test_a_step_is_granted_to_so_many_at_once_and_no_more() -> None:
    leases = straggler()
    granted = [grant(leases, f"w{i}", now_s=900.0 + i) for i in range(3)]
    assert granted == [[1]] * (HOLDERS_MAX - 1) + [[]] * (4 - HOLDERS_MAX)


def test_speculation_takes_the_step_that_was_leased_first() -> None:
    leases = leases_of(3)
    grant(leases, "fast", now_s=0.0)
    leases.acknowledge("fast", 0, ALL, 1.0)
    grant(leases, "slow", now_s=1.0)
    grant(leases, "slower", now_s=2.0)
    leases.renew("slow", [], 3.0)
    assert grant(leases, "newest", now_s=3.0) == [1]
    assert grant(leases, "fast", now_s=900.0) == [2]
    assert grant(leases, "fast", now_s=900.0) == [1]


def test_one_of_two_holders_may_end_without_making_the_step_due() -> None:
    leases = straggler()
    grant(leases, "fast", now_s=900.0)
    leases.end("slow")
    assert leases.held_by("fast") == {1}
    assert grant(leases, "other", now_s=900.0) == []
    assert leases.acknowledge("fast", 1, ALL, 901.0)
    assert leases.finished


@pytest.mark.parametrize(("policy", "behind"), [(Ssp(1), 4), (Sync(2), 4)])
def test_speculation_stays_below_the_limit_after_a_shard_s_restart(policy: LeasingPolicy, behind: int) -> None:
    leases = leases_of(10, policy)  # P9, P10
    for step in range(behind):
        assert grant(leases, "a", now_s=step) == [step]
        leases.acknowledge("a", step, ALL, step + 1.0)
    assert grant(leases, "slow", now_s=10.0) == [behind]
    leases.shard_registered(0, IntervalSet())
    while granted := grant(leases, "b", now_s=900.0):
        assert max(granted) < policy.limit(0)


def test_a_step_is_given_up_after_so_many_failures() -> None:  # P6
    leases = leases_of(1, max_attempts=3)
    for attempt in (1, 2):
        assert grant(leases, "a") == [0]
        assert leases.fail("a", 0, 0.0, skip=False) == Failed(attempt, given_up=False)
    assert grant(leases, "b") == [0]
    assert leases.fail("b", 0, 0.0, skip=False) == Failed(3, given_up=True)


def test_a_bad_step_is_leased_once_more_as_an_empty_push() -> None:  # P6
    leases = leases_of(2, max_attempts=2)
    for attempt in (1, 2):
        assert leases.grant("a", 1, 1, 0.0, FREE) == [Grant(0)]
        assert leases.fail("a", 0, 0.0, skip=True) == Failed(attempt, given_up=attempt == 2)
    assert leases.grant("a", 1, 1, 0.0, FREE) == [Grant(0, skip=True)]
    assert leases.grant("b", 1, 1, 0.0, FREE) == [Grant(1)], "only the bad one"
    leases.end("a")
    assert leases.grant("b", 1, 1, 0.0, FREE) == [Grant(0, skip=True)], "it stays so"
    assert leases.acknowledge("b", 0, ALL, 1.0, skipped=True)


def test_failures_of_a_step_that_is_complete_or_unknown_do_not_count() -> None:
    leases = leases_of(2, max_attempts=1)
    grant(leases, "a")
    leases.acknowledge("a", 0, ALL, 1.0)
    assert leases.fail("b", 0, 0.0, skip=False) is None
    assert leases.fail("b", 1, 0.0, skip=False) is None
    assert grant(leases, "a") == [1]


def test_only_a_holder_s_failure_counts() -> None:  # P6: a report may come twice, or after the lease
    leases = leases_of(2, max_attempts=1)
    grant(leases, "a")
    assert leases.fail("b", 0, 0.0, skip=False) is None
    assert leases.held_by("a") == {0}
    assert leases.fail("a", 0, 0.0, skip=False) == Failed(1, given_up=True)
    assert leases.fail("a", 0, 0.0, skip=False) is None


def test_the_lease_that_is_held_far_longer_than_others_is_reported() -> None:
    leases = leases_of(4)
    grant(leases, "fast", now_s=100.0)
    assert leases.slowest(100.0 + SLOW_S) is None
    assert leases.slowest(100.5 + SLOW_S) == ("fast", 0, 0.5 + SLOW_S), "nothing to compare it with"
    leases.acknowledge("fast", 0, ALL, 120.0)  # 20 s are usual
    assert leases.slowest(900.0) is None
    grant(leases, "slow", now_s=200.0)
    grant(leases, "slower", now_s=210.0)
    assert leases.slowest(200.0 + SLOW_MEDIANS * 20.0) is None
    assert leases.slowest(200.5 + SLOW_MEDIANS * 20.0) == ("slow", 1, 0.5 + SLOW_MEDIANS * 20.0)


def test_an_early_stop_keeps_what_was_leased() -> None:  # P8
    leases = leases_of(10)
    grant(leases, "a", 3)
    assert leases.stop_at_frontier() == 3
    assert grant(leases, "b", 4) == []
    leases.end("a")
    assert grant(leases, "b", 4) == [0]
    for step in range(3):
        leases.acknowledge("b", step, ALL, 1.0)
    assert leases.finished


def test_an_early_stop_finishes_the_round() -> None:  # P8
    leases = leases_of(10, Sync(4))
    grant(leases, "a", 1)
    assert leases.stop_at_frontier() == 4
    assert grant(leases, "a", 8) == [1, 2, 3]


def test_an_early_stop_never_raises_the_target() -> None:
    leases = leases_of(6, Sync(4))
    for step in range(4):
        leases.acknowledge("a", step, ALL, 1.0)
    grant(leases, "a", 8)
    assert leases.stop_at_frontier() == 6


def test_a_step_given_up_is_an_empty_push_for_every_shard_whenever_it_is_leased() -> None:  # P6
    leases = leases_of(4, max_attempts=1)
    leases.grant("a", 1, 1, 0.0, 4)
    leases.fail("a", 0, 0.0, skip=True)
    assert leases.grant("a", 1, 1, 0.0, 4) == [Grant(0, skip=True)]
    leases.acknowledge("a", 0, [0, 1], 0.0, skipped=True)
    leases.shard_registered(1, IntervalSet())
    assert leases.grant("b", 1, 1, 0.0, 4) == [Grant(0, skip=True)], "the other shard has the empty push"
