"""BatchEnds: callbacks hear of batches, whatever parts of them the workers computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from parashard.checkpoints.encoding import decode, encode
from parashard_coordinator.core.batch_ends import BatchEnd, BatchEnds, StepResult
from parashard_coordinator.core.callbacks import follow
from parashard_coordinator.core.calls import FollowCall, Options
from parashard_coordinator.core.evaluations import Evaluations
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.policies import Auto
from parashard_coordinator.core.rounds import Rounds
from parashard_coordinator.core.saved import Saved
from parashard_coordinator.core.supervision import Launcher
from parashard_coordinator.core.training_figures import MetricSums


def part(step: int, loss: float | None, examples: int, right: float = 0.0) -> StepResult:
    return StepResult(
        step, loss, examples, [MetricSums("accuracy", "mean", [right, float(examples)])] if examples else []
    )


def told(parts: Sequence[StepResult], of_batch: int = 3) -> list[BatchEnd]:
    ends = BatchEnds(of_batch)
    for one in [*parts, *parts]:  # computed again
        ends.step_completed(one)
    return ends.since(0)[0]


BATCH = [part(3, 1.0, 8, 8.0), part(4, 0.5, 4, 1.0), part(5, 0.25, 4, 0.0)]


@given(st.permutations(BATCH))
def test_a_batch_is_told_once_with_the_mean_over_its_examples_in_whatever_order_its_parts_come(
    parts: list[StepResult],
) -> None:
    assert told(parts) == [BatchEnd(3, (8 * 1.0 + 4 * 0.5 + 4 * 0.25) / 16, {"accuracy": 9 / 16})]


def test_a_batch_that_lacks_a_part_is_not_told() -> None:
    assert told(BATCH[:2]) == []


def test_parts_without_examples_and_skipped_ones_do_not_count() -> None:
    short = [part(0, 0.3, 5, 2.0), part(1, 0.0, 0), part(2, 0.0, 0)]
    assert told(short) == [BatchEnd(0, 0.3, {"accuracy": 0.4})]
    skipped = [part(0, 0.3, 4, 2.0), part(1, None, 0), part(2, 0.5, 4, 1.0)]
    assert told(skipped) == [BatchEnd(0, 0.4, {"accuracy": 3 / 8})]
    (nothing,) = told([part(0, None, 0), part(1, None, 0), part(2, 0.0, 0)])
    assert (math.isnan(nothing.loss), nothing.metrics) == (True, {})


def test_a_step_that_is_a_batch_is_told_as_it_is() -> None:
    assert told([part(7, 0.1, 0)], of_batch=1) == [BatchEnd(7, 0.1)]


def record(saved: Saved | None = None) -> JobRecord:
    options = Options("run", "digest", 12, 0, 1, steps_per_epoch=6)
    job = JobRecord(options, Auto(3), Evaluations([], Auto(3), 12), Launcher(), Rounds())
    if saved is not None:
        job.resume(saved)
    return job


def test_a_new_coordinator_tells_a_batch_of_which_the_one_before_knew_a_part() -> None:
    job = record()
    for one in (part(0, 1.0, 4), part(1, 1.0, 4), part(2, 1.0, 4), *BATCH[1:]):
        job.callback_progress.step_completed(one)
    successor = record(decode(Saved, encode(job.saved()), "saved"))
    for one in BATCH:  # two are reported again
        successor.callback_progress.step_completed(one)
    ends = follow(successor, FollowCall(wants_steps=True)).steps
    assert ends == [BatchEnd(0, 1.0, {"accuracy": 0.0}), BatchEnd(3, 0.6875, {"accuracy": 9 / 16})]
    assert job.saved().returned_to(3).parts == ()
