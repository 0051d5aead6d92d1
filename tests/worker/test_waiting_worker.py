"""A worker's start, as a process: it joins a job whose shards are not all there."""

from __future__ import annotations

import subprocess
import sys

from parashard._proto import coordinator_pb2 as pb
from parashard.client.proto_conversion import plan_message
from parashard.job.load import as_toml, job_from_toml
from parashard.protocol.rpc import Server
from parashard_coordinator.core.core import Core
from parashard_coordinator.endpoints.service import CoordinatorService
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_coordinator.run.job_start import new_job_record
from support.resolved_job import resolved_here
from support.small_job import SMALL_JOB
from support.waiting import eventually

RUN = "run-1"


def test_a_worker_that_waits_for_a_shard_gives_signs_of_life() -> None:  # P22
    resolved = resolved_here(job_from_toml(SMALL_JOB))
    core = ExclusiveCore(Core(new_job_record(resolved, RUN, 1)))  # of which no shard ever registers
    job = pb.GetJobReply(
        run_id=RUN,
        job_digest=resolved.digest,
        job_toml=as_toml(resolved.job),
        plan=plan_message(resolved.plan),
        steps_total=resolved.steps.total,
        data_fingerprint=resolved.spec.fingerprint,
    )
    service = CoordinatorService(core, job, StatusView("small", "async"))
    server = Server("127.0.0.1:0")
    service.add_to(server)
    server.start()
    worker = subprocess.Popen(
        [sys.executable, "-m", "parashard_worker", "--connect", server.address, "--name", "worker-0"]
    )
    try:

        def calls() -> int:
            known = core.run_exclusive(lambda core, now_s: core.job.workers.by_name.get("worker-0"))
            return 0 if known is None else known.sequence

        eventually(lambda: calls() > 1, "it asks for leases, again and again")
    finally:
        worker.kill()
        worker.wait()
        server.stop(grace_s=0.0)
