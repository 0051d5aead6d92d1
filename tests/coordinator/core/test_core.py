"""The core in virtual time: who joins, what is leased, what counts, how a job ends."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from parashard.errors import ConfigurationError, NotReady, QueueFull, Superseded, WrongRun
from parashard.process.shell import ExitCode, exit_code_of
from parashard_coordinator.core.calls import JobState, LeaseCall
from parashard_coordinator.core.core import WORKERS_MAX
from parashard_coordinator.core.draining import Answer
from parashard_coordinator.core.job_record import WARNINGS_MAX
from parashard_coordinator.core.policies import Sync
from parashard_coordinator.core.progress import Staleness
from parashard_coordinator.core.results import staleness_seen
from parashard_coordinator.core.supervision import Exit, LocalLauncher, Orders, ProcessName
from support.coordinator_cases import Caller, announce, core_of, done


def local() -> LocalLauncher:
    return LocalLauncher(2, 1.0, 2)


EXITS = itertools.count(1)


def ended(name: str, exit_code: int = -9, reason: str = "killed by signal 9") -> list[Exit]:
    """Return an exit that no launcher has told of before."""
    role, _, index = name.partition("-")
    return [Exit(ProcessName(role, int(index)), exit_code, reason, next(EXITS))]


def test_nothing_is_leased_until_every_shard_has_registered() -> None:  # P3
    core = core_of(registered=False)
    caller = Caller(core)
    assert core.job.state is JobState.STARTING
    announce(core, 1)
    answer = caller.call(want=4)
    assert (answer.granted, answer.state, answer.reason) == ([], JobState.STARTING, "not every shard is up")
    announce(core, 0)
    assert core.job.state is JobState.RUNNING
    assert caller.lease(1) == [0]


def test_a_lease_from_grant_to_ack() -> None:
    core = core_of(steps_total=2)
    caller = Caller(core)
    assert caller.lease(1, now_s=1.0) == [0]
    assert core.job.progress.first_lease_s == 1.0
    assert caller.complete_all(want=1, now_s=3.0) == [1]
    assert (core.job.progress.steps, core.job.figures.examples, caller.worker.steps_complete) == (1, 8, 1)
    assert not core.job.complete
    caller.complete_all(now_s=4.0)
    assert core.job.complete
    assert core.job.progress.training_s() == 3.0


def test_training_begins_with_the_first_lease_and_not_with_the_first_call() -> None:
    core = core_of()
    core.create_checkpoint(request=1)  # leasing pauses
    caller = Caller(core)
    assert caller.lease(1, now_s=5.0) == []
    assert core.job.progress.first_lease_s is None
    core.checkpoint_ended(Answer(checkpoint="j1", steps=0))
    assert caller.lease(1, now_s=9.0) == [0]
    assert core.job.progress.first_lease_s == 9.0


def test_no_call_gets_more_than_the_lease_batch() -> None:
    assert len(Caller(core_of(steps_total=1000, lease_batch=3)).lease(100)) == 3


def test_acks_of_a_shard_s_other_incarnation_do_not_count() -> None:  # P3
    core = core_of()
    caller = Caller(core)
    caller.lease(1)
    announce(core, 1, 2)
    answer = caller.call(want=1, completed=done(0, incarnations=(1, 1)))
    assert len(core.job.leases.complete) == 0
    assert [grant.step for grant in answer.granted] == [0], "it is due again"
    assert answer.view == 3, "the worker learns that the shards have changed"
    caller.call(completed=done(0, incarnations=(1, 2)))
    assert core.job.leases.lowest_incomplete == 1


def test_a_reply_that_is_lost_costs_one_renewal() -> None:  # P5
    core = core_of()
    caller = Caller(core)
    caller.call(want=1, lost=True)
    assert core.job.leases.leased == 1
    assert caller.lease(1) == [0]


def test_a_worker_s_end_seen_by_the_launcher_frees_its_leases_at_once() -> None:  # P5
    core = core_of(launcher=local())
    first, second = Caller(core, "worker-0"), Caller(core, "worker-1")
    assert first.lease(1) == [0]
    core.supervise(ended("worker-0"), [], 0.1)
    assert not first.worker.live
    assert second.lease(1, 0.1) == [0]
    assert (core.job.supervision.worker_exits, core.job.supervision.worker_restarts) == (1, 1)
    assert "worker-0 ended; 1 step will be recomputed" in core.job.events


def test_a_restart_that_was_seen_twice_counts_once() -> None:
    core = core_of(launcher=local())
    Caller(core, "worker-0")
    core.supervise(ended("worker-0"), [], 0.0)
    Caller(core, "worker-0")
    assert core.job.supervision.worker_restarts == 1
    Caller(core, "worker-0")
    assert core.job.supervision.worker_restarts == 2, "the exit of the earlier incarnation was not reported"


def test_a_worker_that_is_not_wanted_any_more_is_no_restart() -> None:
    core = core_of(launcher=local())
    core.scale(1)
    core.supervise(ended("worker-1", 0, "done"), [], 0.0)
    assert (core.job.supervision.worker_exits, core.job.supervision.worker_restarts) == (1, 0)


def test_a_silent_worker_loses_its_leases_after_their_time() -> None:
    core = core_of(lease_ttl_s=10.0)
    silent, other = Caller(core, now_s=0.0), Caller(core, now_s=0.0)
    silent.lease(1, 0.0)
    other.call(9.0)
    core.tick(10.0)
    assert silent.worker.live
    core.tick(10.1)
    assert not silent.worker.live
    assert other.lease(1, 10.1) == [0]
    assert "guest-0 was silent for 10.1 s; 1 step will be recomputed" in core.job.events
    core.tick(11.0)
    assert sum("was silent" in event for event in core.job.events) == 1


def test_a_silent_worker_that_returns_keeps_what_it_computes() -> None:
    core = core_of(lease_ttl_s=10.0, speculate_after=0.0)
    caller, other = Caller(core), Caller(core)
    caller.lease(1)
    core.tick(10.1)
    assert caller.lease(1, 20.0) == [1]
    assert core.job.leases.held_by(caller.name) == {0, 1}
    assert other.lease(1, 20.0) == [2]


def test_a_new_incarnation_takes_the_name_and_the_old_one_must_stop() -> None:  # P3
    core = core_of()
    old = Caller(core, "worker-0")
    old.lease(1)
    new = Caller(core, "worker-0")
    with pytest.raises(Superseded):
        old.call(want=1, completed=done(0))
    assert len(core.job.leases.complete) == 0
    assert new.lease(1) == [0]


def test_a_new_incarnation_s_registration_frees_what_the_old_one_held() -> None:  # P5
    core = core_of(evaluate_after=[1, 40])
    old, other = Caller(core, "worker-0"), Caller(core, "worker-1")
    old.lease(1)
    assert old.complete_all(want=1) == []
    assert other.lease(1) == [1]
    Caller(core, "worker-1")
    assert core.job.leases.leased == 0
    Caller(core, "worker-0")
    assert Caller(core).call(want=1).evaluations, "its evaluation, too"


def test_a_leaving_worker_gives_everything_back() -> None:
    core = core_of(evaluate_after=[1])
    leaver, other = Caller(core), Caller(core)
    leaver.lease(1)
    assert leaver.complete_all(want=1) == []
    assert leaver.evaluating == [1]
    answer = leaver.call(want=5, leaving=True, held=[], held_evaluations=[])
    assert (answer.granted, answer.reason) == ([], "the worker leaves")
    assert not leaver.worker.live
    assert [e.after_step for e in other.call(want=1).evaluations] == [1]


def test_who_wants_nothing_gets_nothing() -> None:
    core = core_of(evaluate_after=[1], steps_total=1)
    caller = Caller(core)
    caller.lease(1)
    answer = caller.call(completed=done(0))
    assert (answer.granted, answer.evaluations) == ([], [])


def test_a_step_s_warning_says_staleness_rate_and_what_to_change() -> None:
    core = core_of(learning_rate_at=lambda step, decided: decided or 0.1)
    caller = Caller(core)
    caller.lease(1)
    caller.call(completed=done(0, loss=float("nan")))
    what = "training diverged: loss became NaN at step 0"
    advice = "lower optimizer.learning_rate or set optimizer.clip_norm"
    told = f"warning: {what} (learning rate 0.1); {advice}"
    assert core.job.events[-1] == told
    staleness_seen(core.job, Staleness.of(Counter({0: 1, 3: 3})))
    assert core.job.problems.texts == [f"{what} (staleness mean 2.2, max 3, learning rate 0.1); {advice}"]
    assert core.job.events[-1] == told, "the same problem is one event"
    before = core.job.problems.texts
    staleness_seen(core.job, Staleness.of(Counter({0: 1, 9: 9})))
    assert core.job.problems.texts == before, "what is on the screen stays as it was told"


def test_a_bad_step_stops_the_job_with_its_reason() -> None:  # P6
    core = core_of(max_attempts=2, examples_of=lambda step: f" (examples {step + 7}, 9)")
    caller = Caller(core)
    caller.lease(1)
    assert caller.lease(1, failed=[(0, "NaN")]) == [0]
    answer = caller.call(failed=[(0, "NaN")], want=1)
    assert (answer.state, answer.granted) == (JobState.FAILED, [])
    assert core.job.reason == "NaN; step 0 failed 2 times (examples 7, 9)"


def test_a_bad_step_is_skipped_and_counted_where_the_job_says_so() -> None:  # P6
    core = core_of(max_attempts=1, skip_bad_steps=True, steps_total=1)
    caller = Caller(core)
    caller.lease(1)
    answer = caller.call(want=1, failed=[(0, "NaN")])
    assert [(grant.step, grant.skip) for grant in answer.granted] == [(0, True)]
    caller.call(completed=done(0, skipped=True, loss=0.0))
    for shard in range(2):
        announce(core, shard, applied=[(0, 1)], skipped=[0])
    assert (len(core.job.skipped.everywhere()), len(core.job.skipped.partly()), core.job.complete) == (1, 0, True)
    assert core.job.learning.loss != 0.0, "a skipped step has no loss"


def test_a_step_completed_twice_counts_once() -> None:
    core = core_of()
    first, second = Caller(core), Caller(core)
    first.lease(1)
    first.call(completed=done(0))
    second.call(completed=done(0, skipped=True))
    assert (core.job.progress.steps, len(core.job.skipped.everywhere()), second.worker.steps_complete) == (1, 0, 0)


def test_a_refused_call_changes_nothing() -> None:
    core = core_of()
    caller = Caller(core)
    caller.lease(1)
    with pytest.raises(NotReady):
        core.lease(LeaseCall(caller.name, 1, 1, completed=done(0), want=3), 0.0)
    assert (core.job.leases.leased, len(core.job.leases.complete)) == (1, 0)


@pytest.mark.parametrize("workers", [-1, WORKERS_MAX + 1])
def test_a_scale_out_of_bounds_is_refused(workers: int) -> None:
    core = core_of()
    with pytest.raises(ConfigurationError, match=f"from 0 to {WORKERS_MAX}, found {workers}"):
        core.scale(workers)
    assert core.job.workers_wanted == 2


@pytest.mark.parametrize("workers", [0, WORKERS_MAX])
def test_a_job_may_be_scaled_to_none_and_to_the_most(workers: int) -> None:
    core = core_of()
    core.scale(workers)
    assert core.job.workers_wanted == workers


@pytest.mark.parametrize("name", ["worker-9", "", "guest-0"])
def test_a_new_name_beyond_the_most_waits_and_ends_no_job(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("parashard_coordinator.core.core.WORKERS_MAX", 3)
    core = core_of()
    for known in ["worker-0", "worker-1", ""]:
        Caller(core, known, token=len(core.job.workers.by_name) + 1)
    with pytest.raises(QueueFull, match="3 workers of different names already") as caught:
        Caller(core, name, token=9)
    assert exit_code_of(caught.value) is ExitCode.RETRY
    assert len(core.job.workers.by_name) == 3


def test_known_names_join_however_many_there_were(monkeypatch: pytest.MonkeyPatch) -> None:  # P3
    monkeypatch.setattr("parashard_coordinator.core.core.WORKERS_MAX", 2)
    core = core_of()
    first, guest = Caller(core, "worker-0"), Caller(core, token=7)
    assert Caller(core, "worker-0").worker.incarnation == first.worker.incarnation + 1
    assert Caller(core, token=7).worker is guest.worker, "it lost its first answer"
    core.job.workers.mark_left(guest.worker)
    assert (Caller(core).name, guest.name) == ("guest-0", "guest-0")
    assert sorted(core.job.workers.by_name) == ["guest-0", "worker-0"]


def test_scale_changes_what_the_launcher_keeps_alive() -> None:
    core = core_of(launcher=local())
    running = [ProcessName("shard", 0), ProcessName("shard", 1), ProcessName("worker", 0), ProcessName("worker", 1)]
    core.scale(3)
    assert core.supervise([], running, 0.0).start == (ProcessName("worker", 2),)
    core.scale(1)
    assert core.supervise([], running, 0.0).stop == (ProcessName("worker", 1),)
    assert "scaled from 3 to 1 worker" in core.job.events


def test_a_shard_that_ended_is_started_again_and_the_job_goes_on() -> None:
    core = core_of(launcher=local())
    running = [ProcessName("shard", 0), ProcessName("worker", 0), ProcessName("worker", 1)]
    assert core.supervise(ended("shard-1"), running, 0.0).start == (ProcessName("shard", 1),)
    assert core.job.state is JobState.RUNNING
    assert "shard-1 ended: killed by signal 9" in core.job.events


def test_a_wrong_configuration_ends_the_job_and_nothing_is_started_any_more() -> None:
    core = core_of(launcher=local(), registered=False)
    announce(core, 0)
    assert core.supervise(ended("shard-1", 2, "there is no such disk"), [], 0.0) == Orders()
    assert (core.job.state, core.job.reason) == (JobState.FAILED, "shard-1 ended: there is no such disk")
    core.supervise(ended("worker-0"), [], 0.0)
    assert core.job.supervision.worker_exits == 0, "the end of the others is the end of the job"


def test_a_worker_that_was_never_up_ends_the_job_with_its_wrong_configuration() -> None:
    core = core_of(launcher=local())
    Caller(core, "worker-0")
    core.supervise(ended("worker-1", 2, "there is no GPU"), [], 0.0)
    assert (core.job.state, core.job.reason) == (JobState.FAILED, "worker-1 ended: there is no GPU")


@pytest.mark.parametrize("name", ["worker-0", "shard-1"])
def test_what_cannot_come_back_ends_no_job_that_goes_on(name: str) -> None:
    core = core_of(launcher=local(), lease_ttl_s=1000.0)
    Caller(core, "worker-0")
    other = Caller(core, "worker-1")
    started = core.supervise([], [], 0.0).start
    rest = [process for process in started if str(process) != name]
    for step in range(10):
        now_s = 10.0 * step
        assert core.supervise(ended(name, 2, "cert.pem expired"), rest, now_s).start == (), "not at once"
        assert [str(process) for process in core.supervise([], rest, now_s + 5.0).start] == [name]
        assert other.complete_all(1, now_s + 5.0) == [step]
    assert core.job.state is JobState.RUNNING
    assert f"{name} ended: cert.pem expired" in core.job.events


def test_a_worker_that_is_killed_for_ever_ends_the_job_unless_steps_complete() -> None:
    core = core_of(launcher=local())
    for _ in range(10):
        caller = Caller(core, "worker-0")
        caller.lease(1)
        caller.complete_all()
        core.supervise(ended("worker-0"), [], 0.0)
    assert core.job.state is JobState.RUNNING
    core.supervise(ended("worker-0"), [], 0.0)
    core.supervise(ended("worker-0"), [], 0.0)
    assert core.job.state is JobState.FAILED
    assert "ended too often" in core.job.reason


def test_a_worker_with_other_arithmetic_is_refused_in_rounds() -> None:  # P13
    core = core_of(Sync(4), same_arithmetic=True)
    core.register_worker("", "x86", "cpu", "", 0.0)
    with pytest.raises(WrongRun, match="other arithmetic"):
        core.register_worker("", "arm", "cpu", "", 0.0)


def test_a_silent_shard_is_reported_once_until_it_answers() -> None:
    core = core_of()
    core.shard_silent(0, 2.0, "no answer")
    assert not [event for event in core.job.events if "does not answer" in event]
    core.shard_silent(0, 4.0, "no answer")
    core.shard_silent(0, 5.0, "no answer")
    assert len([event for event in core.job.events if event.startswith("warning: shard-0 does not answer")]) == 1
    assert len(core.job.problems.texts) == 1
    assert core.job.state is JobState.RUNNING
    announce(core, 0)
    core.shard_silent(0, 6.0, "no answer")
    assert len(core.job.problems.texts) == 1, "it can still call, and is still not answering"
    core.shard_answered(0)
    core.shard_answered(0)
    assert (core.job.problems.texts, core.job.events[-1]) == ([], "resolved: shard-0 answers again")
    core.shard_silent(0, 4.0, "no answer")
    assert len([event for event in core.job.events if event.startswith("warning: shard-0 does not answer")]) == 2
    core.shard_silent(0, 3600.0, "no answer")
    assert core.job.state is JobState.RUNNING, "it is started again, or comes back"


def test_each_silent_shard_is_a_problem_of_its_own() -> None:
    core = core_of()
    for shard in (0, 1):
        core.shard_silent(shard, 4.0, "no answer")
    assert [core.job.shard_live(0), core.job.shard_live(1)] == [False, False]
    core.shard_answered(0)
    assert [text.partition(" ")[0] for text in core.job.problems.texts] == ["shard-1"]
    assert [core.job.shard_live(0), core.job.shard_live(1)] == [True, False]


def test_what_python_warns_of_in_workers_is_an_event_once() -> None:
    core = core_of()
    first, second = Caller(core, "worker-0"), Caller(core, "worker-1")
    for caller in (second, first, second):
        caller.call(warnings=["UserWarning: too few (train.py:3)"])
    first.call(warnings=[f"{number}" for number in range(2 * WARNINGS_MAX)])
    told = [event for event in core.job.events if event.startswith("worker-") and "started" not in event]
    assert told[0] == "worker-1: UserWarning: too few (train.py:3)"
    assert len(told) == WARNINGS_MAX
