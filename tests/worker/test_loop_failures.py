"""Steps that do not go through: what fails, what is given back, and what ends the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from loop_cases import Job

from parashard.data.base import Batch
from parashard.errors import (
    ConfigurationError,
    MalformedFrame,
    NonFiniteGradient,
    NotReady,
    ParashardError,
    PeerFailed,
    QueueFull,
    ShapeMismatch,
    StaleIncarnation,
    StalePlan,
    StaleRound,
    Superseded,
    Unreachable,
    WrongRun,
)
from parashard.messages import PullRun, PushChunk

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def at_step(step: int, spoil: Callable[[dict[str, Any]], None]) -> Callable[[Batch, dict[str, Any]], None]:
    return lambda batch, gradients: spoil(gradients) if batch.step == step else None


def refusing(kind: type[object], step: int, error: ParashardError) -> Callable[[str, Any], None]:
    """Return what makes shard 1 refuse a step's pulls or pushes, once."""
    left = [error]

    def before(address: str, request: PushChunk | PullRun) -> None:
        if address == "shard-1" and isinstance(request, kind) and request.step == step and left:
            raise left.pop()

    return before


def named_examples(job: Job, step: int) -> str:
    return f" (examples {', '.join(str(i) for i in job.steps.indices(step))})"


@DEPTHS
def test_a_model_that_raises_fails_its_step_and_no_other(depth: int) -> None:  # P6
    def broken(batch: Batch) -> None:
        if batch.step == 2:
            raise ZeroDivisionError("no such digit")

    job = Job(*range(5), depth=depth)
    job.model.before = broken
    job.run()
    assert job.leasing.failures == {2: f"ZeroDivisionError: no such digit{named_examples(job, 2)}"}
    assert job.completed == [0, 1, 3, 4]
    assert job.applied == [[(0, 2), (3, 5)]] * 2


@pytest.mark.parametrize(
    "bad",
    [[np.nan, 0.0], [np.inf, 0.0], [np.inf, -np.inf], [1e300, 0.0]],  # the last one as float32
    ids=["nan", "inf", "infs that cancel", "over float32"],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast", "ignore:invalid value encountered")
def test_a_gradient_that_is_not_finite_is_sent_to_no_shard(bad: list[float]) -> None:  # P6
    job = Job(*range(3))
    job.model.spoil = at_step(1, lambda gradients: gradients.update(bias=np.array(bad)))
    job.run()
    assert {push.step for push in job.cluster.pushes} == {0, 2}
    assert "NonFiniteGradient: step 1: the gradient has a value that is not finite" in job.leasing.failures[1]
    assert job.leasing.failures[1].endswith(named_examples(job, 1))
    assert job.applied == [[(0, 1), (2, 3)]] * 2


def test_a_frozen_variable_may_have_any_gradient() -> None:
    job = Job(0)
    job.model.spoil = at_step(0, lambda gradients: gradients.update(still=np.full((2, 2), np.nan)))
    assert job.run().completed == [0]


def test_the_greatest_finite_gradient_is_finite() -> None:
    largest = np.full(2, np.finfo(np.float32).max)
    job = Job(0)
    job.model.spoil = at_step(0, lambda gradients: gradients.update(bias=largest))
    assert job.run().completed == [0]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda g: g.update(other=np.zeros(2)), "a gradient for 'other', which is none of its variables"),
        (lambda g: g.update(bias=np.zeros(3)), r"gradient for 'bias' has shape \(3,\), the variable has \(2,\)"),
        (lambda g: g.update(weight=np.zeros((3, 4))), r"gradient for 'weight' has shape \(3, 4\)"),
        (lambda g: g.update(still=np.zeros(4)), r"gradient for 'still' has shape \(4,\)"),  # frozen ones, too
    ],
)
@DEPTHS
def test_a_model_that_does_not_fit_its_variables_ends_the_worker(
    spoil: Callable[[dict[str, Any]], None], message: str, depth: int
) -> None:
    job = Job(0, 1, depth=depth)
    job.model.spoil = at_step(0, spoil)
    with pytest.raises(ConfigurationError, match=message):
        job.run()
    assert job.cluster.pushes == []


def test_a_gradient_left_out_is_zero() -> None:  # P15
    job = Job(0)
    job.model.spoil = at_step(0, lambda gradients: gradients.pop("bias"))
    weights = job.run().weights()
    assert ((weights["bias"] == 0.0).all(), (weights["weight"] == 1.0).all()) == (True, True)


# --- what shards answer ---


@pytest.mark.parametrize("error", [StaleRound("over"), StalePlan("a new plan")], ids=lambda e: e.code)
@pytest.mark.parametrize("kind", [PullRun, PushChunk])
@DEPTHS
def test_a_step_that_comes_too_late_is_given_back(
    kind: type[object], error: ParashardError, depth: int
) -> None:  # P5: whoever leases it next knows more
    job = Job(*range(4), depth=depth)
    job.cluster.before = refusing(kind, 1, error)
    job.run()
    assert (job.leasing.drops, job.completed, job.leasing.failures) == ([1], [0, 2, 3], {})


@DEPTHS
def test_a_pull_that_is_answered_with_garbage_is_not_the_steps_failure(depth: int) -> None:  # P6: its batch is innocent
    job = Job(*range(4), depth=depth)
    job.cluster.before = refusing(PullRun, 1, MalformedFrame("a message begins with b'PSS1'"))
    job.run()
    assert (job.leasing.drops, job.completed, job.leasing.failures) == ([1], [0, 2, 3], {})


WAITED_FOR = [
    StaleIncarnation("a later life"),
    QueueFull("full"),
    Unreachable("no answer"),
    NotReady("stopping"),
    WrongRun("another run's shard has the port"),
]


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("error", WAITED_FOR, ids=lambda e: e.code)
@pytest.mark.parametrize("kind", [PullRun, PushChunk])
@DEPTHS
def test_a_shard_that_is_busy_or_away_is_waited_for(kind: type[object], error: ParashardError, depth: int) -> None:
    job = Job(*range(4), depth=depth)
    job.cluster.before = refusing(kind, 1, error)
    job.run()
    assert (job.leasing.drops, job.completed, job.leasing.failures) == ([], [0, 1, 2, 3], {})


def test_a_shard_that_stays_full_has_its_step_given_back() -> None:
    def before(address: str, request: PushChunk | PullRun) -> None:
        if isinstance(request, PushChunk) and request.step == 1 and address == "shard-1":
            raise QueueFull("full")

    job = Job(*range(3))
    job.cluster.before = before
    job.run()
    assert (job.leasing.drops, job.completed) == ([1], [0, 2])
    assert job.applied == [[(0, 3)], [(0, 1), (2, 3)]]  # half in: safe, for the next attempt is a duplicate there (P1)


@pytest.mark.parametrize("error", [ShapeMismatch("no"), NonFiniteGradient("compensation")], ids=lambda e: e.code)
def test_a_push_that_a_shard_refuses_has_failed(error: ParashardError) -> None:  # P6
    job = Job(*range(3))
    job.cluster.before = refusing(PushChunk, 1, error)
    job.run()
    assert job.leasing.failures == {1: f"{error}{named_examples(job, 1)}"}
    assert (job.leasing.drops, job.completed) == ([], [0, 2])


ENDS_THE_WORKER = [PeerFailed("broke"), Superseded("replaced"), ConfigurationError("no way to the shard is allowed")]


@pytest.mark.parametrize("error", ENDS_THE_WORKER, ids=lambda e: e.code)
@pytest.mark.parametrize("kind", [PullRun, PushChunk])
def test_what_redoing_cannot_mend_ends_the_worker(kind: type[object], error: ParashardError) -> None:
    job = Job(*range(3))
    job.cluster.before = refusing(kind, 1, error)
    with pytest.raises(type(error)):
        job.run()
    assert job.completed == [0]
