"""What a worker says to the coordinator and when, in virtual time: leases, reports, renewals, lost answers, leaving."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parashard.errors import JobFailed, PeerFailed, RetryLater, Superseded, Unreachable, WrongRun
from protos import coordinator_pb2 as pb
from worker.leased import IDLE_WAIT_S, PATIENCE_S, RETRY_PAUSE_S, Joined, LeasedWork

TTL_S, STEP_TIMEOUT_S = 9.0, 100.0
RUNNING, DONE, FAILED = pb.JOB_STATE_RUNNING, pb.JOB_STATE_DONE, pb.JOB_STATE_FAILED


class Worker:
    """A worker and its clock."""

    def __init__(self, *, batch: int = 8, ahead: int = 1) -> None:
        joined = Joined("run-1", "worker-0", 3, TTL_S)
        self.now_s = 50.0
        self.work = LeasedWork(joined, batch=batch, ahead=ahead, step_timeout_s=STEP_TIMEOUT_S, now_s=self.now_s)

    @property
    def due_in_s(self) -> float:
        return self.work.due_in_s(self.now_s)

    def call(self) -> pb.LeaseRequest:
        """Wait until a call is due, and make it."""
        self.now_s += self.due_in_s
        request = self.work.request(self.now_s, {"pull": 1.5})
        assert request is not None
        return request

    def answer(self, request: pb.LeaseRequest, *steps: int, **fields: object) -> None:
        fields = {"state": RUNNING, "view": 1, **fields}
        self.work.accept(request, pb.LeaseReply(granted=[pb.Grant(step=s) for s in steps], **fields), self.now_s)

    def granted(self, *steps: int) -> Worker:
        self.answer(self.call(), *steps)
        return self

    def take(self) -> int:
        work = self.work.take(self.now_s)
        assert isinstance(work, pb.Grant)
        return work.step

    def complete(self, step: int, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.work.completed(pb.CompletedStep(step=step, loss=0.5), self.now_s)


def reported(request: pb.LeaseRequest) -> list[int]:
    return [c.step for c in request.completed]


# --- asking ---


def test_a_new_worker_asks_at_once_and_lets_the_coordinator_wait() -> None:
    worker = Worker()
    assert worker.due_in_s == 0.0
    request = worker.call()
    assert (request.run_id, request.worker, request.incarnation, request.sequence) == ("run-1", "worker-0", 3, 1)
    assert (request.want, request.wait_s, list(request.held)) == (2, IDLE_WAIT_S, [])  # no more until it knows its pace
    assert request.phases.pull == 1.5


def test_granted_steps_are_taken_in_order_and_held_until_reported() -> None:
    worker = Worker().granted(4, 5)
    assert [worker.take(), worker.take(), worker.work.take(worker.now_s)] == [4, 5, None]
    assert sorted(worker.call().held) == [4, 5]


def test_an_evaluation_is_held_and_reported_likewise() -> None:
    worker = Worker()
    worker.answer(worker.call(), 7, evaluations=[pb.EvaluationGrant(evaluation=2)])
    assert list(worker.call().held_evaluations) == [2]  # in the queue
    assert isinstance(worker.work.take(worker.now_s), pb.EvaluationGrant)
    request = worker.call()
    assert list(request.held_evaluations) == [2]  # in the works
    worker.answer(request)
    assert worker.due_in_s > 0
    worker.work.evaluated(2, {"loss": 0.25}, "")
    assert worker.due_in_s == 0.0  # an outcome is told at once
    request = worker.call()
    assert (list(request.held_evaluations), dict(request.evaluated[0].metrics)) == ([], {"loss": 0.25})


def test_a_full_queue_asks_for_nothing_until_the_renewal() -> None:  # P5
    worker = Worker(ahead=1).granted(0, 1, 2)
    assert worker.due_in_s == pytest.approx(TTL_S / 3)
    worker.complete(worker.take())  # two still wait
    assert worker.due_in_s == pytest.approx(TTL_S / 3)


def test_at_low_water_it_asks_for_more_with_the_report() -> None:
    worker = Worker(ahead=1).granted(0, 1, 2)
    done = worker.take()
    worker.take()
    assert worker.due_in_s == 0.0  # one waits, and the last answer had something
    worker.complete(done)
    request = worker.call()
    assert (reported(request), sorted(request.held), request.want > 0) == ([0], [1, 2], True)


def test_nothing_granted_is_asked_again_only_with_a_report_or_a_renewal() -> None:
    worker = Worker(ahead=1).granted(0, 1)
    step, _ = worker.take(), worker.take()
    worker.answer(worker.call())  # nothing
    assert worker.due_in_s == pytest.approx(TTL_S / 3)
    worker.complete(step)
    assert worker.due_in_s == 0.0


def test_an_idle_worker_pauses_as_long_as_the_coordinator_says() -> None:
    worker = Worker()
    worker.answer(worker.call(), retry_after_s=0.25)
    assert worker.due_in_s == pytest.approx(0.25)
    assert worker.call().wait_s == IDLE_WAIT_S


def test_a_busy_worker_is_not_kept_waiting() -> None:
    worker = Worker().granted(0)
    worker.take()
    assert worker.call().wait_s == 0.0


@pytest.mark.parametrize(("step_s", "want"), [(0.001, 16), (0.05, 5), (0.1, 2), (10.0, 2)])
def test_a_worker_holds_about_a_quarter_second_of_steps(step_s: float, want: int) -> None:
    worker = Worker(batch=16, ahead=1)
    for step in range(40):
        worker.granted(step)
        worker.take()
        worker.complete(step, step_s)
    assert worker.call().want == want


def test_time_without_work_is_not_the_steps_time() -> None:
    worker = Worker(batch=16)
    for step in range(5):
        worker.granted(step)
        worker.take()
        worker.complete(step, 0.01)
        worker.answer(worker.call(), retry_after_s=1.0)
        worker.now_s += 60.0  # nothing to do
    assert worker.call().want == 16


# --- renewing ---


def test_what_is_held_is_renewed_on_a_timer() -> None:  # P5
    worker = Worker().granted(0, 1, 2)
    worker.take()
    for _ in range(3):
        before_s = worker.now_s
        request = worker.call()
        assert worker.now_s - before_s == pytest.approx(TTL_S / 3)
        assert sorted(request.held) == [0, 1, 2]
        worker.answer(request)


def test_a_dropped_step_is_no_longer_listed_and_so_is_free() -> None:  # P5
    worker = Worker().granted(0, 1, 2)
    worker.work.dropped(worker.take(), worker.now_s)
    request = worker.call()
    assert (sorted(request.held), reported(request), len(request.failed)) == ([1, 2], [], 0)


def test_a_failed_step_is_told_at_once() -> None:  # P6
    worker = Worker().granted(0, 1, 2)
    worker.work.failed(worker.take(), "x" * 900, worker.now_s)
    assert worker.due_in_s == 0.0
    request = worker.call()
    assert [(f.step, len(f.reason)) for f in request.failed] == [(0, 500)]


def test_revoked_steps_leave_the_queue_but_not_the_works() -> None:
    worker = Worker().granted(0, 1, 2)
    worker.take()
    worker.answer(worker.call(), revoked=[0, 2])
    assert list(worker.call().held) == [1, 0]
    assert (worker.take(), worker.work.take(worker.now_s)) == (1, None)


def test_a_hung_step_ends_renewals_and_the_worker() -> None:
    worker = Worker().granted(0, 1, 2)
    worker.take()
    worker.now_s += STEP_TIMEOUT_S
    worker.answer(worker.call())
    worker.now_s += worker.due_in_s
    assert worker.work.request(worker.now_s, {}) is None
    assert isinstance(worker.work.failure, RetryLater)
    assert "step 0 has taken over 100 s" in str(worker.work.failure)
    assert (worker.work.over, worker.work.take(worker.now_s), worker.due_in_s) == (True, None, 0.0)


# --- answers that do not come ---


def test_a_lost_answer_is_asked_for_again_soon_with_everything_in_it() -> None:  # P5
    worker = Worker().granted(0, 1)
    worker.take()
    worker.take()
    worker.complete(0)
    worker.work.failed(1, "bad", worker.now_s)
    worker.work.evaluated(4, {"loss": 1.0})
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


def test_steps_of_a_lost_answer_are_not_held() -> None:  # the coordinator sees that, and leases them again
    worker = Worker()
    worker.call()  # grants 0 and 1, and the answer is lost
    worker.work.lost(Unreachable("no answer"), worker.now_s)
    assert list(worker.call().held) == []


def test_patience_with_a_coordinator_that_is_away_has_an_end() -> None:
    worker = Worker().granted(0)
    step, began_s = worker.take(), worker.now_s
    while worker.work.failure is None:
        assert list(worker.call().held) == [step]
        worker.work.lost(Unreachable("nobody there"), worker.now_s)
    assert worker.now_s - began_s == pytest.approx(PATIENCE_S, abs=2 * RETRY_PAUSE_S)
    assert isinstance(worker.work.failure, Unreachable)


def test_an_answer_renews_the_patience() -> None:
    worker = Worker(ahead=0).granted(0)
    for _ in range(3):
        worker.now_s += 10 * PATIENCE_S  # long silences of its own count for nothing
        worker.call()
        worker.now_s += PATIENCE_S - 1.0
        worker.work.lost(Unreachable("nobody there"), worker.now_s)
        worker.granted()
    assert worker.work.failure is None


@pytest.mark.parametrize("error", [Superseded("a later life"), WrongRun("another"), PeerFailed("bug"), JobFailed("no")])
def test_a_refusal_is_the_workers_end(error: Exception) -> None:  # P3
    worker = Worker().granted(0, 1)
    worker.call()
    worker.work.lost(error, worker.now_s)  # type: ignore[arg-type]
    assert worker.work.failure is error
    assert (worker.work.over, worker.work.take(worker.now_s)) == (True, None)
    assert worker.work.request(worker.now_s, {}) is None


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


def test_whoever_leaves_waits_for_nobody() -> None:
    idle = Worker()
    idle.work.leave()
    assert idle.call().wait_s == 0.0
    worker = Worker().granted(0)
    worker.work.leave()
    worker.call()
    worker.work.lost(Unreachable("gone"), worker.now_s)
    assert (worker.work.ended, worker.work.failure) == (True, None)


def test_whoever_leaves_still_learns_that_it_was_replaced() -> None:
    worker = Worker().granted(0)
    worker.work.leave()
    worker.call()
    worker.work.lost(Superseded("a later life"), worker.now_s)
    assert isinstance(worker.work.failure, Superseded)


# --- any interleaving ---


@given(data=st.data(), ahead=st.integers(0, 3))
@settings(deadline=None, max_examples=80)
def test_no_step_is_forgotten_or_told_twice(data: st.DataObject, ahead: int) -> None:
    """Every granted step is held or its end is reported; each report is accepted exactly once."""
    worker = Worker(ahead=ahead)
    granted, dropped, told, next_step = set(), set(), [], 0
    in_works: list[int] = []
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["call", "call", "lose", "take", "take", "complete", "complete", "drop"])):
            case "call":
                request = worker.call()
                assert set(request.held) == granted - dropped - set(told) - set(reported(request))
                steps = range(next_step, next_step + data.draw(st.integers(0, min(3, request.want))))
                next_step += len(steps)
                worker.answer(request, *steps)
                granted.update(steps)
                told += reported(request)
            case "lose":
                worker.call()
                worker.work.lost(Unreachable("lost"), worker.now_s)
            case "take":
                work = worker.work.take(worker.now_s)
                if isinstance(work, pb.Grant):
                    in_works.append(work.step)
            case "complete" if in_works:
                worker.complete(in_works.pop(), 0.01)
            case "drop" if in_works:
                dropped.add(in_works[-1])
                worker.work.dropped(in_works.pop(), worker.now_s)
    assert len(told) == len(set(told))
    assert set(told) <= granted
