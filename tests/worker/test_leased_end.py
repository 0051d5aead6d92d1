"""Answers that do not come, and a worker's end: nothing is lost, nothing is kept, in virtual time."""

from __future__ import annotations

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import (
    JobFailed,
    NotReady,
    ParashardError,
    PeerFailed,
    Superseded,
    UnknownWorker,
    Unreachable,
    WrongRun,
)
from parashard_coordinator.endpoints.service import REQUEST_BYTES_MAX
from parashard_worker.leased import REPORTS_MAX, RETRY_PAUSE_S, UNSTORED_MAX, Joined
from support.leased_cases import DONE, FAILED, RETRY_BUDGET_S, Worker, reported

# --- answers that do not come ---


def test_a_lost_answer_is_asked_for_again_soon_with_everything_in_it() -> None:  # P5
    worker = Worker().granted(0, 1)
    worker.take()
    worker.take()
    worker.complete(0)
    worker.work.failed(1, "bad", worker.now_s)
    worker.work.evaluated(pb.EvaluationResult(evaluation=4, metrics={"loss": 1.0}))
    lost = worker.call()
    worker.work.lost(Unreachable("no answer"), worker.now_s)
    assert worker.due_in_s == pytest.approx(RETRY_PAUSE_S)  # one renewal, not a lease time
    again = worker.call()
    assert again.sequence == lost.sequence + 1
    again.sequence = lost.sequence
    assert again == lost
    worker.answer(again)
    final = worker.call()
    assert (reported(final), len(final.failed), len(final.evaluated)) == ([], 0, 0)


def test_a_lost_renewal_is_repeated_even_where_nothing_else_is_due() -> None:
    worker = Worker().granted(0, 1, 2)
    worker.call()
    worker.work.lost(Unreachable("no answer"), worker.now_s)
    assert worker.due_in_s == pytest.approx(RETRY_PAUSE_S)


def test_what_is_reported_while_a_call_is_under_way_waits_for_the_next() -> None:
    worker = Worker().granted(0, 1)
    worker.complete(worker.take())
    under_way = worker.call()
    worker.complete(worker.take())
    worker.answer(under_way)
    assert reported(worker.call()) == [1]


def test_what_fails_or_is_judged_while_a_call_is_under_way_waits_for_the_next() -> None:
    worker = Worker().granted(0, 1)
    worker.work.failed(worker.take(), "no", worker.now_s)
    worker.work.evaluated(pb.EvaluationResult(evaluation=4))
    under_way = worker.call()
    worker.work.failed(worker.take(), "neither", worker.now_s)
    worker.work.evaluated(pb.EvaluationResult(evaluation=8))
    worker.answer(under_way)
    request = worker.call()
    assert ([f.step for f in request.failed], [e.evaluation for e in request.evaluated]) == ([1], [8])


def test_steps_of_a_lost_answer_are_not_held() -> None:  # the coordinator sees that, and leases them again
    worker = Worker()
    worker.call()  # grants 0 and 1, and the answer is lost
    worker.work.lost(Unreachable("no answer"), worker.now_s)
    assert list(worker.call().held) == []


def test_retries_to_an_absent_coordinator_are_bounded() -> None:
    worker = Worker().granted(0)
    step, began_s = worker.take(), worker.now_s
    while worker.work.failure is None:
        assert list(worker.call().held) == [step]
        worker.work.lost(Unreachable("no answer"), worker.now_s)
    assert worker.now_s - began_s == pytest.approx(RETRY_BUDGET_S, abs=2 * RETRY_PAUSE_S)
    assert isinstance(worker.work.failure, Unreachable)


def test_an_answer_renews_the_retry_budget() -> None:
    worker = Worker(ahead=0).granted(0)
    for _ in range(3):
        worker.now_s += 10 * RETRY_BUDGET_S  # long silences of its own count for nothing
        worker.call()
        worker.now_s += RETRY_BUDGET_S - 1.0
        worker.work.lost(Unreachable("no answer"), worker.now_s)
        worker.granted()
    assert worker.work.failure is None


@pytest.mark.parametrize(
    "error", [Superseded("a later incarnation"), WrongRun("another"), PeerFailed("bug"), JobFailed("no")]
)
def test_a_refusal_is_the_workers_end(error: Exception) -> None:  # P3
    worker = Worker().granted(0, 1)
    worker.call()
    worker.work.lost(error, worker.now_s)  # type: ignore[arg-type]
    assert worker.work.failure is error
    assert (worker.work.over, worker.work.take(worker.now_s)) == (True, None)
    assert worker.work.request(worker.now_s, {}) is None


# --- a coordinator that was started again ---


def test_a_worker_joins_again_at_once_and_after_a_pause_if_that_fails() -> None:
    worker = Worker().granted(0)
    worker.call()
    worker.work.lost(UnknownWorker("worker-0 is not known"), worker.now_s)
    assert worker.due_in_s == 0.0
    worker.work.lost(NotReady("starting"), worker.now_s)
    assert worker.due_in_s == pytest.approx(RETRY_PAUSE_S)


def test_a_coordinator_that_does_not_know_the_worker_is_joined_again_and_nothing_is_lost() -> None:  # P5
    worker = Worker().granted(0, 1, 2)
    worker.complete(worker.take())
    under_way = worker.take()
    unanswered = worker.call()
    worker.work.lost(UnknownWorker("worker-0 is not known"), worker.now_s)
    assert (worker.work.must_rejoin, worker.work.over, worker.work.failure) == (True, False, None)
    assert worker.due_in_s == 0.0
    worker.work.joined_again(Joined("run-1", "worker-0", 900, 9.0))
    assert not worker.work.must_rejoin
    again = worker.call()
    assert (again.incarnation, again.worker) == (900, "worker-0")
    assert again.sequence > unanswered.sequence
    assert (sorted(again.held), reported(again)) == ([under_way, 2], [0]), "what it has computed is not computed again"


def test_a_new_coordinator_is_told_again_of_the_steps_that_the_earlier_one_has_not_stored() -> None:
    worker = Worker(ahead=9).granted(0, 1, 2)
    stored = 0
    for stored_then in (0, 1, 1):
        worker.complete(worker.take())
        request = worker.call()
        stored = stored or request.sequence
        worker.answer(request, stored=stored * stored_then)
    worker.work.lost(UnknownWorker("worker-0 is not known"), worker.now_s)
    worker.work.joined_again(Joined("run-1", "worker-0", 900, 9.0))
    assert reported(worker.call()) == [1, 2], "step 0 was in the first of these reports"
    worker.granted()
    assert reported(worker.call()) == []


def test_what_is_kept_for_a_new_coordinator_is_bounded_and_fits_its_calls() -> None:
    worker = Worker()
    worker.work._unstored.extend((1, pb.CompletedStep(step=step)) for step in range(UNSTORED_MAX + 5))
    worker.work.joined_again(Joined("run-1", "worker-0", 900, 9.0))
    told = []
    while len(told) < UNSTORED_MAX:
        request = worker.call()
        assert 0 < len(request.completed) <= REPORTS_MAX
        told += reported(request)
        worker.answer(request)
    assert told == list(range(5, UNSTORED_MAX + 5))


def test_a_report_of_large_metrics_takes_several_calls() -> None:
    worker = Worker()
    large = pb.MetricSums(name="auc", values=[1.0] * 4000)
    for step in range(60):
        worker.work.completed(pb.CompletedStep(step=step, metrics=[large]), worker.now_s)
    told = []
    while len(told) < 60:
        request = worker.call()
        assert 0 < request.ByteSize() < REQUEST_BYTES_MAX
        told += reported(request)
        worker.answer(request)
    assert told == list(range(60))


def test_a_guest_goes_on_under_the_name_that_the_new_coordinator_gives_it() -> None:
    worker = Worker()
    worker.call()
    worker.work.lost(UnknownWorker("guest-0 is not known"), worker.now_s)
    worker.work.joined_again(Joined("run-1", "guest-3", 900, 30.0))
    request = worker.call()
    assert request.worker == "guest-3"
    worker.granted(0, 1, 2)
    assert worker.due_in_s == pytest.approx(10.0), "its lease time is the one that counts now"


def test_a_coordinator_that_falls_before_it_is_joined_is_waited_for() -> None:
    worker = Worker().granted(0)
    step = worker.take()
    worker.call()
    worker.work.lost(UnknownWorker("worker-0 is not known"), worker.now_s)
    worker.work.lost(Unreachable("gone again"), worker.now_s)
    assert (worker.work.must_rejoin, worker.work.failure) == (False, None)
    assert list(worker.call().held) == [step]


@pytest.mark.parametrize("error", [UnknownWorker("who?"), NotReady("starting")], ids=lambda e: e.code)
def test_retries_to_a_coordinator_that_never_accepts_the_worker_are_bounded(error: ParashardError) -> None:
    worker = Worker()
    began_s = worker.now_s
    while worker.work.failure is None:
        worker.call()
        worker.work.lost(error, worker.now_s)
    assert worker.now_s - began_s == pytest.approx(RETRY_BUDGET_S, abs=2 * RETRY_PAUSE_S)


def test_a_leaving_worker_does_not_join_again() -> None:
    worker = Worker().granted(0)
    worker.work.leave()
    worker.call()
    worker.work.lost(UnknownWorker("worker-0 is not known"), worker.now_s)
    assert (worker.work.must_rejoin, worker.work.ended, worker.work.failure) == (False, True, None)


# --- the end ---


@pytest.mark.parametrize("state", [DONE, FAILED])
def test_the_jobs_end_ends_the_worker(state: pb.JobState) -> None:
    worker = Worker()
    worker.answer(worker.call(), 5, state=state, reason="that is all", view=7)
    assert (worker.work.over, worker.work.failure, worker.work.reason, worker.work.view) == (
        True,
        None,
        "that is all",
        7,
    )
    assert worker.work.request(worker.now_s, {}) is None


def test_draining_is_not_the_end() -> None:  # P8: what was leased is finished
    worker = Worker()
    worker.answer(worker.call(), 5, state=pb.JOB_STATE_DRAINING)
    assert worker.take() == 5


def test_leaving_gives_everything_back_and_reports_what_is_done() -> None:
    worker = Worker().granted(0, 1, 2)
    worker.complete(worker.take())
    worker.take()  # under way, and never finished
    worker.work.leave()
    assert (worker.due_in_s, worker.work.over, worker.work.take(worker.now_s)) == (0.0, True, None)
    request = worker.call()
    assert (request.leaving, list(request.held), reported(request), request.want, request.wait_s) == (
        True,
        [],
        [0],
        0,
        0.0,
    )
    worker.answer(request)
    assert worker.work.request(worker.now_s, {}) is None


def test_leaving_does_not_wait_for_the_renewal() -> None:
    worker = Worker().granted(0)
    worker.take()
    worker.answer(worker.call())
    assert worker.due_in_s > 0
    worker.work.leave()
    assert worker.due_in_s == 0.0


def test_leaving_while_a_call_is_under_way_still_gives_back_what_it_grants() -> None:  # P5
    worker = Worker()
    under_way = worker.call()
    worker.work.leave()
    worker.answer(under_way, 0, 1)
    assert (worker.work.take(worker.now_s), worker.work.ended) == (None, False)
    request = worker.call()
    assert (request.leaving, list(request.held)) == (True, [])


def test_a_leaving_worker_does_not_wait() -> None:
    idle = Worker()
    idle.work.leave()
    assert idle.call().wait_s == 0.0
    worker = Worker().granted(0)
    worker.work.leave()
    worker.call()
    worker.work.lost(Unreachable("gone"), worker.now_s)
    assert (worker.work.ended, worker.work.failure) == (True, None)


def test_a_leaving_worker_still_learns_that_it_was_replaced() -> None:
    worker = Worker().granted(0)
    worker.work.leave()
    worker.call()
    worker.work.lost(Superseded("a later incarnation"), worker.now_s)
    assert isinstance(worker.work.failure, Superseded)
