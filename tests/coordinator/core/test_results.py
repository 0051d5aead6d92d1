"""Warnings of the loss: of a job that is done or stops early, with the staleness of most pushes."""

from __future__ import annotations

from collections import Counter

from parashard_coordinator.core.progress import Staleness
from parashard_coordinator.core.results import job_ends, staleness_seen
from support.coordinator_cases import Caller, core_of, done


def test_a_job_whose_loss_stood_still_until_it_was_stopped_early_has_not_learned() -> None:
    core = core_of(steps_total=10_000)
    caller = Caller(core)
    for _ in range(30):
        caller.lease(10)
        caller.call(completed=done(*caller.held, loss=2.3))
    assert core.job.not_learned == "", "a small part of the job"
    core.job.stop_at_frontier("asked")
    staleness_seen(core.job, Staleness.of(Counter({0: 100, 2: 100})))
    job_ends(core.job)
    assert core.job.done_reason == "asked, but the model did not learn"
    assert core.job.not_learned.startswith("the training loss has not fallen: 2.3000 in the first 8 steps, 2.3000 in ")
    assert "(staleness mean 1.0, max 2); try " in core.job.not_learned
    core.job.mark_done()
    assert core.job.reason == "asked, but the model did not learn"


def test_staleness_is_left_out_until_the_shards_have_told_of_most_pushes() -> None:
    core = core_of(steps_total=10_000)
    caller = Caller(core)
    for _ in range(50):
        caller.lease(10)
        caller.call(completed=done(*caller.held, loss=float("nan")))
        staleness_seen(core.job, Staleness.of(Counter({0: 3})))
    [text] = core.job.problems.texts
    assert "staleness" not in text
    staleness_seen(core.job, Staleness.of(Counter({0: 300, 6: 150})))
    [text] = core.job.problems.texts
    assert " (staleness mean 2.0, max 6); " in text
