"""Back-off and budget of a worker that ends again and again."""

from __future__ import annotations

import pytest

from parashard.process.backoff import BACKOFF_MAX_S
from parashard_coordinator.core.launchers import Restarts


def pause_s(restarts: Restarts, index: int = 0, now_s: float = 100.0) -> float:
    """Return for how long after an exit now the worker may not start, to a hundredth of a second."""
    restarts.exited(index, now_s)
    return next(i / 100 for i in range(1000) if restarts.may_start(index, now_s + i / 100))


def test_a_worker_that_never_ended_may_start() -> None:
    assert Restarts(0.5, 3).may_start(0, 0.0)


def test_the_pause_doubles_up_to_a_bound() -> None:
    restarts = Restarts(0.5, 1000)
    assert [pause_s(restarts) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, 4.0]
    for _ in range(200):
        restarts.exited(0, 0.0)
    assert pause_s(restarts) == BACKOFF_MAX_S


def test_each_worker_has_a_pause_of_its_own() -> None:
    restarts = Restarts(0.5, 10)
    restarts.exited(0, 100.0)
    restarts.exited(0, 100.0)
    assert pause_s(restarts, 1) == 0.0


def test_a_completed_step_resets_the_pause() -> None:
    restarts = Restarts(0.5, 10)
    for _ in range(4):
        restarts.exited(0, 0.0)
    restarts.step_completed()
    assert pause_s(restarts) == 0.0


@pytest.mark.parametrize("budget", [0, 3])
def test_the_budget_is_exits_in_a_row(budget: int) -> None:
    restarts = Restarts(0.5, budget)
    for _ in range(3):
        assert [restarts.exited(0, 0.0) for _ in range(budget + 1)] == [True] * budget + [False]
        restarts.step_completed()
