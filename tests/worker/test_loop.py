"""The step loop: leased steps are pulled, computed, pushed and reported, at any pipeline depth."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.client.pulled import Pulled
from parashard.data.base import BadExample, Batch
from parashard.errors import TooEarly, WrongModel
from parashard.models.base import StepSignal
from parashard.protocol.messages import PullRun, Push
from parashard_worker import computing
from parashard_worker import session as session_module
from parashard_worker import transfers as transfers_module
from support.in_process import push, state_of
from support.loop_cases import HELD_OUT, Job, Numbered, evaluation
from support.waiting import DEADLINE_S, eventually

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


@DEPTHS
def test_every_leased_step_is_applied_by_every_shard_and_reported(depth: int) -> None:
    job = Job(*range(10), depth=depth).run()
    assert job.applied == [[(0, 10)], [(0, 10)]]
    assert job.completed == list(range(10))
    weights = job.weights()
    for name in ("bias", "weight"):
        assert (weights[name] == sum(range(1, 11))).all()
    assert (weights["still"] == 1.0).all()  # frozen: its gradient is not sent
    assert (job.leasing.failures, job.leasing.drops) == ({}, [])
    assert (job.loop.session.computed, job.loop.session.steps_done, job.loop.session.examples) == (10, 10, 40)


def test_a_report_names_the_incarnations_that_acknowledged_the_step_its_loss_and_its_examples() -> None:  # P3, P5
    job = Job(3, incarnation=6).run()
    (report,) = job.leasing.completions
    indices = job.steps.indices(3)
    assert report == pb.CompletedStep(step=3, incarnations=[6, 6], loss=float(indices.mean()), examples=4)


@DEPTHS
def test_a_deeper_pipeline_is_stale_by_what_it_holds(depth: int) -> None:
    job = Job(*range(10), depth=depth).run()
    for shard in job.cluster.shards:
        assert max(shard.record.staleness) <= 2 * depth
        assert sum(shard.record.staleness.values()) == 10


@DEPTHS
def test_no_more_is_under_way_than_the_depth_allows(depth: int) -> None:
    job, pulls, pushes = Job(*range(10), depth=depth), [], []

    def look(batch: Batch) -> None:
        pulls.append(len(job.loop.session._waiting))
        pushes.append(len(job.loop.session._pushing))

    job.model.before = look
    job.run()
    assert (max(pulls), max(pushes)) == (depth, depth)


def test_depth_0_does_one_thing_after_the_other() -> None:
    job, order = Job(0, 1), []
    job.cluster.before = lambda address, request: order.append(type(request))
    job.model.before = lambda batch: order.append(Batch)
    job.run()
    assert order == [PullRun, PullRun, Batch, Push, Push] * 2


def test_the_pull_comes_after_the_lease_and_names_its_step() -> None:  # P9
    job, asked = Job(7, 4), []
    job.cluster.before = lambda address, request: isinstance(request, PullRun) and asked.append(request.step)
    job.run()
    assert asked == [7, 7, 4, 4]


def test_in_rounds_every_request_names_its_round() -> None:  # P11
    job, asked = Job(*range(6), round_steps=2), []
    job.cluster.before = lambda address, request: isinstance(request, PullRun) and asked.append(request.round)
    job.run()
    assert asked == [0] * 4 + [1] * 4 + [2] * 4
    assert (job.weights(round_=3)["weight"] == 1.5 + 3.5 + 5.5).all()


def test_a_step_to_skip_is_pushed_empty_and_marked() -> None:  # P6
    job = Job(0, pb.Grant(step=1, skip=True))
    job.run()
    assert job.model.computed == [0]
    assert [(c.step, c.skipped, c.examples, c.loss) for c in job.leasing.completions][1] == (1, True, 0, 0.0)
    assert [(p.skipped, p.slices, p.payload.nbytes) for p in job.cluster.pushes if p.step == 1] == [(True, (), 0)] * 2
    assert [shard.record.skipped_steps for shard in job.cluster.shards] == [1, 1]
    assert job.applied == [[(0, 2)], [(0, 2)]]


# --- clipping ---


def test_the_norm_of_the_whole_gradient_is_clipped() -> None:  # P15: over all variables, whatever shard they are on
    job = Job(2, clip_norm=1.0).run()
    weights = job.weights()
    moved = np.concatenate([weights["bias"].ravel(), weights["weight"].ravel()])
    assert np.linalg.norm(moved.astype(np.float64)) == pytest.approx(1.0, rel=1e-6)
    assert (moved == moved[0]).all()


def test_a_smaller_gradient_is_not_clipped() -> None:
    job = Job(2, clip_norm=1e3).run()
    assert (job.weights()["weight"] == 3.0).all()


# --- stopping ---


@DEPTHS
def test_a_stop_settles_pushes_and_gives_back_the_rest(depth: int) -> None:
    job = Job(*range(10), depth=depth)
    job.run(stopping=lambda: len(job.model.computed) >= 3)
    assert job.model.computed == job.completed == [0, 1, 2]
    assert job.applied == [[(0, 3)], [(0, 3)]]
    assert job.leasing.drops == list(range(3, 3 + depth))  # pulled and not computed
    assert [grant.step for grant in job.leasing.work] == list(range(3 + depth, 10))


@DEPTHS
def test_a_stop_before_the_first_step_computes_nothing(depth: int) -> None:
    job = Job(0, 1, depth=depth).run(stopping=lambda: True)
    assert (job.model.computed, job.completed, job.leasing.drops) == ([], [], [])


# --- evaluations ---


@pytest.mark.parametrize("at_once", [1, 2, 3, HELD_OUT, 1000])
def test_metrics_are_means_over_all_held_out_examples(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(computing, "EVALUATION_EXAMPLES", at_once)
    job = Job(0, evaluation(5)).run()
    metrics, error = job.leasing.evaluations[5]
    assert metrics == pytest.approx({"mean": np.arange(HELD_OUT).mean(), "weight": 1.0})
    assert error == ""


def test_an_evaluation_reports_how_many_steps_were_in_what_it_judged() -> None:
    job = Job(0, 1, 2, evaluation(1), evaluation(2)).run()
    assert job.leasing.judged_steps == {1: 3, 2: 3}, "two that wait for the same worker judge the same weights"


def test_an_evaluation_of_a_round_judges_what_that_round_starts_from() -> None:  # P11
    late = evaluation(3, for_round=True, round=0)
    job = Job(0, 1, evaluation(2, for_round=True, round=1), late, round_steps=2).run()
    assert job.leasing.evaluations[2][0]["weight"] == 1.5
    assert job.leasing.dropped_evaluations == [3], "its round is over"


def test_an_evaluation_that_fails_is_reported() -> None:
    def broken(batch: Batch) -> None:
        if batch.step < 0:
            raise ZeroDivisionError("in the model")

    job = Job(evaluation(5), 0)
    job.model.before = broken
    job.run()
    metrics, error = job.leasing.evaluations[5]
    assert (metrics, error.endswith("ZeroDivisionError: in the model")) == ({}, True)
    assert job.completed == [0]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WrongModel("outputs of shape (400, 2)"), pb.FAILURE_KIND_WRONG_RESULT),
        (MemoryError(), pb.FAILURE_KIND_MODEL),
    ],
)
def test_an_evaluation_says_whether_another_attempt_may_succeed(error: Exception, kind: pb.FailureKind) -> None:
    def broken(batch: Batch) -> None:
        raise error

    job = Job(evaluation(5))
    job.model.before = broken
    assert job.run().leasing.evaluation_kinds == {5: kind}


@DEPTHS
def test_an_evaluation_waits_for_what_is_pulled_and_goes_before_what_is_not(depth: int) -> None:
    job = Job(0, evaluation(5), 1, depth=depth).run()
    assert job.model.computed == [0, -1, 1]


# --- where the time goes ---


def test_each_phase_counts_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=0.0)

    def takes(seconds: float) -> None:
        clock.now_s += seconds

    for module in (session_module, transfers_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    job = Job(0, 1)
    job.cluster.before = lambda address, request: takes(1.0 if isinstance(request, PullRun) else 10.0)
    job.model.before = lambda batch: takes(100.0)
    job.run()
    assert job.loop.session.phases_s == {"lease": 0.0, "pull": 2 * 2.0, "compute": 2 * 100.0, "push": 2 * 20.0}
    assert job.loop.session.transfers.transfer_s == 2 * 22.0, "nothing is hidden at depth 0"
    assert job.leasing.phases() == {**job.loop.session.phases_s, "transfer": 44.0}


def test_what_a_shard_waited_for_other_parts_is_no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=0.0)
    for module in (session_module, transfers_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    job = Job(0, 1, 2)
    pull = job.loop.session.transfers._client.pull

    def waiting(*, step: int, **asked: Any) -> Pulled:
        clock.now_s += 4.0
        if step == 2:
            raise TooEarly("a moment was not enough")
        pulled = pull(step=step, **asked)
        pulled.waited_s = 3.0
        return pulled

    monkeypatch.setattr(job.loop.session.transfers._client, "pull", waiting)
    job.run()
    assert (job.loop.session.phases_s["lease"], job.loop.session.phases_s["pull"]) == (2 * 3.0, 2 * 1.0 + 4.0)
    assert job.loop.session.transfers.transfer_s == 2 * 1.0
    assert (job.completed, job.leasing.drops) == ([0, 1], [2])


def test_a_transfer_beside_computing_counts_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, began, computed = SimpleNamespace(now_s=0.0), threading.Event(), threading.Event()
    for module in (session_module, transfers_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    job = Job(0, 1, depth=1)

    def pull_ahead(address: str, request: PullRun | Push) -> None:
        if isinstance(request, PullRun) and request.step == 1:
            began.set()
            assert computed.wait(DEADLINE_S)

    def compute(batch: Batch) -> None:
        if batch.step == 0:
            assert began.wait(DEADLINE_S)
            clock.now_s += 100.0  # of step 0's computing, and of step 1's pull
            computed.set()
            job.loop.session._waiting[0].pulling.result(DEADLINE_S)

    job.cluster.before, job.model.before = pull_ahead, compute
    job.run()
    assert (job.loop.session.phases_s["compute"], job.loop.session.transfers.transfer_s) == (100.0, 100.0)
    assert (job.loop.session.phases_s["pull"], job.loop.session.phases_s["push"]) == (0.0, 0.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_whatever_may_be_under_way_waits_for_no_other(depth: int) -> None:
    job, pulls, others = Job(*range(10), depth=depth), [], threading.Barrier(2 * depth + 1)

    class Held:
        """A client that answers only once as many requests wait as may be under way: `depth` pushes, a step's pull and
        those of `depth` more.
        """

        view = job.cluster.view()

        def pull(self, *, step: int, **about: object) -> SimpleNamespace:
            pulls.append(step)
            if step >= depth:
                others.wait(DEADLINE_S)
            return SimpleNamespace(variables={}, values={}, rows={}, waited_s=0.0, release=lambda: None)

        def push(self, step: int, *_: object, **about: object) -> SimpleNamespace:
            if step < depth:
                others.wait(DEADLINE_S)
            return SimpleNamespace(acks=(), incarnations=(1, 1))

    job.loop.session.transfers._client = Held()  # type: ignore[assignment]
    job.run(stopping=lambda: len(pulls) > 2 * depth)
    assert not others.broken


@DEPTHS
def test_what_was_pulled_is_given_back_once_the_push_has_settled(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(*range(6), depth=depth)
    given_back: list[Pulled] = []

    def note(pulled: Pulled) -> None:
        step = len(given_back)
        assert all(step in shard.updates.applied for shard in job.cluster.shards), "gradients may be views of it"
        given_back.append(pulled)

    monkeypatch.setattr(Pulled, "release", note)
    job.run()
    assert len(given_back) == 6


def test_what_an_evaluation_pulled_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(Pulled, "release", lambda pulled: order.append("given back"))
    job = Job(evaluation(5))
    job.model.before = lambda batch: order.append("judged")
    job.run()
    assert order == ["judged", "given back"]


def test_staleness_is_that_of_the_stalest_shard_added_up_over_pushes() -> None:
    job = Job(0)
    pushing = job.cluster.shards[1]
    job.model.before = lambda batch: push(pushing, 7, 1.0)  # another worker's, while step 0 is computed
    job.run()
    assert job.loop.session.transfers.staleness_pushes == 1


def test_a_model_may_tell_no_loss_and_push_nothing() -> None:
    job = Job(0, 1)
    gradients = job.model.loss_and_gradients
    before = [state_of(shard)[0] for shard in job.cluster.shards]

    def quiet(variables: Any, batch: Batch, xp: Any) -> Any:
        loss, computed = gradients(variables, batch, xp)
        return {0: (loss, StepSignal.NO_PUSH), 1: (StepSignal.NO_LOSS, StepSignal.NO_PUSH)}.get(
            batch.step, (loss, computed)
        )

    job.model.loss_and_gradients = quiet  # type: ignore[method-assign]
    job.run()
    assert [step.HasField("loss") for step in job.leasing.completions] == [True, False]
    assert [state_of(shard)[0] for shard in job.cluster.shards] == before, "two steps are in, and nothing has moved"
    assert all(len(shard.updates.applied) == 2 for shard in job.cluster.shards)


class TestReadingAhead:
    """Examples that a source lets be read in another thread are read while an earlier step is computed."""

    class Watched(Numbered):
        """Numbers, of those of step 3 none; says which thread asked."""

        def __init__(self, reads_ahead: bool = True) -> None:
            self.reads_ahead = reads_ahead
            self.readers: dict[int, str] = {}

        def examples_of(self, step: int, indices: Any) -> Any:
            self.readers[step] = threading.current_thread().name
            if step == 3:
                raise BadExample("example 7 is missing")
            return self.examples(indices)

    def test_another_thread_reads_and_the_result_is_the_same(self) -> None:
        source = self.Watched()
        job = Job(4, 5, 6, depth=1, source=source).run()
        assert set(source.readers.values()) == {"data_0"}
        assert job.applied == [[(4, 7)], [(4, 7)]]
        plain = Job(4, 5, 6, depth=1).run()
        assert all((job.weights()[name] == plain.weights()[name]).all() for name in ("bias", "weight"))

    @pytest.mark.parametrize(("ahead", "depth"), [(False, 1), (True, 0)])
    def test_else_the_loop_itself_reads(self, ahead: bool, depth: int) -> None:
        source = self.Watched(ahead)
        Job(*range(3), depth=depth, source=source).run()
        assert set(source.readers.values()) == {threading.current_thread().name}

    def test_a_step_that_killed_a_worker_is_read_once_it_is_announced(self) -> None:
        source = self.Watched()
        Job(0, pb.Grant(step=1, announce=True), depth=1, source=source).run()
        assert source.readers == {0: "data_0", 1: threading.current_thread().name}

    def test_an_example_that_cannot_be_read_fails_its_step_alone(self) -> None:
        job = Job(2, 3, 4, depth=1, source=self.Watched()).run()
        assert job.leasing.failures == {3: "example 7 is missing"}
        assert job.completed == [2, 4]

    def test_nothing_is_left_of_the_thread(self) -> None:
        Job(*range(3), depth=1, source=self.Watched()).run()
        eventually(lambda: not any(t.name.startswith("data_") for t in threading.enumerate()), "the thread's end")


class TestReadingMeanwhile:
    """Examples that draw nothing are read while what the model returned for the step before is still being computed."""

    class Watched(Numbered):
        """Numbers; says which steps' were read."""

        any_thread = True

        def __init__(self, order: list[str]) -> None:
            self.order = order

        def examples_of(self, step: int, indices: Any) -> Any:
            self.order.append(f"read {step}")
            if step == 3:
                raise BadExample("example 7 is missing")
            return self.examples(indices)

    class Late:
        """An array whose numbers are there when they are asked for, as JAX's are."""

        dtype = np.dtype(np.float32)

        def __init__(self, step: int, shape: tuple[int, ...], order: list[str]) -> None:
            self.step, self.shape, self.order = step, shape, order

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            self.order.append(f"wait {self.step}")
            return np.full(self.shape, self.step + 1.0, self.dtype)

    def ordered(
        self,
        *work: Any,
        depth: int = 1,
        draws_nothing: bool = True,
        expected: Callable[[int], int | None] | None = None,
    ) -> tuple[Job, list[str]]:
        order: list[str] = []
        source = self.Watched(order)
        source.any_thread = draws_nothing
        job = Job(*work, depth=depth, source=source)

        def returned(batch: Batch, gradients: dict[str, Any]) -> None:
            order.append(f"model {batch.step}")
            gradients["weight"] = self.Late(batch.step, gradients["weight"].shape, order)

        job.model.spoil = returned
        if expected is not None:
            job.leasing.expected = expected  # type: ignore[method-assign]
        return job.run(), order

    def test_between_the_model_and_its_results(self) -> None:
        job, order = self.ordered(0, 1, 2)
        assert order == ["read 0", "model 0", "read 1", "wait 0", "model 1", "read 2", "wait 1", "model 2", "wait 2"]
        assert (job.weights()["weight"] == 6).all()

    @pytest.mark.parametrize(("depth", "draws_nothing"), [(0, True), (1, False)])
    def test_not_where_nothing_is_leased_ahead_or_a_dataset_may_draw(self, depth: int, draws_nothing: bool) -> None:
        _, order = self.ordered(0, 1, depth=depth, draws_nothing=draws_nothing)
        assert order == ["read 0", "model 0", "wait 0", "read 1", "model 1", "wait 1"]

    def test_what_is_expected_is_read_then_too_and_again_only_if_another_step_comes(self) -> None:
        _, order = self.ordered(0, 1, 7, depth=0, expected=lambda step: step + 1 if step < 7 else None)
        assert order == [
            *("read 0", "model 0", "read 1", "wait 0", "model 1", "read 2", "wait 1"),
            *("read 7", "model 7", "wait 7"),
        ]

    def test_an_expected_step_that_killed_a_worker_is_announced_and_read_anew(self) -> None:
        job, order = self.ordered(0, pb.Grant(step=1, announce=True), depth=0, expected=lambda step: 1 - step or None)
        assert order == ["read 0", "model 0", "read 1", "wait 0", "read 1", "model 1", "wait 1"]
        assert job.leasing.announced == [1]

    def test_a_step_that_killed_a_worker_is_read_once_it_is_announced(self) -> None:
        _, order = self.ordered(0, pb.Grant(step=1, announce=True))
        assert order == ["read 0", "model 0", "wait 0", "read 1", "model 1", "wait 1"]

    def test_an_example_that_cannot_be_read_fails_its_step_alone(self) -> None:
        job, _ = self.ordered(2, 3, 4)
        assert job.leasing.failures == {3: "example 7 is missing"}
        assert job.completed == [2, 4]
