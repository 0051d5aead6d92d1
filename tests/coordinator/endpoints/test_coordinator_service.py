"""The service over a real socket: every call reaches the core, and every refusal comes back as its own class."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.errors import (
    ConfigurationError,
    JobFailed,
    MalformedFrame,
    NotReady,
    Superseded,
    UnknownWorker,
    WrongRun,
)
from parashard.metrics import VALUES_MAX
from parashard.protocol.rpc import connect, our_errors
from parashard_coordinator.core.calls import JobState, LeaseAnswer
from parashard_coordinator.core.controller import Drift
from parashard_coordinator.core.core import WORKERS_MAX
from parashard_coordinator.core.draining import Answer
from parashard_coordinator.core.leases import Grant
from parashard_coordinator.core.membership import GpuMemory
from parashard_coordinator.core.policies import Sync
from parashard_coordinator.core.supervision import LocalLauncher
from parashard_coordinator.core.training_figures import MetricSums
from parashard_coordinator.endpoints.service import lease_call, lease_reply
from support.coordinator_cases import DIGEST, RUN, core_of
from support.served_core import DEADLINE_S, Served, lease_request, served, shard_request, worker_request

OTHER = "run-2"
WITHIN = [shard_pb2.Interval(start=0, stop=1)]
BEYOND = [shard_pb2.Interval(start=40, stop=(1 << 64) - 1)]


@pytest.fixture
def it() -> Iterator[Served]:
    """Return a served core whose two shards have not registered yet."""
    core = core_of(registered=False, evaluate_after=[1, 40], launcher=LocalLauncher(2, 1.0, 3))
    with served(core) as it:
        yield it


def start(it: Served) -> None:
    for shard in range(2):
        it.client.register_shard(shard_request(shard))
    it.client.register_worker(worker_request())


def completed(step: int) -> pb.CompletedStep:
    return pb.CompletedStep(step=step, incarnations=[1, 1], loss=0.5, examples=8)


def test_the_job_is_returned_on_request(it: Served) -> None:
    job = it.client.get_job()
    assert (job.run_id, job.job_digest) == (RUN, DIGEST)


def test_there_is_no_view_until_every_shard_has_registered(it: Served) -> None:  # P3
    it.client.register_shard(shard_request(1))
    with pytest.raises(NotReady, match="waiting for shard 0 to register") as caught:
        it.client.get_view(RUN)
    assert caught.value.peer == it.server.address
    it.client.register_shard(shard_request(0, 3))
    view = it.client.get_view(RUN)
    assert view.view == 2
    assert [(s.address, s.incarnation) for s in view.shards] == [("host:0", 3), ("host:1", 1)]


def test_a_shard_s_applied_steps_are_taken_in(it: Served) -> None:
    for shard in range(2):
        it.client.register_shard(shard_request(shard, applied=[shard_pb2.Interval(start=0, stop=5 + shard)]))
    assert it.core.job.leases.lowest_incomplete == 5


def test_a_shard_learns_the_coordinators_incarnation_and_what_all_have_saved() -> None:  # P3, P12
    core = core_of(Sync(4), registered=False, incarnation=3)
    with served(core) as it:
        first = it.client.register_shard(shard_request(0, checkpoint_rounds=[0, 1, 2]))
        assert (first.coordinator_incarnation, first.HasField("cut_round")) == (3, False)
        assert it.client.register_shard(shard_request(1, checkpoint_rounds=[0, 1])).cut_round == 1


def test_what_a_shard_holds_beside_what_it_has_applied_is_taken_in(it: Served) -> None:  # P5
    applied, held = [shard_pb2.Interval(start=0, stop=4)], [shard_pb2.Interval(start=0, stop=6)]
    for shard in range(2):
        it.client.register_shard(shard_request(shard, applied=applied, held=held, restored="restored p1/s0/i1/c1"))
    assert it.core.job.leases.lowest_incomplete == 6
    assert any("(host:1): restored p1/s0/i1/c1" in event for event in it.core.job.events)


def test_a_worker_is_told_that_a_new_coordinator_does_not_know_it(it: Served) -> None:  # P3
    with pytest.raises(UnknownWorker, match="worker-0 is not known to this coordinator"):
        it.client.lease(lease_request(want=1))


def test_a_drained_checkpoint_is_asked_for_until_it_is_there(it: Served) -> None:  # P8
    start(it)
    it.client.lease(lease_request(want=1))
    request = pb.CreateCheckpointRequest(run_id=RUN, request=1 << 63)
    assert it.client.create_checkpoint(request) == pb.CreateCheckpointReply(steps=1)
    it.exclusive.run_exclusive(lambda core, _: core.checkpoint_ended(Answer(checkpoint="j1", steps=1)))
    assert it.client.create_checkpoint(request) == pb.CreateCheckpointReply(checkpoint="j1", steps=1)


def test_a_decision_is_stored_before_any_process_sees_it(it: Served) -> None:  # P7
    start(it)
    stored: list[dict[int, dict[str, float | None]]] = []
    it.exclusive.on_decision = lambda core: stored.append(core.job.saved().evaluations)
    it.client.lease(lease_request(want=1))
    it.client.lease(lease_request(sequence=2, held=[0]))
    assert stored == [], "nothing was decided"
    result = pb.EvaluationResult(evaluation=1, incarnations=[1, 1], metrics={"accuracy": 0.5})
    it.client.lease(lease_request(sequence=3, held=[0], evaluated=[result]))
    assert stored == [{1: {"accuracy": 0.5}}], "by the steps before it"


def test_an_older_incarnation_of_a_shard_is_fenced(it: Served) -> None:  # P3
    it.client.register_shard(shard_request(0, 2))
    with pytest.raises(Superseded, match="incarnation 2 is registered, 1 is older"):
        it.client.register_shard(shard_request(0, 1))


@pytest.mark.parametrize("method", sorted(pb.DESCRIPTOR.services_by_name["Coordinator"].methods_by_name))
def test_bytes_that_are_no_message_are_refused_and_change_nothing(it: Served, method: str) -> None:
    channel = connect(it.server.address)
    try:
        call = channel.unary_unary(f"/parashard.v1.Coordinator/{method}")
        with pytest.raises(MalformedFrame, match="9 bytes are not the message"), our_errors(it.server.address):
            call(b"\xff" * 9, timeout=DEADLINE_S)
    finally:
        channel.close()
    assert it.core.job.events_total == 0


def test_a_process_with_another_incarnation_was_not_started_again(it: Served) -> None:
    for incarnation, first, restarts in ((1, 1, 0), (2, 1, 0), (3, 3, 1)):
        it.client.register_shard(shard_request(0, incarnation, first_incarnation=first))
        assert it.core.job.shard_restarts == restarts


def test_intervals_that_are_none_are_refused(it: Served) -> None:
    with pytest.raises(MalformedFrame):
        it.client.register_shard(shard_request(0, applied=[shard_pb2.Interval(start=5, stop=2)]))
    assert it.core.job.shards.registration(0) is None


@pytest.mark.parametrize("says", [{"applied": BEYOND}, {"held": BEYOND}, {"applied": BEYOND, "held": WITHIN}])
def test_steps_that_the_job_does_not_have_are_refused_before_they_are_counted(it: Served, says: Any) -> None:
    with pytest.raises(MalformedFrame, match="this job has 40"):
        it.client.register_shard(shard_request(0, **says))
    assert it.core.job.shards.registration(0) is None


def test_a_worker_joins_and_learns_its_name_incarnation_and_lease_time(it: Served) -> None:
    first = it.client.register_worker(worker_request("", token=7, http_address="host:9"))
    assert (first.name, first.incarnation, first.lease_ttl_s) == ("guest-0", 1, 10.0)
    assert it.client.register_worker(worker_request("", token=7)) == first, "its first answer was lost"
    other = it.client.register_worker(worker_request("guest-0", token=8))
    assert (other.name, other.incarnation) == ("guest-1", 1), "an earlier coordinator called it so; the name is taken"
    named = [it.client.register_worker(worker_request("worker-0", token=token)).incarnation for token in (1, 2)]
    assert named == [1, 2]


def test_a_name_has_a_bound(it: Served) -> None:
    with pytest.raises(ConfigurationError, match="at most 100 characters, found 101"):
        it.client.register_worker(worker_request("w" * 101))
    it.client.register_worker(worker_request("w" * 100))


def test_a_failed_job_accepts_no_worker(it: Served) -> None:
    it.core.job.fail("no disk")
    with pytest.raises(JobFailed, match="no disk"):
        it.client.register_worker(worker_request())


def test_a_lease_there_and_back(it: Served) -> None:
    start(it)
    reply = it.client.lease(lease_request(want=1))
    assert [(grant.step, grant.skip) for grant in reply.granted] == [(0, False)]
    assert (reply.state, reply.view, reply.reason) == (pb.JOB_STATE_RUNNING, 2, "")
    assert reply.retry_after_s > 0
    phases = pb.PhaseSeconds(lease=1.0, pull=2.0, compute=3.0, push=4.0, transfer=5.0, gpu_wait=1.5)
    reply = it.client.lease(lease_request(sequence=2, completed=[completed(0)], want=1, phases=phases))
    assert [(e.evaluation, e.for_round, list(e.incarnations)) for e in reply.evaluations] == [(1, False, [1, 1])]
    expected = {"lease": 1.0, "pull": 2.0, "compute": 3.0, "push": 4.0, "transfer": 5.0, "gpu_wait": 1.5}
    assert it.core.job.workers.by_name["worker-0"].phases_s == expected
    result = pb.EvaluationResult(evaluation=1, incarnations=[1, 1], metrics={"accuracy": 0.5})
    reply = it.client.lease(lease_request(sequence=3, held=[0, 1], evaluated=[result], want=1))
    assert list(reply.revoked) == [0]
    assert [grant.step for grant in reply.granted] == [2]
    failed = [pb.FailedStep(step=1, reason="NaN")]
    it.client.lease(lease_request(sequence=4, held=[2], failed=failed, held_evaluations=[1]))
    assert "worker-0 failed at step 1: NaN" in it.core.job.events
    it.client.lease(lease_request(sequence=5, held=[2], leaving=True))
    assert it.core.job.leases.leased == 0


def test_a_late_call_is_fenced(it: Served) -> None:
    start(it)
    it.client.lease(lease_request(sequence=7))
    with pytest.raises(NotReady, match="call 6 comes after call 7"):
        it.client.lease(lease_request(sequence=6, want=1))


def test_the_status(it: Served) -> None:
    start(it)
    status = it.client.get_status()
    assert (status.job, status.state) == ("digits", pb.JOB_STATE_RUNNING)
    assert [worker.name for worker in status.workers] == ["worker-0"]


def test_scale(it: Served) -> None:
    assert it.client.scale(5).workers_wanted == 5
    assert it.core.job.workers_wanted == 5
    with pytest.raises(ConfigurationError, match=f"from 0 to {WORKERS_MAX}, found 5000"):
        it.client.scale(5000)
    assert it.core.job.workers_wanted == 5


def test_supervise_tells_what_to_start_and_stop(it: Served) -> None:
    start(it)
    running = [pb.ProcessName(role="shard", index=i) for i in range(2)] + [pb.ProcessName(role="worker", index=4)]
    reply = it.client.supervise(pb.SuperviseRequest(run_id=RUN, running=running), DEADLINE_S)
    assert [(p.role, p.index) for p in reply.start] == [("worker", 0), ("worker", 1)]
    assert [(p.role, p.index) for p in reply.stop] == [("worker", 4)]
    assert (reply.state, reply.reason) == (pb.JOB_STATE_RUNNING, "every shard is up")


def test_supervise_receives_exits(it: Served) -> None:
    start(it)
    it.client.lease(lease_request(want=1))
    process = pb.ProcessName(role="worker", index=0)
    ended = pb.ProcessExit(process=process, exit_code=-9, reason="killed by signal 9", number=1)
    it.client.supervise(pb.SuperviseRequest(run_id=RUN, exits=[ended]), DEADLINE_S)
    assert it.core.job.leases.leased == 0
    assert "worker-0 ended: killed by signal 9" in it.core.job.events


def test_the_user_stops_the_job_through_supervise(it: Served) -> None:
    start(it)
    reply = it.client.supervise(pb.SuperviseRequest(run_id=RUN, stop_reason="interrupted"), DEADLINE_S)
    assert (reply.state, reply.reason, list(reply.start)) == (pb.JOB_STATE_FAILED, "interrupted", [])


def test_calls_for_another_run_are_refused_and_change_nothing(it: Served) -> None:  # P2
    start(it)
    before = it.client.get_status()
    calls = [
        lambda: it.client.register_shard(shard_request(0, 9, run_id=OTHER)),
        lambda: it.client.register_shard(shard_request(0, 9, job_digest="e" * 64)),
        lambda: it.client.register_worker(worker_request(run_id=OTHER)),
        lambda: it.client.register_worker(worker_request(job_digest="e" * 64)),
        lambda: it.client.get_view(OTHER),
        lambda: it.client.lease(lease_request(run_id=OTHER, want=1)),
        lambda: it.client.supervise(pb.SuperviseRequest(run_id=OTHER, stop_reason="stop"), DEADLINE_S),
    ]
    for call in calls:
        with pytest.raises(WrongRun):
            call()
    assert it.core.job.state is JobState.RUNNING
    assert it.client.get_status() == before


def test_a_step_s_metrics_are_taken_and_too_many_are_left_out() -> None:
    known = pb.MetricSums(name="accuracy", kind="mean", values=[1.0, 2.0])
    own, newer = pb.MetricSums(name="mine", values=[1.0]), pb.MetricSums(name="next", kind="of a later version")
    many = pb.MetricSums(name="auc", kind="auc", values=[0.0] * (VALUES_MAX + 1))
    told = [pb.CompletedStep(step=0, metrics=[known, own, newer]), pb.CompletedStep(step=1, metrics=[many])]
    first, second = lease_call(pb.LeaseRequest(completed=told)).completed
    assert first.metrics == [MetricSums("accuracy", "mean", [1.0, 2.0]), MetricSums("mine", "", [1.0])]
    assert second.metrics == []


def test_drifts_that_are_numbers_are_taken() -> None:
    numbers = [(2, 0.5, 1), (3, math.nan, 1), (4, math.inf, 1), (5, -0.5, 1), (6, 0.5, 0)]
    told = [pb.StepDrift(step=step, drift=drift, updates=updates) for step, drift, updates in numbers]
    assert lease_call(pb.LeaseRequest(drifts=told)).drifts == [Drift(2, 0.5, 1)]


@pytest.mark.parametrize(
    ("told", "taken"),
    [
        (pb.GpuMemory(used_bytes=3, total_bytes=8), GpuMemory(3, 8)),
        (pb.GpuMemory(used_bytes=9, total_bytes=8), None),
        (None, None),
    ],
)
def test_a_gpus_memory_is_taken_where_it_can_be(told: pb.GpuMemory | None, taken: GpuMemory | None) -> None:
    assert lease_call(pb.LeaseRequest(gpu_memory=told)).gpu_memory == taken


def test_a_worker_is_told_what_to_measure_and_how_far_ahead_to_hold() -> None:
    grants = [Grant(1, probe=True), Grant(2)]
    reply = lease_reply(LeaseAnswer(grants, [], [], JobState.RUNNING, 1, "", ahead=1))
    assert ([grant.probe for grant in reply.granted], reply.ahead) == ([True, False], 1)
    assert not lease_reply(LeaseAnswer(grants, [], [], JobState.RUNNING, 1, "")).HasField("ahead")
