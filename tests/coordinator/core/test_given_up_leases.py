"""A step that is given up: attempts are paced, only acks of its empty push count, all shards agree (P24)."""

from __future__ import annotations

import pytest

from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.failures import SkippedSteps
from parashard_coordinator.core.leases import RETRY_PAUSE_S, Grant, StepLeases
from parashard_coordinator.core.policies import Async, LeasingPolicy, Sync
from parashard_coordinator.endpoints.status import StatusView
from support.coordinator_cases import Caller, announce, core_of, done


def steps(*numbers: int) -> IntervalSet:
    return IntervalSet((number, number + 1) for number in numbers)


# --- attempts are paced ---


def test_the_pause_before_the_next_attempt_doubles_and_other_steps_go_on() -> None:
    leases, now_s = StepLeases(10, 1, Async(), max_attempts=5), 100.0
    for attempt in range(1, 5):
        assert leases.grant("a", 1, 1, now_s, 10) == [Grant(0)]
        leases.fail("a", 0, now_s, skip=True)
        pause_s = RETRY_PAUSE_S * 2 ** (attempt - 1)
        assert leases.grant("b", 1, 1, now_s + 0.99 * pause_s, 10) == [Grant(attempt)], "another one"
        now_s += pause_s
    assert leases.grant("a", 1, 1, now_s, 10) == [Grant(0)]
    leases.fail("a", 0, now_s, skip=True)
    assert leases.grant("a", 1, 1, now_s, 10) == [Grant(0, skip=True)], "nothing is waited for any more"
    assert now_s - 100.0 > 3.0, "each shard has said at least once what it has"


def test_a_pause_outlives_a_shard_s_restart_and_ends_when_a_worker_lists_the_step() -> None:
    leases = StepLeases(3, 1, Async())
    leases.grant("a", 1, 1, 0.0, 3)
    leases.fail("a", 0, 0.0, skip=False)
    leases.shard_registered(0, IntervalSet())
    assert leases.grant("b", 3, 1, 0.1, 3) == [Grant(1)]
    leases.renew("a", [0], 0.1)
    assert leases.held_by("a") == {0}
    leases.end("a")
    assert leases.grant("c", 1, 1, 0.2, 3) == [Grant(2)]
    assert leases.grant("c", 1, 1, 0.3, 3) == [Grant(0)]


# --- a step that is in everywhere is no skip ---


@pytest.mark.parametrize("policy", [Async(), Sync(2)])
def test_a_step_whose_acks_were_lost_is_known_by_what_the_shards_say(policy: LeasingPolicy) -> None:
    core = core_of(policy, steps_total=2, retry_pause_s=1.0, max_attempts=2, skip_bad_steps=True)
    caller = Caller(core)
    assert caller.lease(1) == [0]  # its worker dies when both shards have the push, before it reports
    caller.call(0.0, failed=[(0, "the model raised")])
    announce(core, 0, held=[(0, 1)])
    assert core.job.leases.lowest_incomplete == 0
    announce(core, 1, held=[(0, 1)])
    assert core.job.leases.lowest_incomplete == 1
    assert core.job.events[-1] == "every shard has step 0 already; it is not tried again"
    assert caller.lease(4, now_s=9.0) == [1]


def test_what_shards_say_completes_no_step_that_has_not_failed() -> None:
    core = core_of()
    caller = Caller(core)
    caller.lease(1)
    for shard in range(2):
        announce(core, shard, held=[(0, 1)])
    assert core.job.leases.lowest_incomplete == 0, "its report has the loss and the examples"
    caller.call(completed=done(0, loss=0.25))
    assert (core.job.learning.loss, core.job.figures.examples) == (0.25, 8)


# --- only the empty push counts ---


def given_up(policy: LeasingPolicy) -> tuple[StepLeases, Grant]:
    """Return leases of one step that was given up, and the lease of its empty push."""
    leases = StepLeases(2, 2, policy, max_attempts=1)
    leases.grant("a", 1, 1, 0.0, 2)
    leases.fail("a", 0, 0.0, skip=True)
    [granted] = leases.grant("a", 1, 1, 0.0, 2)
    return leases, granted


def test_acks_of_its_gradient_do_not_complete_a_step_that_is_given_up() -> None:
    leases, granted = given_up(Sync(2))
    assert granted == Grant(0, skip=True)
    leases.renew("late", [0], 0.0)
    assert not leases.acknowledge("late", 0, (0, 1), 1.0), "its shards' sums may hold it or not"
    assert leases.held_by("late") == set()
    assert leases.acknowledge("a", 0, (0, 1), 2.0, skipped=True)


@pytest.mark.parametrize(
    ("applied", "skipped", "counts"),
    [(steps(), steps(), False), (steps(), steps(0), True), (steps(0), steps(), True)],
    ids=["a gradient that is held", "an empty push that is held", "in the weights"],
)
def test_what_a_shard_holds_of_it_counts_if_nothing_can_change_it(
    applied: IntervalSet, skipped: IntervalSet, counts: bool
) -> None:
    leases, _ = given_up(Sync(2))
    assert (0 in leases.acknowledged_steps(applied, steps(0, 1), skipped)) is counts
    assert 1 in leases.acknowledged_steps(applied, steps(0, 1), skipped), "of other steps all does"


def test_a_shard_that_returns_with_its_gradient_gets_the_empty_push() -> None:
    core = core_of(Sync(2), steps_total=2, max_attempts=1, skip_bad_steps=True)
    caller = Caller(core)
    caller.lease(1)
    caller.call(want=1, failed=[(0, "NaN")])
    caller.call(completed=done(0, skipped=True))
    announce(core, 0, 2, held=[(0, 1)])  # its log had the gradient, and not what came after it
    assert core.job.leases.lowest_incomplete == 0
    assert [(g.step, g.skip) for g in caller.call(want=1).granted] == [(0, True)]


# --- shards that disagree are reported ---


def test_a_step_that_some_shards_had_applied_is_reported_as_partly_skipped() -> None:
    core = core_of(steps_total=3, max_attempts=1, skip_bad_steps=True)
    caller = Caller(core)
    caller.lease(1)
    caller.call(want=1, failed=[(0, "NaN")])
    announce(core, 0, applied=[(0, 1)])
    caller.call(completed=done(0, skipped=True))
    assert (len(core.job.skipped.everywhere()), len(core.job.skipped.partly())) == (0, 0), (
        "shard 1 has not said what it has"
    )
    for _ in range(2):
        announce(core, 1, applied=[(0, 1)], skipped=[0])
    assert (len(core.job.skipped.everywhere()), len(core.job.skipped.partly())) == (0, 1)
    assert [event for event in core.job.events if "partly_skipped" in event] == [
        "warning: step 0 was given up when some shards had applied it: those keep its gradient, the others have none "
        "(partly_skipped)"
    ]
    status = StatusView("digits", "async").message(core.job, 1.0)
    assert (status.skipped_steps, status.partly_skipped_steps) == (0, 1)


def test_the_shards_last_word_is_their_checkpoints() -> None:
    core = core_of(steps_total=1)
    core.shards_saved([(steps(0), steps(0)), (steps(0), steps())])
    assert (len(core.job.skipped.everywhere()), len(core.job.skipped.partly())) == (0, 1)


def test_a_step_is_skipped_where_all_say_so_and_partly_where_all_have_it_and_some_say_so() -> None:
    book = SkippedSteps(3)
    assert book.update(0, steps(1, 2, 3, 4), steps(1, 2, 3)) == []
    assert book.update(1, steps(1, 2, 3, 4), steps(1, 3)) == []
    assert book.update(2, steps(1, 2, 4), steps(1)) == [2], "it has not got step 3 yet"
    assert (book.everywhere(), book.partly()) == (steps(1), steps(2))
    assert book.update(2, steps(1, 2, 3, 4), steps(1, 3, 9)) == [], "each is told once; 9 is only held"
    assert (book.everywhere(), book.partly()) == (steps(1, 3), steps(2))


def test_a_message_that_was_overtaken_takes_nothing_back_and_a_new_incarnation_does() -> None:
    book = SkippedSteps(1)
    book.update(0, steps(1, 2), steps(2))
    book.update(0, steps(1), steps())
    assert book.everywhere() == steps(2)
    book.update(0, steps(1), steps(), new_incarnation=True)
    assert book.everywhere() == steps()
