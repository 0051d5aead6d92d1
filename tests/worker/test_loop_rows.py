"""The step loop with embedding tables: a batch is read and looked up before its pull, whose rows its model is given."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.data.base import Batch
from parashard.models.base import StepSignal
from parashard.plan.embedding import EmbeddingTable, mixed
from parashard.process.run_files import short_path
from parashard.protocol.messages import PullRun, Push
from support.in_process import COUNTING
from support.loop_cases import HELD_OUT, Counting, Job, Numbered, evaluation
from support.waiting import eventually

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
SEEN = EmbeddingTable("seen", 1, COUNTING)
"""Its rows begin at 0 and add up what is pushed: the number of a key's uses."""
SHARED = 1000


class Looking(Counting):
    """A model whose table counts uses: an example has a key of its own, and shares one with every third.

    `naming` is called first with each batch whose keys are asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.naming: Callable[[Batch], None] = lambda batch: None
        self.named: list[int] = []
        self.given: dict[int, Any] = {}

    def keys(self, batch: Batch) -> Mapping[str, Any]:
        self.naming(batch)
        self.named.append(batch.step)
        return {"seen": np.stack([batch.indices, SHARED + batch.indices % 3], axis=1)}

    def loss_and_gradients(
        self, variables: Mapping[str, Any], batch: Batch, xp: Any
    ) -> tuple[float, Mapping[str, Any]]:
        self.given[batch.step] = variables["seen"][batch.places["seen"], 0]
        loss, gradients = super().loss_and_gradients(variables, batch, xp)
        uses = np.bincount(batch.places["seen"].ravel(), minlength=len(variables["seen"]))
        return loss, {**gradients, "seen": uses[:, None].astype(np.float32)}

    def evaluate(self, variables: Mapping[str, Any], batch: Batch, xp: Any) -> Mapping[str, float]:
        return {"uses": float(variables["seen"][batch.places["seen"]].mean())}


class ReadAhead(Numbered):
    """Numbers that another thread may read."""

    reads_ahead = True


def job_of(*work: Any, table: EmbeddingTable = SEEN, **more: Any) -> tuple[Job, Looking]:
    model = Looking()
    return Job(*work, model=model, tables=(table,), **more), model


def uses_of(job: Job, steps: list[int]) -> Counter[int]:
    """Return how often these steps use each key."""
    examples = [int(index) for step in steps for index in job.steps.indices(step)]
    return Counter([*examples, *(SHARED + index % 3 for index in examples)])


def assert_counted(job: Job, steps: list[int], scale: float = 1.0, round_: int | None = None) -> None:
    """Assert that the rows of all keys are as often as these steps use them, and no other key has a row."""
    due = uses_of(job, steps)
    ids = [*range(20), *range(SHARED, SHARED + 3)]
    keys = mixed(np.array(ids))
    order = np.argsort(keys)
    found = job.cluster.client().pull(round_=round_, keys={"seen": keys[order]}).rows["seen"][:, 0]
    assert {ids[at]: value for at, value in zip(order, found.tolist(), strict=True)} == {
        key: due[key] * scale for key in ids
    }
    assert sum(shard.tables.rows for shard in job.cluster.shards if shard.tables is not None) == len(due)


@DEPTHS
@pytest.mark.parametrize("source", [Numbered, ReadAhead])
def test_every_use_of_a_leased_step_is_in_its_row(depth: int, source: type[Numbered]) -> None:
    job, model = job_of(*range(10), depth=depth, source=source())
    job.run()
    assert job.completed == model.computed == list(range(10))
    assert sorted(model.named) == list(range(10)), "once each"
    assert_counted(job, list(range(10)))
    assert (job.weights()["weight"] == sum(range(1, 11))).all()
    assert (job.leasing.failures, job.leasing.drops) == ({}, [])


def test_each_use_of_a_key_finds_its_row_as_it_is() -> None:
    job, model = job_of(*range(6))
    job.run()
    for step in range(6):
        before = uses_of(job, list(range(step)))
        due = [[before[index], before[SHARED + index % 3]] for index in job.steps.indices(step).tolist()]
        assert model.given[step].tolist() == due


def test_rows_are_those_of_the_round() -> None:  # P11
    job, model = job_of(*range(4), round_steps=2)
    job.run()
    assert not model.given[1].any(), "step 0 is of the same round"
    assert_counted(job, [0, 1, 2, 3], scale=0.5, round_=2)


@pytest.mark.parametrize("depth", [1, 2])
def test_another_thread_looks_up_what_another_thread_reads(depth: int) -> None:
    threads: set[str] = set()
    job, model = job_of(*range(4), depth=depth, source=ReadAhead())
    model.naming = lambda batch: threads.add(threading.current_thread().name)
    job.run()
    assert threads == {"data_0"}


def test_depth_0_looks_up_before_it_pulls() -> None:
    order: list[Any] = []
    job, model = job_of(0, 1)
    model.naming = lambda batch: order.append("keys")
    model.before = lambda batch: order.append("model")
    job.cluster.before = lambda address, request: order.append(type(request))
    job.run()
    assert order == ["keys", *[PullRun] * 2, "model", Push, Push] * 2


def test_a_step_to_skip_needs_no_row() -> None:  # P6
    job, model = job_of(0, pb.Grant(step=1, skip=True), 2)
    job.run()
    assert (model.named, job.completed) == ([0, 2], [0, 1, 2])
    assert [(push.rows, push.payload.nbytes) for push in job.cluster.pushes if push.step == 1] == [((), 0)] * 2
    assert_counted(job, [0, 2])


def test_a_step_that_moves_nothing_moves_no_row() -> None:
    job, model = job_of(0)
    model.loss_and_gradients = lambda *_: (0.5, StepSignal.NO_PUSH)  # type: ignore[method-assign,assignment]
    job.run()
    assert job.completed == [0]
    assert_counted(job, [])


@DEPTHS
def test_a_stop_gives_back_what_is_looked_up_and_not_computed(depth: int) -> None:
    job, model = job_of(*range(10), depth=depth)
    job.run(stopping=lambda: len(model.computed) >= 3)
    assert job.completed == [0, 1, 2]
    assert job.leasing.drops == list(range(3, 3 + depth))
    assert_counted(job, [0, 1, 2])


# --- what fails ---


@DEPTHS
@pytest.mark.parametrize("source", [Numbered, ReadAhead])
def test_keys_that_raise_fail_their_step_and_no_other(depth: int, source: type[Numbered]) -> None:  # P6
    def broken(batch: Batch) -> None:
        if batch.step == 2:
            raise ZeroDivisionError("no such column\nnor any other")

    job, model = job_of(*range(5), depth=depth, source=source())
    model.naming = broken
    job.run()
    line = broken.__code__.co_firstlineno + 2
    assert job.leasing.failures == {2: f"{short_path(__file__)}:{line}: ZeroDivisionError: no such column"}
    assert job.leasing.kinds == {2: pb.FAILURE_KIND_MODEL}
    assert job.completed == model.computed == [0, 1, 3, 4]
    assert_counted(job, [0, 1, 3, 4])


@DEPTHS
def test_keys_of_another_table_fail_their_step(depth: int) -> None:
    job, model = job_of(0, 1, depth=depth)
    keys = model.keys
    model.keys = lambda batch: {"item": keys(batch)["seen"]} if batch.step == 0 else keys(batch)  # type: ignore[method-assign]
    job.run()
    assert job.leasing.failures[0].endswith("keys named the table 'item'; the job has: seen")
    assert job.leasing.kinds == {0: pb.FAILURE_KIND_MODEL}
    assert job.completed == [1]


@DEPTHS
def test_a_table_that_is_full_is_no_step_s_to_mend(depth: int) -> None:  # P34
    job, model = job_of(0, depth=depth, table=EmbeddingTable("seen", 1, COUNTING, rows_max=1))
    job.run()
    assert model.computed == [0]
    assert "table 'seen' has 0 rows on this shard, of at most 1: no room for" in job.leasing.failures[0]
    assert job.leasing.kinds == {0: pb.FAILURE_KIND_WRONG_RESULT}
    assert (job.completed, job.leasing.drops) == ([], [])


# --- a step at which a worker died ---


@DEPTHS
@pytest.mark.parametrize("source", [Numbered, ReadAhead])
def test_a_step_is_announced_before_its_keys_are_asked_for(depth: int, source: type[Numbered]) -> None:  # P26
    seen: dict[int, list[int]] = {}
    job, model = job_of(
        0, pb.Grant(step=1, announce=True), pb.Grant(step=2, skip=True), 3, depth=depth, source=source()
    )
    model.naming = lambda batch: seen.update({batch.step: list(job.leasing.announced)})
    job.run()
    assert seen.keys() == {0, 1, 3}
    assert (seen[0], seen[1]) == ([], [1])
    assert job.leasing.announced == [1], "once"
    assert sorted(job.completed) == [0, 1, 2, 3]
    assert_counted(job, [0, 1, 3])


@DEPTHS
def test_a_step_whose_announcement_is_not_answered_is_given_back_unread(depth: int) -> None:
    job, model = job_of(pb.Grant(step=0, announce=True), 1, depth=depth)
    job.leasing.known = False
    job.run()
    assert (job.leasing.drops, job.completed, model.named) == ([0], [1], [1])


@DEPTHS
def test_the_keys_of_a_step_and_of_an_evaluation_are_asked_for_under_watch(depth: int) -> None:  # P26
    """One that hangs there is reported as hung, as one that hangs in the model is."""
    job, model = job_of(0, pb.Grant(step=1, announce=True), evaluation(7), depth=depth)
    watched: list[Any] = []
    model.naming = lambda batch: watched.append(tuple(job.leasing.watched))
    job.run()
    assert [[getattr(work, "step", None) for work in works] for works in watched] == [[0], [1], [None], [None]]
    assert job.leasing.watched == []


@DEPTHS
def test_the_keys_of_a_step_that_another_thread_reads_are_waited_for_under_watch(depth: int) -> None:
    job, model = job_of(0, 1, depth=depth, source=ReadAhead())
    model.naming = lambda batch: eventually(
        lambda: [work.step for work in job.leasing.watched] == [batch.step], "it is watched"
    )
    job.run()
    assert sorted(job.completed) == [0, 1]


# --- evaluations ---


def test_an_evaluation_judges_the_rows_of_all_held_out_examples() -> None:
    job, _ = job_of(0, 1, 2, evaluation(3))
    job.run()
    due = uses_of(job, [0, 1, 2])
    uses = [due[key] for index in range(HELD_OUT) for key in (index, SHARED + index % 3)]
    metrics, error = job.leasing.evaluations[3]
    assert metrics["uses"] == pytest.approx(np.mean(uses))
    assert error == ""
    assert_counted(job, [0, 1, 2])  # judging makes no row


def test_keys_that_raise_in_an_evaluation_are_reported() -> None:
    def broken(batch: Batch) -> None:
        if batch.step < 0:
            raise ZeroDivisionError("no such column")

    job, model = job_of(evaluation(5), 0)
    model.naming = broken
    job.run()
    assert job.leasing.evaluations[5] == (
        {},
        f"{short_path(__file__)}:{broken.__code__.co_firstlineno + 2}: ZeroDivisionError: no such column",
    )
    assert job.leasing.evaluation_kinds == {5: pb.FAILURE_KIND_MODEL}
    assert job.completed == [0]


def test_an_evaluation_over_a_change_of_incarnation_between_variables_and_rows_is_given_back() -> None:  # P16
    job, _ = job_of(evaluation(5))

    def before(address: str, request: Push | PullRun) -> None:
        if address == "shard-1" and isinstance(request, PullRun) and request.keys:
            shard = job.cluster.shards[1]
            shard.identity = shard.identity._replace(incarnation=2)
            job.leasing.view = 2

    job.cluster.before = before
    job.run()
    assert (job.leasing.dropped_evaluations, job.leasing.evaluations) == ([5], {})


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()])
def test_keys_that_end_the_process_by_an_exception_fail_the_step(error: BaseException) -> None:
    job, model = job_of(0, 1)

    def ends(batch: Batch) -> None:
        if batch.step == 0:
            raise error

    model.naming = ends
    job.run()
    assert list(job.leasing.failures) == [0]
    assert job.completed == [1]


@DEPTHS
def test_a_probe_pulls_the_rows_of_its_batch_and_leaves_them_as_they_are(depth: int) -> None:
    job, model = job_of(0, 1, pb.Grant(step=2, probe=True), *range(3, 10), depth=depth)
    job.run()
    assert [found.step for found in job.leasing.drifts] == [2]
    assert model.computed.count(2) == 2
    assert_counted(job, list(range(10)))
