"""A worker that gets nothing may wait in its call: it is woken when there is work, and the dead are granted nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import parashard_coordinator.endpoints.service
from parashard._proto import coordinator_pb2 as pb
from parashard.errors import Superseded
from parashard.protocol.rpc import SERVER_THREADS
from parashard_coordinator.core.calls import LeaseAnswer
from parashard_coordinator.core.membership import WorkerRecord
from parashard_coordinator.core.supervision import Exit, LocalLauncher, ProcessName
from parashard_coordinator.endpoints.service import WAIT_MAX_S, WAITER_BYTES_MAX
from support.coordinator_cases import Caller, core_of
from support.served_core import DEADLINE_S, Served, lease_request, served, shard_request, worker_request
from support.waiting import eventually

Asks = Callable[..., "Future[pb.LeaseReply]"]
WAIT_S = DEADLINE_S  # longer than a test that does not hang


@pytest.fixture
def it() -> Iterator[Served]:
    """Return a served job of one step, which `busy` holds; "worker-0" has joined too."""
    core = core_of(steps_total=1, launcher=LocalLauncher(2, 1.0, 3), speculate_after=0.0)
    with served(core) as it:
        now_s = time.monotonic()
        assert Caller(core, "busy", now_s).lease(1, now_s) == [0]
        it.client.register_worker(worker_request())
        yield it


@contextmanager
def asking(it: Served, calls: int = 4) -> Iterator[Asks]:
    """Call Lease on threads of their own; whatever still waits at the end is woken."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(calls) as threads:
        patch.setattr(parashard_coordinator.endpoints.service, "WAIT_MAX_S", WAIT_S)
        try:
            yield lambda **request: threads.submit(it.client.lease, lease_request(want=1, wait_s=WAIT_S, **request))
        finally:
            it.exclusive.run_exclusive(lambda core, now_s: core.job.fail("the test is over"))


def give_back(it: Served, **report: Any) -> None:
    """Let `busy` report, or give its step back."""
    busy = it.core.job.workers.by_name["busy"]
    request = lease_request("busy", busy.sequence + 1, **report)
    it.client.lease(request)


def steps(reply: Future[pb.LeaseReply]) -> list[int]:
    return [grant.step for grant in reply.result(DEADLINE_S).granted]


def test_a_waiting_worker_is_woken_when_a_step_comes_back(it: Served) -> None:
    with asking(it) as ask:
        reply = ask()
        it.wait_until_a_call_waits()
        assert not reply.done()
        give_back(it)
        assert steps(reply) == [0]
        assert it.core.job.leases.held_by("worker-0") == {0}


def test_a_waiting_worker_is_woken_when_the_last_shard_registers() -> None:
    with served(core_of(registered=False)) as it, asking(it) as ask:
        it.client.register_worker(worker_request())
        it.client.register_shard(shard_request(0))
        reply = ask()
        it.wait_until_a_call_waits()
        it.client.register_shard(shard_request(1))
        assert steps(reply) == [0]


def test_a_waiting_worker_is_woken_when_an_evaluation_is_due() -> None:
    with served(core_of(steps_total=1, evaluate_after=[1], speculate_after=0.0)) as it, asking(it) as ask:
        now_s = time.monotonic()
        assert Caller(it.core, "busy", now_s).lease(1, now_s) == [0]
        it.client.register_worker(worker_request())
        reply = ask()
        it.wait_until_a_call_waits()
        give_back(it, completed=[pb.CompletedStep(step=0, incarnations=[1, 1])])
        assert [e.evaluation for e in reply.result(DEADLINE_S).evaluations] == [1]


def test_a_waiting_worker_is_woken_when_the_job_ends(it: Served) -> None:
    with asking(it) as ask:
        reply = ask()
        it.wait_until_a_call_waits()
        it.exclusive.run_exclusive(lambda core, now_s: core.job.fail("no disk"))
        assert reply.result(DEADLINE_S).state == pb.JOB_STATE_FAILED
        assert reply.result(DEADLINE_S).reason == "no disk"


def test_what_wakes_it_for_nothing_lets_it_wait_on(it: Served) -> None:
    with asking(it) as ask:
        reply = ask()
        it.wait_until_a_call_waits()
        with it.condition:
            it.condition.notify_all()
        it.wait_until_a_call_waits()
        give_back(it)
        assert steps(reply) == [0]


def test_as_many_calls_are_woken_as_there_are_steps_and_none_by_other_changes(
    it: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant, asked = it.core.grant, list[str]()

    def counted(worker: WorkerRecord, *arguments: Any, **options: Any) -> LeaseAnswer:
        asked.append(worker.name)
        return grant(worker, *arguments, **options)

    with asking(it, calls=8) as ask:
        for number in range(1, 9):
            it.client.register_worker(worker_request(f"worker-{number}"))
            ask(worker=f"worker-{number}")
            it.wait_until_a_call_waits()
        monkeypatch.setattr(it.core, "grant", counted)
        for _ in range(3):
            it.exclusive.run_exclusive(lambda core, now_s: core.tick(now_s))
            it.client.get_status()
        assert asked == []
        give_back(it)
        eventually(lambda: it.core.job.leases.held_by("worker-1") == {0}, "the first that waits has the step")
        assert asked == ["busy", "worker-1"], "busy's own call, and the one that waited the longest"


def test_calls_that_wait_keep_no_other_call_from_being_served(it: Served) -> None:
    waiting = []
    for number in range(1, SERVER_THREADS + 3):
        it.client.register_worker(worker_request(f"worker-{number}"))
        request = lease_request(f"worker-{number}", want=1, wait_s=WAIT_MAX_S)
        waiting.append(it.client._stub.Lease.future(request, timeout=DEADLINE_S))
        it.wait_until_a_call_waits()
    assert it.client.get_status().steps_leased == 1
    it.exclusive.run_exclusive(lambda core, now_s: core.job.fail("the test is over"))
    assert {call.result().state for call in waiting} == {pb.JOB_STATE_FAILED}


def test_without_work_the_call_ends_when_its_time_is_over(it: Served) -> None:
    reply = it.client.lease(lease_request(want=1, wait_s=0.001))
    assert (list(reply.granted), reply.reason) == ([], "every step is leased or complete")
    assert it.condition.timeouts_s, "it did wait"


@pytest.mark.parametrize("request_", [{"want": 1}, {"wait_s": 5.0}, {"want": 1, "wait_s": -1.0}])
def test_who_does_not_ask_to_wait_is_answered_at_once(it: Served, request_: dict[str, float]) -> None:
    assert not it.client.lease(lease_request(**request_)).granted
    assert it.condition.timeouts_s == []


def test_every_wait_is_bounded(it: Served) -> None:
    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(it.service.Lease, lease_request(want=1, wait_s=1e300), None)
        it.wait_until_a_call_waits()
        it.exclusive.run_exclusive(lambda core, now_s: core.job.fail("the test is over"))
        reply.result(DEADLINE_S)
    assert all(timeout_s is not None and timeout_s <= WAIT_MAX_S for timeout_s in it.condition.timeouts_s)


def test_only_so_many_wait_at_once(it: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(it.service, "_may_wait", threading.Semaphore(1))
    it.client.register_worker(worker_request("worker-1"))
    with asking(it) as ask:
        reply = ask()
        it.wait_until_a_call_waits()
        assert steps(ask(worker="worker-1")) == []
        assert not reply.done()
        give_back(it)
        assert steps(reply) == [0]


def test_a_call_with_a_long_report_does_not_wait(it: Served) -> None:
    warnings = ["x" * 1000] * (WAITER_BYTES_MAX // 1000 + 1)
    assert not it.client.lease(lease_request(want=1, wait_s=WAIT_S, warnings=warnings)).granted
    assert it.condition.timeouts_s == []


def test_work_that_becomes_due_between_two_looks_is_not_missed(it: Served) -> None:
    class Hurried(type(it.condition)):  # type: ignore[misc]
        """Lets `busy` give its step back just before the call begins to wait."""

        entered = 0

        def __enter__(self) -> bool:
            self.entered += 1
            if self.entered == 2:
                it.core.job.leases.end("busy")
            return bool(super().__enter__())

    it.watch(Hurried())
    reply = it.service.Lease(lease_request(want=1, wait_s=WAIT_S), None)
    assert [grant.step for grant in reply.granted] == [0]
    assert it.condition.timeouts_s == []


def test_a_worker_that_ended_while_it_waited_is_granted_nothing(it: Served) -> None:
    ended = Exit(ProcessName("worker", 0), -9, "killed by signal 9", number=1)
    with asking(it) as ask:
        reply = ask()
        it.wait_until_a_call_waits()
        it.exclusive.run_exclusive(lambda core, now_s: core.supervise([ended], [], now_s))
        give_back(it)
        assert steps(reply) == []
        assert it.core.job.leases.leased == 0, "a lease of the dead would never end"


def test_a_later_call_of_the_worker_ends_the_wait_of_an_earlier_one(it: Served) -> None:
    with asking(it) as ask:
        earlier = ask()
        it.wait_until_a_call_waits()
        later = ask(sequence=2)
        it.wait_until_a_call_waits()
        give_back(it)
        assert (steps(earlier), steps(later)) == ([], [0]), "who was woken and takes nothing wakes the next"


def test_a_newer_incarnation_ends_the_wait_of_an_older_one(it: Served) -> None:
    with asking(it) as ask:
        reply = ask()
        it.wait_until_a_call_waits()
        it.client.register_worker(worker_request())
        give_back(it)
        assert steps(reply) == []
        with pytest.raises(Superseded):
            ask(sequence=2).result(DEADLINE_S)


def test_a_waiting_worker_learns_that_the_last_step_is_in(it: Served) -> None:
    with asking(it) as ask:
        reply = ask()
        it.wait_until_a_call_waits()
        give_back(it, completed=[pb.CompletedStep(step=0, incarnations=[1, 1])])
        it.exclusive.run_exclusive(lambda core, now_s: core.job.mark_done())
        assert reply.result(DEADLINE_S).state == pb.JOB_STATE_DONE


def test_a_call_whose_client_is_gone_ends_and_takes_nothing(it: Served) -> None:
    gone = SimpleNamespace(is_active=lambda: False)
    reply = it.service.Lease(lease_request(want=1, wait_s=WAIT_S), gone)
    assert not reply.granted
    assert it.condition.timeouts_s == []
