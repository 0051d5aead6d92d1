"""Every field of every request at its edges: a service answers or refuses in its own words, and its figures stay whole.

A request is what a peer is trusted least with: NaN, infinities, the smallest and the largest numbers, unknown kinds,
long texts. The table is made of the protobuf descriptors, so that a new field is in it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf.message import Message

from parashard._proto import coordinator_pb2, serving_pb2, shard_pb2
from parashard.checkpoints.encoding import decode, encode
from parashard.client.pulled_rows import TableSet
from parashard.errors import ParashardError
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.optimizers import SGD
from parashard.serving.served import ServedRun
from parashard.serving.service import ServingService
from parashard_coordinator.core.calls import FollowCall
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.results import follow
from parashard_coordinator.core.saved import Saved
from parashard_coordinator.core.supervision import LocalLauncher
from parashard_coordinator.endpoints.page import status_json, status_page
from parashard_coordinator.endpoints.service import CoordinatorService, follow_reply
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.exclusive_core import ExclusiveCore
from support.coordinator_cases import DIGEST, RUN, Caller, core_of
from support.message_edges import at_edges
from support.served_core import lease_request, shard_request, worker_request
from support.serving_cases import TABLE, Committer, ShardLife, watcher_of
from support.shard_process import ShardProcess
from support.store_fakes import MemoryStore

pb = coordinator_pb2
STEPS = shard_pb2.Interval(start=0, stop=3)


class Context:
    """A call whose client is there and has a little time."""

    def time_remaining(self) -> float:
        return 0.2

    def is_active(self) -> bool:
        return True


# --- the coordinator ---

COORDINATOR: dict[str, Message] = {
    "GetJob": pb.GetJobRequest(),
    "RegisterShard": shard_request(
        0, applied=[STEPS], held=[STEPS], skipped=[STEPS], checkpoint_rounds=[0], chain_rounds=[0]
    ),
    "RegisterWorker": worker_request("worker-1", token=7),
    "GetView": pb.GetViewRequest(run_id=RUN),
    "Lease": lease_request(
        sequence=5,
        held=[0, 1],
        want=1,
        completed=[pb.CompletedStep(step=0, incarnations=[1, 1], loss=0.5, examples=4)],
        failed=[pb.FailedStep(step=1, reason="it raised", kind=pb.FAILURE_KIND_MODEL)],
        evaluated=[pb.EvaluationResult(evaluation=0, metrics={"loss": 0.5}, incarnations=[1, 1], judged_steps=2)],
        phases=pb.PhaseSeconds(lease=1.0),
        held_evaluations=[0],
        computing=[1],
    ),
    "GetStatus": pb.GetStatusRequest(run_id=RUN),
    "Scale": pb.ScaleRequest(workers=2, run_id=RUN),
    "Supervise": pb.SuperviseRequest(
        run_id=RUN,
        exits=[pb.ProcessExit(process=pb.ProcessName(role="worker"), exit_code=1, reason="why", number=1)],
        running=[pb.ProcessName(role="shard")],
    ),
    "CreateCheckpoint": pb.CreateCheckpointRequest(run_id=RUN, request=4),
    "Follow": pb.FollowRequest(run_id=RUN),
}


def running_core() -> Core:
    """Return a core whose worker-0 holds the evaluation of the first weights, and two steps."""
    core = core_of(evaluate_after=[0], launcher=LocalLauncher(2, 1.0, 3))
    worker = Caller(core, "worker-0", 0.0)
    worker.lease(1, 0.0)
    worker.lease(2, 0.0)
    return core


def check_whole(core: Core, status: StatusView) -> None:
    """Show, record and tell what the core knows: JSON has no NaN, a record is read again, and callbacks are told."""
    for now_s in (1.0, 2.0):
        core.tick(now_s)
        reply = status.message(core.job, now_s)
        json.dumps(status_json(reply), allow_nan=False)
        status_page(reply)
    decode(Saved, encode(core.job.saved()), "saved")
    follow_reply(follow(core.job, FollowCall(wants_steps=True, coordinator=core.job.options.incarnation)))


@pytest.mark.parametrize("call", COORDINATOR)
def test_the_coordinator(call: str) -> None:
    for what, request in at_edges(COORDINATOR[call]):
        core, status = running_core(), StatusView("digits", "async")
        service = CoordinatorService(ExclusiveCore(core), pb.GetJobReply(run_id=RUN, job_digest=DIGEST), status)
        answered(service, call, what, request)
        check_whole(core, status)


# --- a shard ---


def shard_requests(shard: ShardProcess) -> dict[str, list[Message]]:
    mine = shard.shard.identity
    command = {"run_id": mine.run_id, "incarnation": mine.incarnation, "coordinator_incarnation": 1, "shard": 0}
    read = {"run_id": mine.run_id, "incarnation": mine.incarnation, "plan_version": mine.plan_version}
    return {
        "Inspect": [shard_pb2.InspectRequest(run_id=mine.run_id)],
        "TakeCheckpoint": [shard_pb2.TakeCheckpointRequest(**command)],
        "Rollback": [shard_pb2.RollbackRequest(**command)],
        "Read": [
            shard_pb2.ReadRequest(changes=shard_pb2.ReadChanges(weights=True), **read),
            shard_pb2.ReadRequest(buckets=shard_pb2.ReadBuckets(table=TABLE), **read),
            shard_pb2.ReadRequest(weights=shard_pb2.ReadWeights(), **read),
        ],
    }


@pytest.mark.parametrize("call", [method.name for method in shard_pb2.DESCRIPTOR.services_by_name["Shard"].methods])
def test_a_shard(store: MemoryStore, call: str) -> None:
    shard = ShardProcess(store)
    shard.push(0, 1)
    for base in shard_requests(shard)[call]:
        for what, request in at_edges(base):
            answered(shard.service, call, what, request)
            shard.service.coordinator_incarnation = 0  # a greater one is obeyed from then on
    assert len(shard.shard.updates.applied) == 2


# --- what is served ---

SERVING: dict[str, Message] = {
    "GetServed": serving_pb2.GetServedRequest(),
    "GetRows": serving_pb2.GetRowsRequest(table=TABLE, keys=bytes(16)),
    "GetVariable": serving_pb2.GetVariableRequest(variable="dense/weight", first=3, elements=5),
    "Subscribe": serving_pb2.SubscribeRequest(
        tables=[TABLE],
        variables=["dense/weight"],
        held=[serving_pb2.HeldShard(version=serving_pb2.ShardVersion(plan_version=1, incarnation=1, number=1))],
    ),
}


@pytest.mark.parametrize("call", SERVING)
def test_a_server(store: MemoryStore, call: str) -> None:
    committer = Committer(store)
    committer.write_plan()
    for shard in range(2):
        committer.commit(ShardLife(shard), [shard], {}, ())
    run = ServedRun(watcher_of(store), TableSet((EmbeddingTable(TABLE, 2, SGD(learning_rate=1.0)),), seed=5), "small")
    run.look()
    service = ServingService(run)
    for what, request in at_edges(SERVING[call]):
        answered(service, call, what, request)


# --- all of them ---


@pytest.mark.parametrize(
    ("service", "calls"),
    [
        (coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"], COORDINATOR),
        (serving_pb2.DESCRIPTOR.services_by_name["Serving"], SERVING),
    ],
    ids=["coordinator", "serving"],
)
def test_every_call_is_in_the_table(service: Any, calls: dict[str, Message]) -> None:
    assert {method.name: method.input_type for method in service.methods} == {
        name: request.DESCRIPTOR for name, request in calls.items()
    }


def answered(service: Any, call: str, what: str, request: Message) -> None:
    """Make a call: it is answered, or refused by an error of ours."""
    try:
        reply = getattr(service, call)(request, Context())
        list(reply) if call == "Subscribe" else reply.SerializeToString()
    except ParashardError:
        pass
    except Exception as error:
        raise AssertionError(f"{call}: {what}") from error
