"""Decisions of a coordinator whose store fails: work goes on; what would harm if decided twice is not decided."""

from __future__ import annotations

from typing import Any

import pytest

from parashard.errors import NotReady
from parashard.store.claims import claim_incarnation
from parashard_coordinator.core.auto_jobs import set_lag
from parashard_coordinator.core.callback_progress import LEASED_AHEAD, CallbackOptions
from parashard_coordinator.core.calls import FollowCall, LeaseCall
from parashard_coordinator.core.controller import LagDecision
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.policies import Auto
from parashard_coordinator.core.results import follow
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_coordinator.run import decisions as module
from parashard_coordinator.run.decisions import DecisionStore
from parashard_coordinator.run.store import RunStore
from support.coordinator_cases import Caller, core_of, judged
from support.store_fakes import MemoryStore

FULL = "memory://test: no space left on device"


class Job:
    """A core whose store can be told to fail; calls go through its lock, as from the wire."""

    def __init__(self, **options: Any) -> None:
        self.store = MemoryStore()
        self.core = core_of(**options)
        self.exclusive = ExclusiveCore(self.core)
        run_store = RunStore(self.store, claim_incarnation(self.store, "coordinator"))
        self.decisions = DecisionStore(self.exclusive, run_store, self._note)

    def _note(self, text: str, over: bool) -> None:
        record = self.core.job
        record.resolve("records", text) if over else record.warn("records", text)

    def call(self, caller: Caller, **report: Any) -> Any:
        def lease(core: Core, now_s: float) -> Any:
            return caller.call(now_s, **report)

        return self.exclusive.run_exclusive(lease)

    def stored(self) -> str:
        return self.store.contents.get("coordinator/i00000001.json", b"").decode()


def test_a_result_acts_at_once_and_is_stored_once_that_is_possible() -> None:  # P21
    job = Job(steps_total=1, evaluate_after=[1])
    caller = Caller(job.core)
    caller.lease(1)
    caller.complete_all(want=1)
    fault = job.store.fail("replace", "coordinator/", times=2)
    job.call(caller, evaluated=judged(1, loss=0.5))
    assert job.core.job.evaluations.finished
    job.decisions.save_if_changed()
    assert (fault.fired, job.stored()) == (2, "")
    assert list(job.core.job.events).count(f"warning: the coordinator's records cannot be written: {FULL}") == 1
    job.decisions.save_if_changed()
    assert '"loss":0.5' in job.stored().replace(" ", "")


def test_a_step_is_not_skipped_before_that_is_stored(  # P7, P24
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DECISION_PAUSE_S", 0.0)
    job = Job(steps_total=1, max_attempts=1, skip_bad_steps=True)
    caller = Caller(job.core)
    fault = job.store.fail("replace", "coordinator/", times=3)
    assert caller.lease(1) == [0]
    answer = job.call(caller, failed=[(0, "NaN")], want=1)
    assert [(grant.step, grant.skip) for grant in answer.granted] == [(0, True)]
    assert (fault.fired, '"skips":[0]' in job.stored().replace(" ", "")) == (3, True), "the answer waited for it"


def test_no_step_is_leased_in_async_before_it_is_stored_how_far_that_may_go(  # P37
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DECISION_PAUSE_S", 0.0)
    job = Job(steps_total=4, steps_per_epoch=2, callbacks=CallbackOptions(followed=True, decide=True))
    caller = Caller(job.core)
    job.exclusive.run_exclusive(lambda core, _: follow(core.job, FollowCall(handled=0)))
    fault = job.store.fail("replace", "coordinator/", times=3)
    assert [grant.step for grant in job.call(caller, want=1).granted] == [0]
    assert (fault.fired, f'"leased_to":{LEASED_AHEAD}' in job.stored().replace(" ", "")) == (3, True)


def test_no_lag_holds_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:  # P39
    monkeypatch.setattr(module, "DECISION_PAUSE_S", 0.0)
    job = Job(policy=Auto(2))
    fault = job.store.fail("replace", "coordinator/", times=3)
    job.exclusive.run_exclusive(lambda core, _: set_lag(core.job, LagDecision(1, "workers wait")))
    assert (fault.fired, '"lags":[[0,1,"workers wait"]]' in job.stored().replace(": ", ":")) == (3, True)


def test_a_skip_that_cannot_be_stored_ends_the_process_before_it_takes_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # P7, P24
    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(module, "DECISION_RETRY_S_MAX", -1.0)
    monkeypatch.setattr(module.os, "_exit", end)
    job = Job(steps_total=1, max_attempts=1, skip_bad_steps=True)
    caller = Caller(job.core)
    job.store.fail("replace", "coordinator/", times=9)
    caller.lease(1)
    with pytest.raises(Ended, match="75"):
        job.call(caller, failed=[(0, "NaN")], want=1)


def test_no_worker_s_arithmetic_becomes_the_job_s_before_that_is_stored() -> None:  # P13, P21
    job = Job(same_arithmetic=True)
    job.store.fail("replace", "coordinator/", times=1)

    def joins(fingerprint: str) -> Any:
        return job.exclusive.run_exclusive(
            lambda core, now_s: core.register_worker("worker-0", fingerprint, "cpu", "host:9", now_s, 7)
        )

    with pytest.raises(NotReady, match="no space left on device"):
        joins("one")
    assert job.core.job.workers.fingerprint == ""
    assert joins("one").name == "worker-0"
    assert "one" in job.stored()


def test_a_held_call_is_answered_though_the_store_fails() -> None:  # P21
    job = Job()
    caller = Caller(job.core)
    job.store.fail("replace", "coordinator/", times=100)
    job.exclusive.run_exclusive(lambda core, _: core.scale(3))
    call = LeaseCall(caller.name, caller.worker.incarnation, 1, held=[], held_evaluations=[], want=1)
    answer = job.exclusive.run_exclusive(lambda core, now_s: core.lease(call, now_s))
    assert [grant.step for grant in answer.granted] == [0]
