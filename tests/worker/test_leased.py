"""What a worker says to the coordinator and when, in virtual time: asking, reporting, renewing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import Unreachable
from parashard_worker.leased import IDLE_WAIT_S, Joined, LeasedWork, LeaseLimits, result_of
from support.leased_cases import STEP_TIMEOUT_S, TTL_S, Worker, reported

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
    worker, grant = Worker(), pb.EvaluationGrant(evaluation=2, incarnations=[1, 4])
    worker.answer(worker.call(), 7, evaluations=[grant])
    assert list(worker.call().held_evaluations) == [2]  # in the queue
    assert isinstance(worker.work.take(worker.now_s), pb.EvaluationGrant)
    request = worker.call()
    assert list(request.held_evaluations) == [2]  # in the works
    worker.answer(request)
    assert worker.due_in_s > 0
    worker.work.evaluated(result_of(grant, metrics={"loss": 0.25}))
    assert worker.due_in_s == 0.0  # an outcome is told at once
    request = worker.call()
    assert (list(request.held_evaluations), dict(request.evaluated[0].metrics)) == ([], {"loss": 0.25})
    assert list(request.evaluated[0].incarnations) == [1, 4], "of the weights that the grant names (P25)"


def test_a_warning_goes_with_the_next_call_until_one_is_answered() -> None:
    worker = Worker()
    worker.work.warned("UserWarning: too few")
    assert list(worker.call().warnings) == ["UserWarning: too few"]
    request = worker.call()
    assert list(request.warnings) == ["UserWarning: too few"], "the call before had no answer"
    worker.work.warned("another")
    worker.answer(request)
    assert list(worker.call().warnings) == ["another"]


def test_a_drift_goes_with_the_next_call_until_one_is_answered() -> None:
    worker = Worker()
    worker.work.drifted(pb.StepDrift(step=3, drift=0.25, updates=1))
    assert [found.drift for found in worker.call().drifts] == [0.25]
    worker.answer(worker.call())
    assert not worker.call().drifts


def test_the_coordinator_says_how_many_steps_are_held_ahead() -> None:
    worker = Worker(ahead=0)
    assert worker.call().want == 1
    worker.answer(worker.call(), ahead=1)
    assert worker.call().want == 2
    worker.answer(worker.call())
    assert worker.call().want == 2, "an answer that does not say leaves it as it is"


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


@pytest.mark.parametrize(("lease_ttl_s", "wait_s"), [(2.0, 0.5), (4.0, 1.0), (40.0, IDLE_WAIT_S)])
def test_a_held_call_takes_at_most_a_quarter_of_a_short_lease(lease_ttl_s: float, wait_s: float) -> None:  # P5
    worker = Worker()
    worker.work.joined_again(Joined("run-1", "worker-0", 3, lease_ttl_s))
    assert worker.call().wait_s == wait_s


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


def test_one_slow_step_changes_the_pace_a_little() -> None:
    worker, wanted = Worker(batch=16, ahead=1), []
    for step, step_s in enumerate([0.05, 0.05, 0.2]):
        worker.granted(step)
        worker.take()
        worker.complete(step, step_s)
        request = worker.call()
        worker.answer(request)
        wanted.append(request.want)
    assert wanted == [5, 5, 3], "the first step counts whole, later ones by a fifth"


def test_of_steps_in_the_works_together_each_took_the_time_since_the_one_before() -> None:
    worker = Worker(batch=16, ahead=1).granted(0)
    worker.take()
    for step in range(1, 40):  # a push is under way while the next step is computed
        worker.granted(step)
        worker.take()
        worker.complete(step - 1, 0.05)
    assert worker.call().want == 5, "a step each 0.05 s, though each is in the works for 0.1 s"


def test_time_without_work_is_not_the_steps_time() -> None:
    worker = Worker(batch=16)
    for step in range(5):
        worker.granted(step)
        worker.take()
        worker.complete(step, 0.01)
        worker.answer(worker.call(), retry_after_s=1.0)
        worker.now_s += 60.0  # nothing to do
    assert worker.call().want == 16


def test_an_outcome_is_reported_at_once_however_many_steps_wait() -> None:
    worker = Worker(ahead=1).granted(0, 1, 2)
    worker.answer(worker.call())
    assert worker.due_in_s > 0.0
    worker.work.evaluated(pb.EvaluationResult(evaluation=4, metrics={"loss": 1.0}))
    assert worker.due_in_s == 0.0


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


def test_a_failed_step_is_reported_at_once() -> None:  # P6
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


def test_steps_that_wait_behind_a_computation_longer_than_a_lease_are_free_for_others() -> None:  # P5
    worker, grant = Worker(), pb.EvaluationGrant(evaluation=6)
    worker.answer(worker.call(), 0, 1, 2, evaluations=[grant])
    assert isinstance(worker.work.take(worker.now_s), pb.EvaluationGrant)
    worker.answer(worker.call(), evaluations=[pb.EvaluationGrant(evaluation=8)])
    worker.work.computing(pb.Grant(step=worker.take()), worker.now_s)
    worker.now_s += TTL_S
    request = worker.work.request(worker.now_s, {})
    assert request is not None
    assert sorted(request.held) == [0, 1, 2], "as long as a lease, and no longer than that"
    worker.answer(request)
    worker.now_s += 0.1
    request = worker.work.request(worker.now_s, {})
    assert request is not None
    assert list(request.held) == [0], "what is computed stays"
    assert sorted(request.held_evaluations) == [6, 8], "an evaluation stays, too: it has no lease time"
    worker.answer(request)
    assert worker.work.waiting == 1


def test_a_hung_step_is_reported_as_failed_and_the_worker_leaves() -> None:  # P6
    worker = Worker().granted(0, 1, 2)
    worker.take()  # its push is under way: it hangs nowhere
    worker.now_s += 1
    worker.work.computing(pb.Grant(step=worker.take()), worker.now_s)
    worker.now_s += STEP_TIMEOUT_S
    worker.answer(worker.call())
    assert not worker.work.hung
    worker.now_s += worker.due_in_s
    call = worker.work.request(worker.now_s, {})
    assert call is not None
    assert [(failed.step, failed.reason) for failed in call.failed] == [(1, "step 1 has taken over 100 s")]
    assert (call.leaving, list(call.held)) == (True, [])
    assert worker.work.hung == "step 1 has taken over 100 s"
    worker.work.accept(call, pb.LeaseReply(state=pb.JOB_STATE_RUNNING), worker.now_s)
    assert worker.work.request(worker.now_s, {}) is None
    assert (worker.work.over, worker.work.take(worker.now_s), worker.due_in_s) == (True, None, 0.0)


def test_a_step_whose_examples_are_read_for_too_long_is_hung_too_and_stays_announced() -> None:  # P26
    worker = Worker().granted(0)
    step = worker.take()
    worker.work.announce(step)
    worker.answer(worker.call())
    worker.work.reading(pb.Grant(step=step), worker.now_s)
    worker.work.reading(None, worker.now_s)
    assert worker.work.announced
    assert not worker.work.retracting
    worker.work.reading(pb.Grant(step=step), worker.now_s)
    worker.now_s += STEP_TIMEOUT_S + 1
    call = worker.work.request(worker.now_s, {})
    assert call is not None
    assert [(failed.step, failed.reason) for failed in call.failed] == [(0, "step 0 has taken over 100 s")]


def test_a_hung_evaluation_is_reported_as_failed() -> None:
    worker = Worker()
    worker.answer(worker.call(), evaluations=[pb.EvaluationGrant(evaluation=3)])
    worker.work.computing(worker.work.take(worker.now_s), worker.now_s)
    worker.now_s += STEP_TIMEOUT_S + 1
    call = worker.work.request(worker.now_s, {})
    assert call is not None
    assert [(e.evaluation, e.error) for e in call.evaluated] == [(3, "an evaluation has taken over 100 s")]
    assert (call.leaving, list(call.held_evaluations)) == (True, [])


# --- any interleaving ---


@given(data=st.data(), ahead=st.integers(0, 3))
def test_no_step_is_forgotten_or_reported_twice(data: st.DataObject, ahead: int) -> None:
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


# --- announcements (P26) ---


def test_a_step_is_announced_at_once_and_counts_as_announced_when_a_call_with_it_is_answered() -> None:
    it = Worker().granted(4, 5)
    it.answer(it.call())
    it.take()
    under_way = it.call()
    it.work.announce(4)
    assert list(under_way.computing) == []
    it.answer(under_way)
    assert (it.work.announced, it.due_in_s) == (False, 0.0)
    announcing = it.call()
    assert list(announcing.computing) == [4]
    it.answer(announcing)
    assert it.work.announced


def test_renewals_name_what_is_computed_until_the_model_has_returned() -> None:
    it = Worker().granted(4)
    it.answer(it.call())
    step = it.take()
    it.work.announce(step)
    it.answer(it.call())
    it.work.computing(pb.Grant(step=step), it.now_s)
    assert list(it.call().computing) == [4]
    assert not it.work.retracting
    it.work.computing(None, it.now_s)
    assert (it.work.retracting, it.due_in_s) == (True, 0.0), "a death after this is not the step's"
    retraction = it.call()
    assert list(retraction.computing) == []
    it.answer(retraction)
    assert not it.work.retracting


@pytest.mark.parametrize("how", ["failed", "dropped"])
def test_a_step_that_is_given_back_is_computed_no_more(how: str) -> None:
    it = Worker().granted(4)
    it.answer(it.call())
    it.work.announce(it.take())
    it.work.failed(4, "so", it.now_s) if how == "failed" else it.work.dropped(4, it.now_s)
    assert list(it.call().computing) == []


def test_a_leaving_worker_computes_nothing() -> None:
    it = Worker().granted(4)
    it.answer(it.call())
    it.work.announce(it.take())
    it.work.leave()
    assert list(it.call().computing) == []


def test_a_worker_that_does_not_evaluate_says_so_in_each_call() -> None:
    for evaluates in (True, False):
        work = LeasedWork(Joined("run", "w", 1, 10.0), LeaseLimits(4, 0, 9.0), 0.0, evaluates=evaluates)
        request = work.request(0.0, {})
        assert request is not None
        assert request.steps_only is not evaluates


def test_a_step_that_is_given_back_as_too_early_takes_those_behind_it_along() -> None:
    worker = Worker(ahead=1).granted(4, 5, 6)
    assert worker.take() == 4
    worker.work.dropped(4, worker.now_s, queue_too=True)
    assert worker.due_in_s == 0.0
    request = worker.call()
    assert (list(request.held), request.want > 0, request.wait_s > 0) == ([], True, True)


def test_every_call_has_what_the_gpus_driver_says() -> None:
    worker = Worker()
    call = worker.work.request(worker.now_s, {}, pb.GpuMemory(used_bytes=3, total_bytes=8))
    assert call is not None
    assert (call.gpu_memory.used_bytes, call.gpu_memory.total_bytes) == (3, 8)
    call = worker.work.request(worker.now_s, {})
    assert call is not None
    assert not call.HasField("gpu_memory")
