"""When a shard saves its state: by seconds, by steps, and in rounds when all shards do (P12)."""

from __future__ import annotations

import pytest

from parashard_server.durability.schedule import AHEAD_MAX, CheckpointSchedule


def schedule(
    every_s: float = 0.0, every_steps: int = 0, round_steps: int | None = None, steps: int = 0
) -> CheckpointSchedule:
    return CheckpointSchedule(
        every_s=every_s, every_steps=every_steps, round_steps=round_steps, steps=steps, now_s=100.0
    )


def test_by_seconds_since_the_last_cut_and_only_if_something_has_moved() -> None:
    by_seconds = schedule(every_s=30.0)
    assert not by_seconds.due(5, None, 129.9)
    assert not by_seconds.due(0, None, 900.0), "nothing has moved"
    assert by_seconds.due(1, None, 130.0)
    by_seconds.cut(1, None, 140.0)
    assert not by_seconds.due(9, None, 169.9)
    assert by_seconds.due(9, None, 170.0)


def test_by_steps_since_the_last_cut() -> None:
    by_steps = schedule(every_steps=10, steps=3)
    assert not by_steps.due(12, None, 1e9)
    assert by_steps.due(13, None, 100.0)
    by_steps.cut(15, None, 100.0)
    assert not by_steps.due(24, None, 100.0)
    assert by_steps.due(25, None, 100.0)


def test_by_either_whichever_comes_first() -> None:
    both = schedule(every_s=30.0, every_steps=10)
    assert both.due(10, None, 101.0)
    assert both.due(1, None, 130.0)


def test_not_at_all() -> None:
    assert not schedule().due(10**9, None, 1e9)
    assert not schedule(round_steps=4).due(10**9, 10**6, 1e9)


@pytest.mark.parametrize(
    ("every_steps", "rounds"), [(4, [1, 2, 3, 4, 5, 6]), (5, [2, 4, 6]), (8, [2, 4, 6]), (12, [3, 6])]
)
def test_in_rounds_steps_are_rounded_up_to_rounds_that_every_shard_counts_alike(
    every_steps: int, rounds: list[int]
) -> None:  # P12
    started_early, started_late = (schedule(every_steps=every_steps, round_steps=4, steps=steps) for steps in (0, 4))
    for in_rounds in (started_early, started_late):
        assert [r for r in range(7) if in_rounds.due(4 * r, r, 100.0)] == rounds


def test_a_round_is_saved_once_however_often_it_is_looked_at() -> None:
    in_rounds = schedule(every_steps=4, round_steps=4)
    assert in_rounds.due(8, 2, 100.0)
    in_rounds.cut(8, 2, 100.0)
    assert not in_rounds.due(8, 2, 100.0)
    assert in_rounds.due(12, 3, 100.0)


def test_a_round_that_is_reached_again_after_a_return_is_saved_again() -> None:  # P12
    in_rounds = schedule(every_steps=4, round_steps=4)
    in_rounds.cut(12, 3, 100.0)
    in_rounds.cut(8, 2, 100.0)
    assert in_rounds.due(12, 3, 100.0)


def test_in_rounds_seconds_are_the_coordinator_s_business() -> None:  # P12
    in_rounds = schedule(every_s=30.0, round_steps=4)
    assert not in_rounds.due(8, 2, 1e9)
    in_rounds.name_ahead(3)
    assert not in_rounds.due(8, 2, 1e9)
    assert in_rounds.due(12, 3, 100.0)
    in_rounds.cut(12, 3, 100.0)
    assert not in_rounds.due(12, 3, 100.0)
    in_rounds.cut(8, 2, 100.0)
    assert not in_rounds.due(12, 3, 100.0), "it was named once and saved once"


def test_rounds_named_ahead_are_bounded_and_the_earliest_are_forgotten() -> None:
    in_rounds = schedule(round_steps=4)
    for round_ in range(1, AHEAD_MAX + 3):
        in_rounds.name_ahead(round_)
    assert [r for r in range(AHEAD_MAX + 4) if in_rounds.due(4 * r, r, 100.0)] == list(range(3, AHEAD_MAX + 3))


def test_what_could_not_be_saved_is_due_again_after_pauses_that_grow() -> None:  # P21
    by_seconds = schedule(every_s=600.0)
    by_seconds.cut(5, None, 700.0)
    for now_s, again_s in ((700.0, 701.0), (701.0, 703.0), (703.0, 707.0)):
        by_seconds.failed(now_s)
        assert not by_seconds.due(5, None, again_s - 0.1)
        assert by_seconds.due(5, None, again_s), "though nothing has moved"
    by_seconds.stored()
    assert not by_seconds.due(6, None, 800.0)


def test_in_rounds_it_is_due_again_while_the_shard_stands_there() -> None:  # P12, P21
    in_rounds = schedule(every_steps=4, round_steps=4)
    in_rounds.cut(8, 2, 100.0)
    in_rounds.failed(100.0)
    assert [in_rounds.due(8, 2, now_s) for now_s in (100.9, 101.0)] == [False, True]
    assert in_rounds.due(12, 3, 100.1), "the next one is saved as ever"
