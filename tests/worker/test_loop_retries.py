"""Shards that go away and come back: the worker retries, and each shard has each step once (P1, P3)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import numpy as np
import pytest

from parashard.errors import NotReady, Unreachable
from parashard.protocol.messages import PullRun, Push
from parashard_server.core.shard import Shard
from support.loop_cases import Job, evaluation

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])

pytestmark = pytest.mark.usefixtures("virtual_time")


class Dying:
    """Shard 1 dies at a request and stays away for some more; then a later incarnation of it answers.

    Parameters
    ----------
    at : callable
        Whether this is the request.
    kept : int or None
        The later incarnation has the pushes up to this step in its weights; None: all that the earlier one
        acknowledged.
    answered_too_late : bool
        True: the fatal request is carried out, and only its answer is lost.
    away : int
        How many requests get no answer.
    """

    def __init__(
        self,
        job: Job,
        at: Callable[[Push | PullRun], bool],
        *,
        kept: int | None = None,
        answered_too_late: bool = False,
        away: int = 3,
    ) -> None:
        self._job = job
        self._at = at
        self._kept = kept
        self._late = answered_too_late
        self._away = away
        self._saved: Shard | None = None
        self.died = False
        job.cluster.before = self

    def __call__(self, address: str, request: Push | PullRun) -> None:
        if address != "shard-1":
            return
        shards = self._job.cluster.shards
        if self._kept is not None and len(shards[1].updates.applied) == self._kept + 1 and self._saved is None:
            self._saved = copy.deepcopy(shards[1])
        if not self.died and self._at(request):
            self.died = True
            if self._late:
                assert isinstance(request, Push)
                shards[1].push(request)
            reborn = self._saved or copy.deepcopy(shards[1])
            reborn.identity = reborn.identity._replace(incarnation=2)
            shards[1] = reborn
            raise Unreachable("no answer from shard-1")
        if self.died and self._away:
            self._away -= 1
            raise Unreachable("no answer from shard-1")


def pushes_step(step: int) -> Callable[[Push | PullRun], bool]:
    return lambda request: isinstance(request, Push) and request.step == step


def assert_each_step_once(job: Job, steps: int) -> None:
    """The gradient of step s is s + 1 everywhere, and the optimizer adds it up."""
    assert job.applied == [[(0, steps)]] * 2
    expected = steps * (steps + 1) / 2
    weights = job.weights()
    np.testing.assert_array_equal(weights["bias"], expected)
    np.testing.assert_array_equal(weights["weight"], expected)


@pytest.mark.parametrize("answered_too_late", [False, True], ids=["before", "after"])
@DEPTHS
def test_a_shard_dies_in_the_middle_of_a_push_and_comes_back_with_all_it_had(
    depth: int, answered_too_late: bool
) -> None:
    job = Job(*range(5), depth=depth)
    dying = Dying(job, pushes_step(2), answered_too_late=answered_too_late)
    job.run()
    assert dying.died
    assert_each_step_once(job, 5)
    assert (job.completed, job.leasing.drops) == ([0, 1, 2, 3, 4], [])
    incarnations = {c.step: list(c.incarnations) for c in job.leasing.completions}
    assert incarnations[2] == [1, 2], "the ack that counts is the later incarnation's (P3)"
    assert job.refreshed >= 1


def test_a_push_that_the_later_incarnation_has_lost_is_applied_by_it_once_more_and_the_other_shard_is_not_asked() -> (
    None
):
    job = Job(*range(4))
    Dying(job, pushes_step(3), kept=2, answered_too_late=True)
    job.run()
    assert_each_step_once(job, 4)
    assert job.cluster.shards[0].record.duplicate_pushes == 0


@DEPTHS
def test_a_pull_waits_for_the_later_incarnation(depth: int) -> None:
    job = Job(*range(4), depth=depth)
    dying = Dying(job, lambda request: isinstance(request, PullRun) and request.step == 2)
    job.run()
    assert dying.died
    assert_each_step_once(job, 4)


def test_an_evaluation_of_weights_that_an_ended_incarnation_had_is_given_back() -> None:  # P25
    job = Job(0, evaluation(5), 1)
    dying = Dying(job, lambda request: isinstance(request, PullRun) and request.step is None)
    job.run()
    assert dying.died
    assert (job.leasing.evaluations, job.leasing.dropped_evaluations) == ({}, [5])
    assert_each_step_once(job, 2)


def test_an_evaluation_judges_the_incarnations_that_its_grant_names_and_no_others() -> None:  # P25
    job = Job(evaluation(4, (1, 2)), evaluation(5, (1, 1))).run()
    assert (job.leasing.dropped_evaluations, job.leasing.evaluations.keys()) == ([4], {5})


def test_in_rounds_a_push_to_a_shard_that_returned_to_an_earlier_round_is_given_back() -> None:  # P11, P12
    job = Job(*range(4), round_steps=2, mean=False)
    at_first = copy.deepcopy(job.cluster.shards[1])

    def returned(address: str, request: Push | PullRun) -> None:
        if address == "shard-1" and pushes_step(3)(request) and job.cluster.shards[1] is not at_first:
            at_first.identity = at_first.identity._replace(incarnation=2)
            job.cluster.shards[1] = at_first

    job.cluster.before = returned
    job.run()
    assert (job.leasing.drops, job.completed) == ([3], [0, 1, 2])
    assert job.leasing.failures == {}


@pytest.mark.parametrize("error", [Unreachable("no answer"), NotReady("stopping")], ids=lambda e: e.code)
def test_retries_to_a_shard_are_bounded_and_then_the_step_is_given_back(error: Exception) -> None:  # P5
    def before(address: str, request: Push | PullRun) -> None:
        if address == "shard-1" and pushes_step(1)(request):
            raise error

    job = Job(*range(3), retry_budget_s=20.0)
    job.cluster.before = before
    job.run()
    assert (job.leasing.drops, job.completed) == ([1], [0, 2])
    assert job.refreshed > 20.0 / 0.5, "it looked where the shard is all the time"
    assert job.applied == [[(0, 3)], [(0, 1), (2, 3)]], "half in: safe, for the next attempt is a duplicate there (P1)"


def test_a_worker_that_is_asked_to_stop_waits_for_no_shard() -> None:
    cancelled = threading.Event()

    def before(address: str, request: Push | PullRun) -> None:
        if address == "shard-1" and pushes_step(1)(request):
            cancelled.set()
            raise Unreachable("no answer")

    job = Job(*range(2), cancelled=cancelled)
    job.cluster.before = before
    job.run()
    assert (job.leasing.drops, job.completed, job.refreshed) == ([1], [0], 1)
