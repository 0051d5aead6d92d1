"""Starts a worker: ask for the job, open the device, data and model, join, and work until the job is over."""

from __future__ import annotations

import os
import threading
import time
from argparse import Namespace
from pathlib import Path

import structlog

from parashard.client import ShardClient, View
from parashard.compute import limit_threads, threads_for
from parashard.contracts import plan_from
from parashard.coordinator_client import CoordinatorClient, find_coordinator
from parashard.data import open_source
from parashard.data.base import DataSpec
from parashard.errors import WrongRun
from parashard.job.digest import changed_keys, identity_digest, job_identity
from parashard.job.layers import parse_set
from parashard.job.load import job_from_toml
from parashard.job.schema import Job
from parashard.models import build_model
from parashard.partition import Plan
from parashard.process import ExitCode, Stop, check_host, end_process, run_service, service_arguments
from parashard.steps import StepPlan
from parashard.telemetry.http import HttpPort, new_registry
from protos import coordinator_pb2 as pb
from worker.device import open_device
from worker.leasing import Joined, Leasing
from worker.loop import StepLoop, Task
from worker.metrics import WorkerCollector

LEAVE_S = 2.0  # for the last report
GRACE_S = 3.0  # for the step in the works, once a stop is asked for

log = structlog.get_logger("worker")


def main() -> int:
    """Run one worker and return its exit code."""
    parser = service_arguments("One parashard worker: leases steps, computes gradients, pushes them.")
    parser.add_argument("--connect", required=True, help="the coordinator: host:port, or a run directory")
    parser.add_argument("--name", default="", help="its name in the job, such as worker-0 (default: the next free one)")
    parser.add_argument("--device", default="", help="auto, cpu, cuda or cuda:N (default: what the job file says)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="such as data.path=/mnt/mnist")
    parser.add_argument("--model-folder", default="", help="where a model of your own is looked up on this machine")
    arguments = parser.parse_args()
    role = arguments.name or "worker"
    return run_service(role, arguments.lifeline, lambda stop: serve(arguments, stop))


def serve(arguments: Namespace, stop: Stop) -> ExitCode:
    """Work for one job until it is over or a stop is asked for."""
    check_host(arguments.host, arguments.insecure)
    coordinator = CoordinatorClient(find_coordinator(arguments.connect, giving_up=stop.event), giving_up=stop.event)
    reply = coordinator.get_job()
    job = job_from_toml(reply.job_toml, [parse_set(text) for text in arguments.set])
    policy = job.consistency.policy
    threads = threads_for(job.cluster.worker_threads, job.cluster.workers, reproducible=policy.kind == "sync")
    limit_threads(threads)
    device = open_device(arguments.device or job.cluster.device)
    source = open_source(job.data)
    limit_threads(threads)  # again: what reads the data may have brought a BLAS of its own
    if source.spec.fingerprint != reply.data_fingerprint:
        raise WrongRun(
            f"this machine's data differ from the job's: fingerprint {source.spec.fingerprint[:12]} is not "
            f"{reply.data_fingerprint[:12]} (data.path is {getattr(job.data, 'path', 'built in')})"
        )
    plan = plan_from(reply.plan)
    _check_identity(job, source.spec, plan, reply)
    folder = arguments.model_folder or reply.model_folder
    task = Task(
        model=build_model(job.model, source.spec, job.job.seed, Path(folder) if folder else None),
        source=source,
        steps=StepPlan(source.spec.examples, job.job.batch_size, job.job.epochs, job.job.seed),
        plan=plan,
        device=device,
        clip_norm=job.optimizer.clip_norm,
        round_steps=policy.bound if policy.kind == "sync" else None,
    )
    registry = new_registry("worker")
    joined = False
    http = HttpPort(arguments.host, arguments.http_port, registry, lambda: "" if joined else "not in the job yet")
    http.start()
    membership = coordinator.register_worker(
        pb.RegisterWorkerRequest(
            run_id=reply.run_id,
            job_digest=reply.job_digest,
            name=arguments.name,
            fingerprint=device.fingerprint(),
            http_address=http.address,
            device=device.name,
        )
    )
    joined = True
    structlog.contextvars.bind_contextvars(worker=membership.name, incarnation=membership.incarnation)
    log.info("joined", device=device.name, threads=threads, http=http.address)
    leasing = Leasing(
        coordinator,
        Joined(reply.run_id, membership.name, membership.incarnation, membership.lease_ttl_s),
        batch=job.cluster.lease_batch,
        ahead=job.cluster.pipeline_depth,
        step_timeout_s=job.cluster.step_timeout_s,
    )

    def refresh() -> View:
        view = coordinator.get_view(reply.run_id)
        return View(view.view, tuple(s.address for s in view.shards), tuple(s.incarnation for s in view.shards))

    client = ShardClient(reply.run_id, reply.job_digest, plan, membership.name, giving_up=stop.event)
    loop = StepLoop(task, client, leasing, refresh, depth=job.cluster.pipeline_depth)
    registry.register(WorkerCollector(loop, membership.name))
    leasing.start()
    threading.Thread(target=_leave_in_time, args=(stop, leasing), name="leaving", daemon=True).start()
    try:
        loop.run(lambda: stop.asked)
    finally:
        leasing.leave(LEAVE_S)
        client.close()
        http.stop()
    if leasing.failure is not None:
        raise leasing.failure
    log.info("left", steps=loop.steps, reason=stop.reason or leasing.reason)
    return ExitCode.FAILED if leasing.state == pb.JOB_STATE_FAILED else ExitCode.DONE


def _leave_in_time(stop: Stop, leasing: Leasing) -> None:
    """End the process soon after a stop is asked for, however long the step in the works takes: it is leased again."""
    stop.event.wait()
    time.sleep(GRACE_S)
    leasing.leave(LEAVE_S)
    log.info("left", reason=f"{stop.reason}; the step in the works was given back")
    os._exit(ExitCode.DONE)


def _check_identity(job: Job, spec: DataSpec, plan: Plan, reply: pb.GetJobReply) -> None:
    """Refuse to work on steps that are not the job's: --set may say where things are, not what is computed (P2)."""
    mine = job_identity(job, spec, plan.variables)
    if identity_digest(mine) != reply.job_digest:
        theirs = job_identity(job_from_toml(reply.job_toml), spec, plan.variables)
        changed = ", ".join(changed_keys(theirs, mine)) or "none; is this another version of parashard?"
        raise WrongRun(f"this worker would compute another job than the coordinator's; keys that differ: {changed}")


if __name__ == "__main__":
    end_process(main())
