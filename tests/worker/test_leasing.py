"""The leasing thread: it calls when something is due, wakes a loop that waits for work, and ends with the work."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import ParashardError, Superseded, UnknownWorker, Unreachable, WrongRun
from parashard_worker.leased import Joined, LeaseLimits
from parashard_worker.leasing import Leasing
from support.waiting import DEADLINE_S, eventually


def unasked() -> Joined:
    raise AssertionError("it was not told to join again")


class ScriptedCoordinator:
    """Holds every call until the test answers it."""

    def __init__(self) -> None:
        self._calls: queue.Queue[pb.LeaseRequest] = queue.Queue()
        self._answers: queue.Queue[pb.LeaseReply | ParashardError] = queue.Queue()

    def lease(self, request: pb.LeaseRequest, deadline_s: float = 0.0) -> pb.LeaseReply:
        self._calls.put(request)
        answer = self._answers.get(timeout=DEADLINE_S)
        if isinstance(answer, ParashardError):
            raise answer
        return answer

    def call(self) -> pb.LeaseRequest:
        return self._calls.get(timeout=DEADLINE_S)

    def answer(self, *steps: int, **fields: Any) -> None:
        fields = {"state": pb.JOB_STATE_RUNNING, **fields}
        self._answers.put(pb.LeaseReply(granted=[pb.Grant(step=s) for s in steps], **fields))

    def refuse(self, error: ParashardError) -> None:
        self._answers.put(error)


@pytest.fixture
def coordinator() -> ScriptedCoordinator:
    return ScriptedCoordinator()


@pytest.fixture
def start(coordinator: ScriptedCoordinator) -> Iterator[Callable[..., Leasing]]:
    """Return a function that starts a leasing thread; the thread ends with the test, even when it dies."""
    started: list[Leasing] = []

    def begin(
        lease_ttl_s: float = 3600.0,
        join: Callable[[], Joined] = unasked,
        step_timeout_s: float = 3600.0,
        retry_budget_s: float = 60.0,
        **further: Any,
    ) -> Leasing:
        leasing = Leasing(
            coordinator,  # type: ignore[arg-type]
            Joined("run-1", "worker-0", 1, lease_ttl_s),
            LeaseLimits(8, 1, step_timeout_s, retry_budget_s),
            join=join,
            **further,
        )
        leasing.start()
        started.append(leasing)
        return leasing

    yield begin
    for leasing in started:
        coordinator.refuse(Superseded("the test is over"))
        leasing.leave(DEADLINE_S)
        assert not leasing._thread.is_alive()


def take_step(leasing: Leasing) -> int:
    work = leasing.take(DEADLINE_S)
    assert isinstance(work, pb.Grant)
    return work.step


def test_steps_go_from_the_coordinator_to_the_loop_and_back(
    coordinator: ScriptedCoordinator, start: Callable[..., Leasing]
) -> None:
    leasing = start()
    assert coordinator.call().want == 2
    coordinator.answer(0)
    assert take_step(leasing) == 0
    coordinator.call()  # asks for more
    leasing.phases = lambda: {"compute": 2.0}
    leasing.completed(pb.CompletedStep(step=0))
    coordinator.answer()
    request = coordinator.call()
    assert [c.step for c in request.completed] == [0]
    assert request.phases.compute == 2.0
    assert (leasing.work.state, leasing.over) == (pb.JOB_STATE_RUNNING, False)


def test_a_step_of_many_wakes_no_thread(coordinator: ScriptedCoordinator, start: Callable[..., Leasing]) -> None:
    leasing = start()
    coordinator.call()
    coordinator.answer(*range(8))
    step = take_step(leasing)
    eventually(lambda: leasing._pausing_until_s > 0, "the thread's sleep")
    woken: list[None] = []
    leasing._changed.notify_all = lambda: woken.append(None)  # type: ignore[method-assign]
    try:
        with leasing.computing(pb.Grant(step=step)):
            pass
        leasing.completed(pb.CompletedStep(step=step))
        assert (take_step(leasing), woken) == (1, [])
        leasing.failed(1, "it raised")  # which the coordinator is to know at once
        assert woken == [None]
    finally:
        del leasing._changed.notify_all  # type: ignore[method-assign]
        with leasing._changed:
            leasing._changed.notify_all()


def test_a_lost_answer_is_asked_for_again(coordinator: ScriptedCoordinator, start: Callable[..., Leasing]) -> None:
    leasing = start()
    first = coordinator.call()
    coordinator.refuse(Unreachable("no answer"))
    assert coordinator.call().sequence == first.sequence + 1
    coordinator.answer(3)
    assert take_step(leasing) == 3
    assert leasing.work.failure is None


def test_silence_is_broken_by_a_renewal(coordinator: ScriptedCoordinator, start: Callable[..., Leasing]) -> None:  # P5
    leasing = start(lease_ttl_s=0.03)
    coordinator.call()
    coordinator.answer(0, 1, 2)
    assert sorted(coordinator.call().held) == [0, 1, 2]
    assert not leasing.over


def test_a_step_that_was_suspended_with_its_worker_is_not_hung(
    coordinator: ScriptedCoordinator, start: Callable[..., Leasing], monkeypatch: pytest.MonkeyPatch
) -> None:  # P22
    stood_still_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stood_still_s)
    monkeypatch.setattr("parashard_worker.leasing.time", clock)
    leasing = start(lease_ttl_s=0.03, step_timeout_s=600.0)
    coordinator.call()
    coordinator.answer(0)
    work = leasing.take(DEADLINE_S)
    assert work is not None
    with leasing.computing(work):
        coordinator.call()
        stood_still_s = 5000.0
        coordinator.refuse(Unreachable("the deadline passed meanwhile"))
        request = coordinator.call()
        assert (list(request.failed), list(request.held), request.leaving) == ([], [0], False)
        coordinator.answer()
    assert (leasing.work.hung, leasing.work.failure) == ("", None)


def test_a_step_that_hangs_leaves_the_stacks_of_all_threads_in_the_log(
    coordinator: ScriptedCoordinator, start: Callable[..., Leasing], caplog: pytest.LogCaptureFixture
) -> None:
    hung = threading.Event()
    leasing = start(step_timeout_s=0.0, lease_ttl_s=0.03, on_hung=lambda reason: hung.set())
    coordinator.call()
    coordinator.answer(0)
    work = leasing.take(DEADLINE_S)
    assert work is not None
    with leasing.computing(work):
        for _ in range(2):  # asked before the step began; with the failure
            coordinator.call()
            coordinator.answer()
        assert hung.wait(DEADLINE_S)
    stacks = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "stack"]
    assert any("test_a_step_that_hangs_leaves" in fields["lines"] for fields in stacks), "where this thread stands"


def test_a_coordinator_that_is_away_is_logged_once(
    coordinator: ScriptedCoordinator, start: Callable[..., Leasing], caplog: pytest.LogCaptureFixture
) -> None:
    start()
    for why in ("refused", "refused", "refused", "no route"):
        coordinator.call()
        coordinator.refuse(Unreachable(why))
    coordinator.call()
    coordinator.answer()
    logged = [vars(record)["fields"]["error"] for record in caplog.records if record.getMessage() == "no-lease-reply"]
    assert logged == ["refused", "no route"]


def test_every_report_reaches_the_coordinator(coordinator: ScriptedCoordinator, start: Callable[..., Leasing]) -> None:
    leasing = start()
    coordinator.call()
    coordinator.answer(0, 1, 2, evaluations=[pb.EvaluationGrant(evaluation=9)])
    assert isinstance(leasing.take(DEADLINE_S), pb.EvaluationGrant)
    assert [take_step(leasing) for _ in range(3)] == [0, 1, 2]
    coordinator.call()
    leasing.completed(pb.CompletedStep(step=0))
    leasing.failed(1, "bad")
    leasing.dropped(2)
    leasing.evaluated(pb.EvaluationResult(evaluation=9, metrics={"loss": 1.0}))
    coordinator.answer()
    request = coordinator.call()
    assert [c.step for c in request.completed] == [0]
    assert [f.step for f in request.failed] == [1]
    assert [e.evaluation for e in request.evaluated] == [9]
    assert (list(request.held), list(request.held_evaluations)) == ([], [])


def test_leaving_during_a_call_makes_one_more_that_gives_everything_back(
    coordinator: ScriptedCoordinator, start: Callable[..., Leasing]
) -> None:  # P5: the steps that the call under way grants would otherwise be held until the lease time is over
    leasing = start()
    coordinator.call()
    leasing.leave(0.0)
    coordinator.answer(0, 1)
    request = coordinator.call()
    assert (request.leaving, list(request.held)) == (True, [])
    coordinator.answer()
    leasing.leave(DEADLINE_S)
    assert (leasing._thread.is_alive(), leasing.work.failure, leasing.take(0.0)) == (False, None, None)


@pytest.mark.parametrize("state", [pb.JOB_STATE_DONE, pb.JOB_STATE_FAILED])
def test_the_jobs_end_wakes_threads_that_wait_for_work(
    state: pb.JobState, coordinator: ScriptedCoordinator, start: Callable[..., Leasing]
) -> None:
    leasing = start()
    coordinator.call()
    coordinator.answer(state=state, reason="that is all")
    assert leasing.take(DEADLINE_S) is None
    assert (leasing.over, leasing.work.state, leasing.work.reason) == (True, state, "that is all")


def test_a_later_incarnation_of_this_worker_ends_it(
    coordinator: ScriptedCoordinator, start: Callable[..., Leasing]
) -> None:  # P3
    leasing = start()
    coordinator.call()
    coordinator.refuse(Superseded("worker-0 has a later incarnation"))
    assert leasing.take(DEADLINE_S) is None
    assert isinstance(leasing.work.failure, Superseded)
    leasing._thread.join(DEADLINE_S)


def test_a_coordinator_that_was_started_again_is_joined_again(
    coordinator: ScriptedCoordinator, start: Callable[..., Leasing]
) -> None:  # P3, P5
    joins = iter([Unreachable("gone again"), Joined("run-1", "worker-0", 900, 3600.0)])

    def join() -> Joined:
        outcome = next(joins)
        if isinstance(outcome, ParashardError):
            raise outcome
        return outcome

    leasing = start(join=join)
    coordinator.call()
    coordinator.answer(0, 1)
    assert take_step(leasing) == 0
    coordinator.call()
    leasing.completed(pb.CompletedStep(step=0))
    coordinator.refuse(UnknownWorker("worker-0 is not known"))  # and joining fails, so that it asks once more
    assert coordinator.call().incarnation == 1
    coordinator.refuse(UnknownWorker("worker-0 is not known"))
    request = coordinator.call()
    assert (request.incarnation, sorted(request.held), [c.step for c in request.completed]) == (900, [1], [0])
    assert next(joins, None) is None
    coordinator.answer(2)
    assert [take_step(leasing) for _ in range(2)] == [1, 2]
    assert leasing.work.failure is None


def test_a_coordinator_that_refuses_to_take_the_worker_in_ends_it(
    coordinator: ScriptedCoordinator, start: Callable[..., Leasing]
) -> None:  # P2, P13
    def join() -> Joined:
        raise WrongRun("another run has this address now")

    leasing = start(join=join)
    coordinator.call()
    coordinator.refuse(UnknownWorker("worker-0 is not known"))
    assert leasing.take(DEADLINE_S) is None
    assert isinstance(leasing.work.failure, WrongRun)


def test_without_work_and_without_a_wait_nothing_is_taken(
    coordinator: ScriptedCoordinator, start: Callable[..., Leasing]
) -> None:
    leasing = start()
    coordinator.call()
    assert leasing.take(0.0) is None
    assert leasing.take(0.001) is None


def test_an_announcement_waits_until_the_coordinator_has_answered_a_call_with_it(
    coordinator: ScriptedCoordinator, start: Callable[..., Leasing]
) -> None:  # P26
    leasing = start()
    coordinator.call()
    coordinator.answer(0)
    step = take_step(leasing)
    with ThreadPoolExecutor(1) as pool:
        announced = pool.submit(leasing.announce, step)
        while not (request := coordinator.call()).computing:
            coordinator.answer()
        assert (list(request.computing), announced.done()) == ([0], False)
        coordinator.answer()
        assert announced.result(DEADLINE_S)

        def compute() -> bool:
            with leasing.computing(pb.Grant(step=step)):
                return True

        computed = pool.submit(compute)
        while (request := coordinator.call()).computing:
            coordinator.answer()
        assert not computed.done()
        coordinator.answer()
        assert computed.result(DEADLINE_S)


def test_an_announcement_waits_no_longer_than_there_is_work(
    coordinator: ScriptedCoordinator, start: Callable[..., Leasing]
) -> None:
    leasing = start()
    coordinator.call()
    coordinator.answer(0)
    step = take_step(leasing)
    with ThreadPoolExecutor(1) as pool:
        announced = pool.submit(leasing.announce, step)
        coordinator.call()
        coordinator.refuse(Superseded("another incarnation"))
        assert not announced.result(DEADLINE_S)
