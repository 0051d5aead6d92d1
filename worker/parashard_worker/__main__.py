"""Starts a worker: ask for the job, open the device, data and model, join, and work until the job is over."""

from __future__ import annotations

import os
import secrets
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from parashard import encodings
from parashard._proto import coordinator_pb2 as pb
from parashard.client.shard_client import ShardClient
from parashard.data import open_source
from parashard.data.base import DataSpec
from parashard.errors import JobFailed, WrongRun
from parashard.job.differences import differences, in_words
from parashard.job.digest import changed_keys, identity_digest, job_identity
from parashard.job.layers import parse_set
from parashard.job.load import job_from_toml
from parashard.job.schema import Job
from parashard.launch.run_folders import how_it_ended
from parashard.models import build_model, code_sha256
from parashard.plan.partition import Plan
from parashard.plan.steps import StepPlan
from parashard.process import failpoints
from parashard.process.arguments import credentials_of, service_arguments
from parashard.process.compute_threads import limit_threads, thread_variables, threads_for
from parashard.process.coordinator_watchdog import client_of, connecting_arguments
from parashard.process.logs import structlog
from parashard.process.shell import ExitCode, Stop, end_process, run_service
from parashard.protocol.proto_conversion import plan_from, view_from
from parashard.security.identity import Role
from parashard.telemetry.http import HttpPort, new_registry
from parashard.telemetry.tracing import tracing
from parashard.transports.base import View
from parashard.transports.choosing import connect_by
from parashard_worker.computing import Task
from parashard_worker.device import open_device
from parashard_worker.leasing import Joined, Leasing
from parashard_worker.loop import StepLoop
from parashard_worker.metrics import WorkerCollector

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer

LEAVE_S = 2.0  # for the last report

log = structlog.get_logger("worker")


def main() -> int:
    """Run one worker and return its exit code."""
    parser = service_arguments("One parashard worker: leases steps, computes gradients, pushes them.")
    connecting_arguments(parser)
    parser.add_argument("--name", default="", help="its name in the job, such as worker-0 (default: the next free one)")
    parser.add_argument("--device", default="", help="auto, cpu, cuda or cuda:N (default: what the job file says)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="such as data.path=/mnt/mnist")
    parser.add_argument("--model-folder", default="", help="where a model of your own is looked up on this machine")
    arguments = parser.parse_args()
    role = arguments.name or "worker"
    code = arguments.stopped_exit_code

    def traced(stop: Stop) -> ExitCode:
        if _is_over(arguments.connect):
            return ExitCode.DONE
        with tracing(arguments.trace, "worker", arguments.name) as tracer:
            return serve(arguments, stop, tracer)

    return run_service(role, arguments.lifeline, traced, code, arguments.log_format)


def serve(arguments: Namespace, stop: Stop, tracer: Tracer | None) -> ExitCode:
    """Work for one job until it is over or a stop is asked for."""
    credentials = credentials_of(arguments, Role.WORKER)
    coordinator = client_of(arguments, stop, credentials)
    reply = coordinator.get_job()
    job = job_from_toml(reply.job_toml, [parse_set(text) for text in arguments.set])
    policy = job.consistency.policy
    coordinator.retry_budget_s = job.cluster.retry_budget_s
    threads = _limited_threads(job)
    device = open_device(arguments.device or job.cluster.device, arguments.name)
    source = open_source(job.data)
    limit_threads(threads)  # again: what reads the data may have brought a BLAS of its own
    _check_data(job, source.spec, reply)
    plan = plan_from(reply.plan)
    encodings.warm_up(plan.variables.values())
    folder = arguments.model_folder or reply.model_folder
    _check_identity(job, source.spec, plan, reply, Path(folder) if folder else None)
    task = Task(
        model=build_model(job.model, source.spec, job.job.seed, Path(folder) if folder else None),
        source=source,
        steps=StepPlan(source.spec.examples, job.job.batch_size, job.job.epochs, job.job.seed),
        plan=plan,
        device=device,
        clip_norm=job.optimizer.clip_norm,
        round_steps=policy.bound if policy.kind == "sync" else None,
    )
    registry = new_registry("worker", credentials)
    joined = False
    http = HttpPort(arguments.host, arguments.http_port, registry, lambda: "" if joined else "not in the job yet")
    http.start()
    token = secrets.randbits(64)

    def join(name: str) -> Joined:
        member = coordinator.register_worker(
            pb.RegisterWorkerRequest(
                run_id=reply.run_id,
                job_digest=reply.job_digest,
                name=name,
                fingerprint=device.fingerprint(),
                http_address=http.address,
                device=device.name,
                token=token,
            )
        )
        return Joined(reply.run_id, member.name, member.incarnation, member.lease_ttl_s)

    def refresh() -> View:
        return view_from(coordinator.get_view(reply.run_id))

    member = join(arguments.name)
    joined = True
    failpoints.hit("worker.boot.joined")
    structlog.contextvars.bind_contextvars(worker=member.name, incarnation=member.incarnation)
    log.info("joined", device=device.name, threads=threads, http=http.address)
    cluster = job.cluster
    make_leasing, make_client = _makers_of(tracer, reply.run_id, member.name)
    leasing = make_leasing(
        coordinator,
        member,
        batch=cluster.lease_batch,
        ahead=cluster.pipeline_depth,
        step_timeout_s=cluster.step_timeout_s,
        join=lambda: join(member.name),
        patience_s=cluster.retry_budget_s,
    )
    client = make_client(
        reply.run_id,
        reply.job_digest,
        plan,
        member.name,
        retry_budget_s=cluster.retry_budget_s,
        giving_up=stop.event,
        look=refresh,
        connect=connect_by(cluster.transport, credentials),
    )
    loop = StepLoop(
        task,
        client,
        leasing,
        depth=cluster.pipeline_depth,
    )
    registry.register(WorkerCollector(loop, member.name))
    leasing.start()  # before the wait for the shards' view: a worker that waits for a shard is not silent (P22)
    threading.Thread(target=_leave_in_time, args=(stop, leasing, cluster.grace_s), name="leaving", daemon=True).start()
    try:
        client.use(coordinator.patiently(refresh))
        loop.run(lambda: stop.asked)
    finally:
        leasing.leave(LEAVE_S)
        client.close()
        http.stop()
    if leasing.failure is not None:
        raise leasing.failure
    log.info("left", steps=loop.steps, reason=stop.reason or leasing.reason)
    return ExitCode.JOB_FAILED if leasing.state == pb.JOB_STATE_FAILED else ExitCode.DONE


def _is_over(run_dir: str) -> bool:
    """Tell, and say, whether a run is done: its coordinator is gone, and would be waited for in vain."""
    ended = how_it_ended(Path(run_dir))
    if ended is None:
        return False
    state, reason = ended
    if state == "failed":
        raise JobFailed(f"{run_dir} has failed: {reason}; `parashard resume {run_dir}` goes on with it")
    log.info("left", reason=f"{run_dir} is done: {reason}")
    return True


def _limited_threads(job: Job) -> int:
    """Limit every library to this worker's threads, before the model, and what it needs, is imported; return them."""
    asked, sync = job.cluster.worker_threads, job.consistency.policy.kind == "sync"
    threads = threads_for(asked, job.cluster.workers, reproducible=sync, environ=os.environ)
    os.environ.update(thread_variables(threads, os.environ, override=asked > 0))
    limit_threads(threads)
    return threads


def _makers_of(
    tracer: Tracer | None, run_id: str, worker: str
) -> tuple[Callable[..., Leasing], Callable[..., ShardClient]]:
    if tracer is None:
        return Leasing, ShardClient
    from parashard_worker.traced import StepSpans, TracedClient, TracedLeasing

    spans = StepSpans(tracer, run_id, worker)
    return partial(TracedLeasing, spans), partial(TracedClient, spans)


def _leave_in_time(stop: Stop, leasing: Leasing, grace_s: float) -> None:
    """End the process soon after a stop is asked for, however long the step in the works takes: it is leased again."""
    stop.event.wait()
    time.sleep(max(0.0, grace_s - LEAVE_S))
    try:
        leasing.leave(LEAVE_S)
        log.info("left", reason=f"{stop.reason}; the step in the works was given back")
    finally:
        os._exit(stop.exit_code)  # P21


def _check_data(job: Job, spec: DataSpec, reply: pb.GetJobReply) -> None:
    """Refuse to compute with other data than the job's."""
    if spec.fingerprint != reply.data_fingerprint:
        raise WrongRun(
            f"this machine's data differ from the job's: fingerprint {spec.fingerprint[:12]} is not "
            f"{reply.data_fingerprint[:12]} (data.path is {getattr(job.data, 'path', 'built in')})"
        )


def _check_identity(job: Job, spec: DataSpec, plan: Plan, reply: pb.GetJobReply, folder: Path | None) -> None:
    """Refuse to work on steps that are not the job's: --set may say where things are, not what is computed (P2)."""
    first, code = reply.initial_sha256, code_sha256(job.model, folder)
    mine = job_identity(job, spec, plan.variables, initial_sha256=first, model_sha256=code)
    if identity_digest(mine) != reply.job_digest:
        told = job_from_toml(reply.job_toml)
        theirs = job_identity(told, spec, plan.variables, initial_sha256=first, model_sha256=code)
        changed = changed_keys(theirs, mine)
        log.info("job-differs", keys=changed)  # all of them
        named = in_words(differences(theirs, mine, "there", "here"))
        named = named or "another version of parashard or of the model's code?"
        raise WrongRun(f"this worker would compute another job than the coordinator's: {named}")


if __name__ == "__main__":
    end_process(main())
