"""Steps that do not go through: what fails, what is given back, and what ends the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.client.pulled import PullBuffer
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
    TooEarly,
    Unreachable,
    WrongRun,
)
from parashard.process.run_files import short_path
from parashard.protocol.messages import PullRun, Push
from support import loop_cases
from support.loop_cases import Counting, Job, Numbered, evaluation

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


class Unreadable:
    """As an array of another library that NumPy cannot read."""

    shape = (2,)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("no host array")


def at_step(step: int, spoil: Callable[[dict[str, Any]], None]) -> Callable[[Batch, dict[str, Any]], None]:
    return lambda batch, gradients: spoil(gradients) if batch.step == step else None


def refusing(kind: type[object], step: int | None, error: ParashardError) -> Callable[[str, Any], None]:
    """Return what makes shard 1 refuse a step's pulls or pushes, once."""
    left = [error]

    def before(address: str, request: Push | PullRun) -> None:
        if address == "shard-1" and isinstance(request, kind) and request.step == step and left:
            raise left.pop()

    return before


@DEPTHS
def test_a_model_that_raises_fails_its_step_and_no_other(depth: int) -> None:  # P6
    def broken(batch: Batch) -> None:
        if batch.step == 2:
            raise ZeroDivisionError("no such digit\nnor any other")

    job = Job(*range(5), depth=depth)
    job.model.before = broken
    job.run()
    line = broken.__code__.co_firstlineno + 2
    assert job.leasing.failures == {2: f"{short_path(__file__)}:{line}: ZeroDivisionError: no such digit"}
    assert job.leasing.kinds == {2: pb.FAILURE_KIND_MODEL}
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
    assert "the gradient of 'bias' became " in job.leasing.failures[1]
    assert job.leasing.failures[1].endswith(" at step 1, with a loss of 4.5")
    assert job.leasing.kinds == {1: pb.FAILURE_KIND_NOT_FINITE}
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
        (
            lambda g: g.update(other=np.zeros(2)),
            "a gradient for 'other', which is none of its variables: bias, still, ",
        ),
        (lambda g: g.update(bias=np.zeros(3)), "a gradient for 'bias' of shape (3,); the variable has (2,)"),
        (
            lambda g: g.update(weight=np.zeros((3, 4))),
            "a gradient for 'weight' of shape (3, 4); the variable has (4, 3)",
        ),
        (lambda g: g.update(still=np.zeros(4)), "a gradient for 'still' of shape (4,)"),  # frozen ones, too
        (lambda g: g.update(bias=[0.0, 0.0]), "a list for 'bias'; due is an array"),
        (lambda g: g.update(bias=np.zeros(2, np.complex64)), "a gradient for 'bias' of complex64; gradients are float"),
        (lambda g: g.update(bias=np.zeros(2, object)), "a gradient for 'bias' of object; gradients are float"),
        (lambda g: g.update(bias=np.zeros(2, np.int64)), "a gradient for 'bias' of int64; gradients are float"),
        (lambda g: g.update(bias=Unreadable()), "what cannot be made float32: no host array"),
        (lambda g: g.pop("weight"), "no gradient for 'weight'; due is one for each variable"),
    ],
)
@DEPTHS
def test_a_result_that_fits_no_variable_is_reported_as_permanent(
    spoil: Callable[[dict[str, Any]], None], message: str, depth: int
) -> None:
    job = Job(0, depth=depth)
    job.model.spoil = at_step(0, spoil)
    job.run()
    place = f"{short_path(loop_cases.__file__)}:{Counting.loss_and_gradients.__code__.co_firstlineno}: "
    assert job.leasing.failures[0].startswith(f"{place}loss_and_gradients returned {message}")
    assert job.leasing.kinds == {0: pb.FAILURE_KIND_WRONG_RESULT}
    assert job.cluster.pushes == []


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (0.5, "a float; due is a loss and a mapping"),
        ((0.5, [1.0]), "a loss and a list; due is"),
        (None, "None; due is a loss"),
        ((np.zeros(4), {}), "an array of float64 of shape (4,) as the loss; due is a number, the mean over the batch"),
        ((None, {}), "None as the loss; due is a number"),
        (("hello", {}), "a str as the loss; due is a number"),
        ((1j, {}), "a complex as the loss; due is a number"),
        ((np.complex64(1), {}), "an array of complex64 of shape () as the loss"),
    ],
)
def test_a_result_of_another_form_is_reported_likewise(result: Any, found: str) -> None:
    job = Job(0)
    job.model.loss_and_gradients = lambda *_: result  # type: ignore[method-assign]
    job.run()
    assert f"loss_and_gradients returned {found}" in job.leasing.failures[0]
    assert job.leasing.kinds == {0: pb.FAILURE_KIND_WRONG_RESULT}


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        (None, "None; due is a mapping of names to numbers"),
        ([0.5], "a list; due is a mapping"),
        ({3: 1.0}, "3 as a metric's name; due is text"),
        ({"\udcff": 1.0}, r"'\udcff' as a metric's name; due is text"),
        ({"loss": None}, "None for 'loss'; due is "),
        ({"loss": "low"}, "a str for 'loss'; due is "),
        ({"loss": np.zeros(3)}, "an array of float64 of shape (3,) for 'loss'; due is "),
        ({"loss": 10**400}, "no float for 'loss': int too large to convert to float; due is "),
    ],
)
def test_metrics_of_another_form_are_the_model_s_error(metrics: Any, found: str) -> None:
    job = Job(evaluation(5), 0)
    job.model.evaluate = lambda *_: metrics  # type: ignore[method-assign]
    job.run()
    nothing, error = job.leasing.evaluations[5]
    assert (nothing, f"evaluate returned {found}" in error) == ({}, True)
    assert error.startswith(f"{short_path(__file__)}:")
    assert job.completed == [0]


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2.0), np.full((), 2.0), np.full((1, 1), 2.0)])
def test_a_loss_and_a_metric_may_be_any_real_number(value: Any) -> None:
    job, gradients = Job(0, evaluation(5)), {"bias": np.zeros(2), "weight": np.zeros((4, 3))}
    job.model.loss_and_gradients = lambda *_: (value, gradients)  # type: ignore[method-assign]
    job.model.evaluate = lambda *_: {"loss": value}  # type: ignore[method-assign]
    job.run()
    assert [c.loss for c in job.leasing.completions] == [2.0]
    assert job.leasing.evaluations[5] == ({"loss": 2.0}, "")


@pytest.mark.parametrize(("loss", "named"), [(np.nan, "NaN"), (-np.inf, "infinite")])
def test_a_loss_that_is_not_finite_is_named(loss: float, named: str) -> None:
    job = Job(0)
    gradients = {"bias": np.full(2, np.nan), "weight": np.zeros((4, 3))}
    job.model.loss_and_gradients = lambda *_: (loss, gradients)  # type: ignore[method-assign]
    job.run()
    assert (job.leasing.failures, job.leasing.kinds) == (
        {0: f"loss became {named} at step 0"},
        {0: pb.FAILURE_KIND_NOT_FINITE},
    )


def test_an_example_that_is_not_finite_is_named_in_place_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Numbered.examples

    def damaged(self: Numbered, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = examples(self, indices)
        inputs[2] = np.nan
        return inputs, targets

    monkeypatch.setattr(Numbered, "examples", damaged)
    job = Job(0)
    job.model.spoil = at_step(0, lambda gradients: gradients.update(bias=np.full(2, np.nan)))
    job.run()
    third = job.steps.indices(0)[2]
    assert job.leasing.failures == {0: f"example {third} of the data has a value that is not finite"}
    assert job.leasing.kinds == {0: pb.FAILURE_KIND_MODEL}


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_model_that_ends_the_process_by_an_exception_fails_its_step(error: type[BaseException]) -> None:
    def leaves(batch: Batch) -> None:
        raise error(0)

    job = Job(0, evaluation(1))
    job.model.before = leaves
    job.run()
    assert job.leasing.failures[0].endswith(f"{error.__name__}: 0")
    assert job.leasing.evaluations[1][1].endswith(f"{error.__name__}: 0")


# --- a step at which a worker died ---


@DEPTHS
def test_a_step_is_announced_before_it_is_computed_where_its_lease_asks_for_that(depth: int) -> None:  # P26
    job = Job(pb.Grant(step=0), pb.Grant(step=1, announce=True), pb.Grant(step=2, skip=True), depth=depth)
    job.model.before = lambda batch: seen.update({batch.step: list(job.leasing.announced)})
    seen: dict[int, list[int]] = {}
    job.run()
    assert (seen, job.completed) == ({0: [], 1: [1]}, [0, 1, 2])


def test_a_step_whose_announcement_is_not_answered_is_given_back() -> None:
    job = Job(pb.Grant(step=0, announce=True), 1)
    job.leasing.known = False
    job.run()
    assert (job.leasing.drops, job.completed, job.model.computed) == ([0], [1], [1])


def test_of_steps_whose_announcements_are_not_answered_no_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PullBuffer] = []

    def counted(*given: Any) -> PullBuffer:
        made.append(PullBuffer(*given))
        return made[-1]

    monkeypatch.setattr("parashard.client.pulled.PullBuffer", counted)
    job = Job(*(pb.Grant(step=step, announce=True) for step in range(3)))
    job.leasing.known = False
    job.run()
    assert (job.leasing.drops, len(made)) == ([0, 1, 2], 1), "each pull has the arrays of the one before"


def test_none_is_a_gradient_of_zeros_that_is_not_sent() -> None:
    job = Job(0)
    job.model.spoil = at_step(0, lambda gradients: gradients.update(bias=None))
    assert job.run().completed == [0]
    (pushed,) = {
        tuple(sorted({s.partition.variable for s in push.slices})) for push in job.cluster.pushes if push.slices
    }
    assert pushed == ("weight",)


def test_a_frozen_variable_needs_no_gradient() -> None:
    job = Job(0)
    job.model.spoil = at_step(0, lambda gradients: gradients.pop("still"))
    assert job.run().completed == [0]


# --- what shards answer ---


@pytest.mark.parametrize(
    "error", [StaleRound("over"), StalePlan("a new plan"), TooEarly("no update yet")], ids=lambda e: e.code
)
@pytest.mark.parametrize("kind", [PullRun, Push])
@DEPTHS
def test_a_step_that_comes_too_late_is_given_back(
    kind: type[object], error: ParashardError, depth: int
) -> None:  # P5: its next attempt may succeed
    job = Job(*range(4), depth=depth)
    job.cluster.before = refusing(kind, 1, error)
    job.run()
    assert (job.leasing.drops, job.completed, job.leasing.failures) == ([1], [0, 2, 3], {})


@DEPTHS
def test_a_pull_that_is_answered_with_garbage_is_not_the_steps_failure(
    depth: int,
) -> None:  # P6: its batch is not at fault
    job = Job(*range(4), depth=depth)
    job.cluster.before = refusing(PullRun, 1, MalformedFrame("a message begins with b'PSS1'"))
    job.run()
    assert (job.leasing.drops, job.completed, job.leasing.failures) == ([1], [0, 2, 3], {})


WAITED_FOR = [
    StaleIncarnation("a later incarnation"),
    QueueFull("full"),
    Unreachable("no answer"),
    NotReady("stopping"),
    WrongRun("another run's shard has the port"),
]


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("error", WAITED_FOR, ids=lambda e: e.code)
@pytest.mark.parametrize("kind", [PullRun, Push])
@DEPTHS
def test_a_shard_that_is_busy_or_away_is_waited_for(kind: type[object], error: ParashardError, depth: int) -> None:
    job = Job(*range(4), depth=depth)
    job.cluster.before = refusing(kind, 1, error)
    job.run()
    assert (job.leasing.drops, job.completed, job.leasing.failures) == ([], [0, 1, 2, 3], {})


@pytest.mark.usefixtures("virtual_time")
def test_a_shard_that_stays_full_has_its_step_given_back() -> None:
    def before(address: str, request: Push | PullRun) -> None:
        if isinstance(request, Push) and request.step == 1 and address == "shard-1":
            raise QueueFull("full")

    job = Job(*range(3))
    job.cluster.before = before
    job.run()
    assert (job.leasing.drops, job.completed) == ([1], [0, 2])
    assert job.applied == [[(0, 3)], [(0, 1), (2, 3)]]  # half in: safe, for the next attempt is a duplicate there (P1)


@pytest.mark.parametrize("error", [ShapeMismatch("no"), NonFiniteGradient("inf")], ids=lambda e: e.code)
def test_a_push_that_a_shard_refuses_has_failed(error: ParashardError) -> None:  # P6
    job = Job(*range(3))
    job.cluster.before = refusing(Push, 1, error)
    job.run()
    assert job.leasing.failures == {1: str(error)}
    assert job.leasing.kinds == {1: pb.FAILURE_KIND_UNSPECIFIED}
    assert (job.leasing.drops, job.completed) == ([], [0, 2])


ENDS_THE_WORKER = [PeerFailed("broke"), Superseded("replaced"), ConfigurationError("no way to the shard is allowed")]


@pytest.mark.parametrize("error", ENDS_THE_WORKER, ids=lambda e: e.code)
@pytest.mark.parametrize("kind", [PullRun, Push])
def test_an_unrecoverable_error_ends_the_worker(kind: type[object], error: ParashardError) -> None:
    job = Job(*range(3))
    job.cluster.before = refusing(kind, 1, error)
    with pytest.raises(type(error)):
        job.run()
    assert job.completed == [0]


@pytest.mark.parametrize("error", [MalformedFrame("begins with b'PSS1'"), StaleRound("over")], ids=lambda e: e.code)
def test_an_evaluation_that_a_shard_refuses_is_given_back_and_is_no_failure_of_the_model(error: ParashardError) -> None:
    job = Job(pb.EvaluationGrant(evaluation=5), 0)
    job.cluster.before = refusing(PullRun, None, error)
    job.run()
    assert (job.leasing.dropped_evaluations, job.leasing.evaluations, job.completed) == ([5], {}, [0])


@pytest.mark.parametrize("error", ENDS_THE_WORKER, ids=lambda e: e.code)
def test_an_unrecoverable_error_of_an_evaluation_s_pull_ends_the_worker(error: ParashardError) -> None:
    job = Job(pb.EvaluationGrant(evaluation=5))
    job.cluster.before = refusing(PullRun, None, error)
    with pytest.raises(type(error)):
        job.run()
    assert job.leasing.evaluations == {}
