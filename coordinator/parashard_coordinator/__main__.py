"""Starts a coordinator: resolve the job, claim an incarnation, begin or resume the run, serve, and coordinate it.

After the job's end it keeps serving, so that the launcher, workers and people can still read the status, until
`--linger-s` has passed, a stop is requested or the lifeline is closed. SIGTERM before the end: save, exit 0; shards and
workers go on and wait for a successor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from parashard._proto import coordinator_pb2 as pb
from parashard.client.proto_conversion import plan_message
from parashard.errors import BadData, ConfigurationError, StoreFailed, Unavailable
from parashard.job.layers import parse_set
from parashard.job.load import as_toml, load_job
from parashard.job.schema import Job
from parashard.models.declaration import (
    RECORD_FILE,
    DeclaredJob,
    declare_named,
    read_declaration,
    write_declaration,
)
from parashard.process import failpoints
from parashard.process.addresses import Port, join_address, listen
from parashard.process.arguments import advertised_address, write_address
from parashard.process.durable import retry_while_disk_fails
from parashard.process.logs import log
from parashard.process.own_address import watch_address
from parashard.process.resources import limit_threads
from parashard.process.run_files import CHECKPOINTS
from parashard.process.shell import ExitCode, Stop, end_process, run_service
from parashard.process.starts import CoordinatorStart
from parashard.protocol.coordinator_client import ADDRESS_FILE, http_port_in
from parashard.protocol.rpc import Server
from parashard.security.given_credentials import credentials_of
from parashard.security.identity import Role
from parashard.store import Store, open_store
from parashard.store.claims import claim_incarnation
from parashard.telemetry.http import HttpPort
from parashard.telemetry.tracing import tracing
from parashard_coordinator.core.callback_progress import NO_CALLBACKS, CallbackOptions
from parashard_coordinator.core.calls import JobState
from parashard_coordinator.core.core import Core
from parashard_coordinator.endpoints.service import REQUEST_BYTES_MAX, WAITERS_MAX
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_coordinator.pods import KubernetesCluster, PodWatch, Wanted, open_cluster
from parashard_coordinator.run.coordination import Coordination
from parashard_coordinator.run.job_start import new_job_record
from parashard_coordinator.run.resolve import ResolvedJob, resolve
from parashard_coordinator.run.store import RunIdentity, RunStore
from parashard_coordinator.shards import ShardChannels

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer

LINGER_S = 1.0


def main() -> int:
    """Run one coordinator and return its exit code."""
    start = CoordinatorStart.read()

    def traced(stop: Stop) -> ExitCode:
        with tracing(start.trace, "coordinator", "") as tracer:
            return serve(start, stop, tracer)

    return run_service("coordinator", start.lifeline, traced, start.stopped_exit_code, start.log_format)


def serve(start: CoordinatorStart, stop: Stop, tracer: Tracer | None) -> ExitCode:
    """Coordinate one job."""
    limit_threads(1)
    run_dir = start.run_dir
    credentials = credentials_of(start, Role.COORDINATOR)
    job = load_job(start.job, [parse_set(text) for text in start.set], environ={}).job
    cluster = _cluster(job, start.kubernetes_job)
    store = open_store(job.checkpoint.url or str(run_dir.absolute() / CHECKPOINTS))
    run_id, resolved, run_store = take_up(start, job, store, stop)
    incarnation = run_store.incarnation
    plan, source = run_store.open_plan(resolved.plan, start.from_checkpoint)
    callbacks = CallbackOptions(
        followed=start.callbacks is not None,
        decide=start.callbacks == "decide",
        ahead=start.callbacks_ahead,
        store_evaluated=start.store_evaluated,
    )
    core = ExclusiveCore(
        taken_up_core(resolved, run_id, run_store, stop, callbacks, resume=start.resume, open_=start.open)
    )
    reply = pb.GetJobReply(
        run_id=run_id,
        job_digest=resolved.digest,
        job_toml=as_toml(job),
        plan=plan_message(plan),
        model_folder=str(start.model_folder or ""),
        initial_sha256=resolved.initial_sha256,
        steps_total=resolved.steps.total,
        data_fingerprint=resolved.spec.fingerprint,
        checkpoint_url=store.url,
        examples=resolved.spec.examples,
        batched=resolved.spec.batched,
        source=source,
        stores_evaluated=callbacks.store_evaluated,
    )
    coordination = Coordination(core, resolved, plan, reply, run_dir, run_store, ShardChannels(credentials), tracer)
    server = listen(
        start.port,
        lambda port: Server(join_address(start.host, port), credentials, REQUEST_BYTES_MAX, WAITERS_MAX),
    )
    coordination.service.add_to(server)
    admission = server.admission
    refused = {"calls": lambda: admission.refused, "slow": lambda: admission.slow}
    http_on = partial(
        coordination.http_port, start.host, refused=refused, credentials=credentials, advertise=start.advertise
    )
    http = open_http_port(start, http_on, run_id)
    server.start()
    http.start()
    watch_address(start.host, stop)
    address = advertised_address(start, server.address, stopping=stop.event)
    where: dict[str, str | int] = {"address": address, "http": http.address, "run_id": run_id, "pid": os.getpid()}
    write_address(run_dir / ADDRESS_FILE, where, stop.event)
    failpoints.hit("coordinator.boot.serving")
    if cluster is not None:
        watch_pods(cluster, core, job.cluster.workers).start()
    log.info("serving", address=address, http=http.address, run_id=run_id, incarnation=incarnation)
    try:
        state = coordination.run(stop)
        stay_until_s = time.monotonic() + start.linger_s
        while time.monotonic() < stay_until_s and not stop.wait(min(LINGER_S, stay_until_s - time.monotonic())):
            coordination.linger()
    finally:
        server.stop(grace_s=0.2)
        http.stop()
    exit_code = core.run_exclusive(lambda core, _: core.job.exit_code)
    return ExitCode(exit_code) if state is JobState.FAILED else ExitCode.DONE


def open_http_port(start: CoordinatorStart, http_on: Callable[[Port], HttpPort], run_id: str) -> HttpPort:
    """Listen for HTTP; without `--http-port` on the run's previous port if it is free, so that open pages go on."""
    earlier = 0 if start.http_port else http_port_in(start.run_dir, run_id)
    try:
        return http_on(earlier or start.http_port)
    except Unavailable:
        if not earlier:
            raise
        return http_on(0)  # another process has taken the port meanwhile


def take_up(start: CoordinatorStart, job: Job, store: Store, stop: Stop) -> tuple[str, ResolvedJob, RunStore]:
    """Begin the run, or resume it with its stored initial values, under a claimed incarnation."""
    # A run that has begun waits while the disk is full; a new run fails on a full disk.
    drawn, resume = start.run_id or os.urandom(8).hex(), start.resume
    kept = None
    unclaimed = RunStore(store, 0)
    begun = unclaimed.find_run(drawn, resume=resume)
    if begun is not None:
        kept = unclaimed.catalogue.initial_manifest(begun.job_digest)
    declared = declared_job(start, job, rows=kept is None)
    resolved = resolve(job, declared, start.init, kept=kept)
    identity = RunIdentity(resolved.digest, resolved.identity, as_toml(job))
    # Before the claim, which would fence the coordinator of another run.
    run_id = unclaimed.check_run(drawn, identity, resume=resume)

    def claim() -> int:
        return claim_incarnation(store, "coordinator")

    incarnation = claim() if begun is None else retry_while_disk_fails(claim, "claims", stop.event)
    run_store = RunStore(store, incarnation)
    failpoints.hit("coordinator.boot.claimed")
    run_store.keep_initial(resolved.digest, resolved.initial, resolved.initial_rows, resolved.initial_slots)
    run_store.keep_preprocessing(resolved.spec.preprocessing)
    run_store.begin_run(run_id, identity)
    if start.declaration is None and not start.again:
        keep_declaration(start.run_dir, declared)
    return run_id, resolved._replace(initial={}, initial_rows={}, initial_slots={}), run_store  # the store has them


def declared_job(start: CoordinatorStart, job: Job, *, rows: bool) -> DeclaredJob:
    """Return the launcher's declaration, or the one kept by an earlier coordinator, or else make one."""
    if start.declaration is not None:
        return read_declaration(start.declaration, rows=rows)
    if start.again and (start.run_dir / RECORD_FILE).exists():
        try:
            return read_declaration(start.run_dir)
        except BadData as error:
            log.warning("declaration-not-read", error=error.message, then="data and model are opened")
    return declare_named(job, start.model_folder)


def keep_declaration(run_dir: Path, declared: DeclaredJob) -> None:
    """Write the declaration for a successor, which then opens no data; not if the model audits final weights."""
    try:
        if declared.auditor is None:
            write_declaration(run_dir, replace(declared, arrays={}, rows={}, slots={}))
            return
    except StoreFailed as error:
        log.warning("declaration-not-kept", error=error.message, then="a restart opens data and model")
    with suppress(OSError):
        (run_dir / RECORD_FILE).unlink()  # of an earlier run


def watch_pods(cluster: KubernetesCluster, core: ExclusiveCore, workers: int) -> PodWatch:
    """Return the watch that reports pods to the core, and scales the workers' Job; it ends with the process."""
    return PodWatch(
        cluster,
        on_end=lambda end: core.run_exclusive(lambda core, _: core.pod_ended(end)),
        wanted=lambda: core.run_exclusive(lambda core, _: Wanted(core.job.workers_wanted, core.job.scale_requests)),
        on_scaled=lambda what: core.run_exclusive(lambda core, _: core.job.add_event(what)),
        on_error=lambda: core.run_exclusive(lambda core, _: core.pods_unwatched()),
        workers=workers,
    )


def _cluster(job: Job, kubernetes_job: str) -> KubernetesCluster | None:
    """Return the Kubernetes cluster of the job's pods; None for another launcher."""
    if job.cluster.launcher != "kubernetes":
        return None
    if not kubernetes_job:
        raise ConfigurationError('cluster.launcher = "kubernetes" needs --kubernetes-job: the workers\' Job')
    return open_cluster(kubernetes_job)


def taken_up_core(
    resolved: ResolvedJob,
    run_id: str,
    run_store: RunStore,
    stop: Stop,
    callbacks: CallbackOptions = NO_CALLBACKS,
    *,
    resume: bool,
    open_: bool = False,
) -> Core:
    """Return the core of a job with an earlier coordinator's stored state, and store it under this incarnation."""
    job = new_job_record(resolved, run_id, run_store.incarnation, callbacks, open_=open_)
    job.report_data(resolved.summary(), resolved.warnings)
    saved = run_store.load_saved()
    if saved is not None:
        gap_s = (
            time.time() - saved.stored_at if saved.stored_at and not resume else 0.0
        )  # time before a resume does not count as training
        job.resume(saved, max(0.0, gap_s))
    if resume:
        job.reset_for_resume()
    retry_while_disk_fails(lambda: run_store.save(job.saved()), "the coordinator's records", stop.event)
    return Core(job)


if __name__ == "__main__":
    end_process(main())
