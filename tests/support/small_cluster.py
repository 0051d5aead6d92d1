"""A job's coordinator and its one shard in this process, over real sockets: for workers that are objects in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parashard._proto import coordinator_pb2 as pb
from parashard.client.proto_conversion import plan_message
from parashard.job.load import as_toml
from parashard.protocol.coordinator_client import CoordinatorClient
from parashard.protocol.rpc import Server
from parashard.store import open_store
from parashard_coordinator.core.core import Core
from parashard_coordinator.endpoints.service import CoordinatorService
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_coordinator.run.job_start import new_job_record
from parashard_coordinator.run.resolve import ResolvedJob
from support.shard_process import ShardProcess
from support.waiting import eventually

RUN = "run-1"


@dataclass
class SmallCluster:
    """What a worker finds; `client` is the worker's way to the coordinator."""

    core: ExclusiveCore
    shard: ShardProcess
    told: pb.GetJobReply
    client: CoordinatorClient

    def steps_applied(self) -> int:
        return len(self.shard.shard.updates.applied)


@contextmanager
def small_cluster(
    resolved: ResolvedJob, folder: Path, *, cancelled: threading.Event | None = None
) -> Iterator[SmallCluster]:
    """Run the coordinator and the shard of a job, over gRPC; the job is done when every step is in."""
    told = pb.GetJobReply(
        run_id=RUN,
        job_digest=resolved.digest,
        job_toml=as_toml(resolved.job),
        plan=plan_message(resolved.plan),
        steps_total=resolved.steps.total,
        data_fingerprint=resolved.spec.fingerprint,
        examples=resolved.spec.examples,
    )
    core = ExclusiveCore(Core(new_job_record(resolved, RUN, 1)))
    coordinator = Server("127.0.0.1:0")
    CoordinatorService(core, told, StatusView(resolved.job.job.name, "async")).add_to(coordinator)
    shard = ShardProcess(open_store(str(folder)), reply=told)
    data = Server("127.0.0.1:0")
    shard.service.add_to(data)
    coordinator.start()
    data.start()
    client = CoordinatorClient(coordinator.address, cancelled=cancelled)
    ending = threading.Thread(target=_done_when_complete, args=(core,), daemon=True)
    ending.start()
    client.register_shard(
        pb.RegisterShardRequest(
            run_id=RUN,
            job_digest=resolved.digest,
            shard=0,
            incarnation=shard.shard.identity.incarnation,
            address=data.address,
        )
    )
    try:
        yield SmallCluster(core, shard, told, client)
    finally:
        core.run_exclusive(lambda core, _: core.job.fail("the test is over"))
        ending.join()
        client.close()
        data.stop(grace_s=0.0)
        coordinator.stop(grace_s=0.0)


def _done_when_complete(core: ExclusiveCore) -> None:
    """Let the job be done once every step is in, as the coordination does after the last checkpoint."""
    eventually(lambda: core.run_exclusive(lambda core, _: core.job.complete or core.job.over), "the job is complete")
    core.run_exclusive(lambda core, _: core.job.over or core.job.mark_done())
