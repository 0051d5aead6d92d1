"""Milestones that callbacks are told of, once, and the learning rates that they decide (P37)."""

from __future__ import annotations

import pytest

from parashard.errors import ConfigurationError
from parashard_coordinator.core.evaluations import Evaluations
from parashard_coordinator.core.following import ENDS_KEPT, LEASED_AHEAD, Following
from parashard_coordinator.core.policies import Async, LeasingPolicy, Sync
from parashard_coordinator.core.training_figures import TrainingFigures

TOTAL, EPOCH = 12, 4


def following_of(policy: LeasingPolicy, judged: list[int], *, decides: bool = True) -> tuple[Following, Evaluations]:
    evaluations = Evaluations(judged, policy, TOTAL)
    return Following(TOTAL, EPOCH, TrainingFigures(TOTAL, EPOCH), policy, evaluations, decides=decides), evaluations


def milestones(
    following: Following, evaluations: Evaluations, target: int = TOTAL
) -> list[tuple[int, list[int], bool]]:
    """Handle all of them, each as it is reached."""
    found = []
    while (due := following.next_milestone(target)) is not None:
        assert following.reached(due.after_steps - 1, target) is None
        evaluations.finish(due.after_steps, {"loss": 1.0})
        reached = following.reached(due.after_steps, target)
        assert reached is not None
        epochs = range(reached.first_epoch, reached.first_epoch + len(reached.epoch_losses))
        found.append((reached.after_steps, list(epochs), reached.evaluated))
        following.handle(reached.after_steps)
    return found


def test_an_epoch_and_its_evaluation_are_one_milestone() -> None:
    assert milestones(*following_of(Async(), [4, 6, 12])) == [
        (4, [0], True),
        (6, [], True),
        (8, [1], False),
        (12, [2], True),
    ]


def test_in_rounds_an_epoch_ends_with_the_round_of_its_last_step_and_several_may_end_at_once() -> None:
    assert milestones(*following_of(Sync(5), [4, 12])) == [(5, [0], True), (10, [1], False), (12, [2], True)]
    assert milestones(*following_of(Sync(9), [])) == [(9, [0, 1], False), (12, [2], False)]


def test_an_early_stop_leaves_out_what_lies_beyond_and_judges_where_it_is() -> None:
    following, evaluations = following_of(Async(), [4, 8, 12])
    following.handle(4)
    evaluations.finish(4, {})
    evaluations.stop_at(6)
    assert milestones(following, evaluations, target=6) == [(6, [], True)]


def test_a_milestone_waits_for_its_evaluation() -> None:
    following, evaluations = following_of(Async(), [4])
    assert following.reached(TOTAL, TOTAL) is None
    evaluations.finish(4, {"loss": 0.5}, "evaluated/4.safetensors", judged_steps=9)
    reached = following.reached(TOTAL, TOTAL)
    assert reached is not None
    assert (reached.metrics, reached.weights) == ({"loss": 0.5}, "evaluated/4.safetensors")
    assert reached.judged_steps == 9


def test_rounds_wait_for_callbacks_that_decide_and_for_no_others() -> None:
    following, _ = following_of(Sync(2), [])
    assert following.lease_limit(TOTAL) == 0
    following.handle(0)
    assert following.lease_limit(TOTAL) == 4
    following.handle(4)
    assert following.lease_limit(TOTAL) == 8
    assert following_of(Sync(2), [], decides=False)[0].lease_limit(TOTAL) > TOTAL


def test_without_rounds_only_the_first_step_waits() -> None:
    following, _ = following_of(Async(), [])
    assert following.lease_limit(TOTAL) == 0
    following.handle(0)
    assert following.lease_limit(TOTAL) > TOTAL


def test_completed_steps_are_told_from_where_one_asks_and_what_is_forgotten_is_counted() -> None:
    following = Following(
        1 << 20, 1 << 20, TrainingFigures(1 << 20, 1 << 20), Async(), Evaluations([], Async(), 1 << 20)
    )
    for step in (2, 0, 2, 1):
        following.step_completed(step, 0.5)
    ends, seen, missed = following.ends_since(1)
    assert ([end.step for end in ends], seen, missed) == ([0, 1], 3, 0)
    for step in range(3, ENDS_KEPT + 10):
        following.step_completed(step, None)
    ends, seen, missed = following.ends_since(3)
    assert (ends[0].step, missed, seen) == (10, 7, 10 + len(ends))


def test_a_learning_rate_is_a_function_of_the_step() -> None:  # P37
    following, _ = following_of(Async(), [])
    assert following.rate_of(3) == 0.0
    assert following.decide(0.5, after_steps=4, frontier=6) == (6, 0.5, 4)
    assert following.decide(0.9, after_steps=4, frontier=7) is None  # the same milestone, told again
    following.decide(0.25, after_steps=8, frontier=9)
    assert [following.rate_of(step) for step in (0, 5, 6, 8, 9, 11)] == [0.0, 0.0, 0.5, 0.5, 0.25, 0.25]


def test_no_rate_governs_what_an_earlier_coordinator_may_have_leased() -> None:  # P37
    following, _ = following_of(Async(), [])
    assert following.leases(3)
    assert not following.leases(2 + LEASED_AHEAD)
    assert following.leases(3 + LEASED_AHEAD)
    assert following.decide(0.5, after_steps=4, frontier=6) == (6, 0.5, 4)
    successor, _ = following_of(Async(), [])
    successor.resume(following.rates, following.leased_to, None)
    assert successor.decide(0.25, after_steps=8, frontier=9) == (following.leased_to, 0.25, 8)


def test_in_rounds_nothing_is_noted_of_leases_which_wait_for_the_decision() -> None:
    following, _ = following_of(Sync(2), [])
    assert not following.leases(3)


def test_there_is_a_most_of_decisions() -> None:
    following, _ = following_of(Async(), [])
    following.resume([following.decide(0.5, 0, 0)] * 10_000, 0, None)  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="10,000 times"):
        following.decide(0.5, 8, 9)
