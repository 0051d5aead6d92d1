"""Starts a coordinator: resolve the job, listen, lease steps until the job is over, write the report, then linger.

It stays after the end so that the launcher, workers and people can still ask how the job went; a stop, or the closed
lifeline, ends it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from argparse import Namespace
from pathlib import Path

import structlog

from coordinator.core import Core, JobState, Options
from coordinator.evaluations import Evaluations, evaluation_steps
from coordinator.history import History
from coordinator.launchers import ExternalLauncher, Launcher, LocalLauncher
from coordinator.metrics import CoordinatorCollector
from coordinator.page import status_page
from coordinator.policies import leasing_policy
from coordinator.report import audited, report, save_report, save_weights
from coordinator.resolve import ResolvedJob, resolve
from coordinator.restarts import Restarts
from coordinator.service import CoordinatorService
from coordinator.staleness import quantile
from coordinator.status import StatusView
from coordinator.watch import ShardWatch
from parashard.claims import claim_incarnation
from parashard.client import ShardClient, View
from parashard.compute import limit_threads
from parashard.contracts import intervals_from, plan_message
from parashard.coordinator_client import ADDRESS_FILE
from parashard.errors import ParashardError
from parashard.intervals import IntervalSet
from parashard.job.load import as_toml, load_job
from parashard.process import ExitCode, Stop, check_host, end_process, run_service, service_arguments
from parashard.rpc import Server, join_address
from parashard.telemetry.http import HttpPort, new_registry
from parashard.variables import Float32s
from protos import coordinator_pb2 as pb

TICK_S = 0.05
LOOK_S = 1.0
EXPORT_BUDGET_S = 30.0

log = structlog.get_logger("coordinator")


def main() -> int:
    """Run one coordinator and return its exit code."""
    parser = service_arguments("The parashard coordinator: leases steps and watches the job.")
    parser.add_argument("--job", required=True, type=Path, help="the job file")
    parser.add_argument("--run-dir", required=True, type=Path, help="where the run's files go")
    parser.add_argument("--init", type=Path, help="safetensors file with the first weights")
    parser.add_argument("--model-folder", type=Path, help="where a model of your own is looked up")
    arguments = parser.parse_args()
    return run_service("coordinator", arguments.lifeline, lambda stop: serve(arguments, stop))


def serve(arguments: Namespace, stop: Stop) -> ExitCode:
    """Coordinate one job."""
    limit_threads(1)
    run_dir: Path = arguments.run_dir
    check_host(arguments.host, arguments.insecure)
    incarnation = claim_incarnation(run_dir / "claims", "coordinator")  # P3
    job = load_job(arguments.job, environ={}).job
    resolved = resolve(job, arguments.model_folder, run_dir, arguments.init)
    coordination = Coordination(resolved, run_dir, arguments.model_folder, incarnation)
    server = Server(join_address(arguments.host, arguments.port))
    coordination.service.add_to(server)
    http = coordination.http_port(arguments.host, arguments.http_port)
    server.start()
    http.start()
    _write_address(run_dir, server.address, http.address, coordination.run_id)
    log.info("serving", address=server.address, http=http.address, run_id=coordination.run_id)
    try:
        coordination.run(stop)
        while not stop.wait(LOOK_S):
            pass
    finally:
        server.stop(grace_s=0.2)
        http.stop()
    return ExitCode.DONE if coordination.core.state is JobState.DONE else ExitCode.FAILED


class Coordination:
    """The shell around the core of one job: its clock, its disk, its look at the shards."""

    def __init__(self, resolved: ResolvedJob, run_dir: Path, model_folder: Path | None, incarnation: int) -> None:
        self.run_id = secrets.token_hex(8)
        self._resolved = resolved
        self._run_dir = run_dir
        self.core = build_core(resolved, self.run_id, incarnation)
        job = resolved.job
        self._status = StatusView(job.job.name, str(job.consistency.policy), job.cluster.shards)
        reply = pb.GetJobReply(
            run_id=self.run_id,
            job_digest=resolved.digest,
            job_toml=as_toml(job),
            plan=plan_message(resolved.plan),
            model_folder=str(model_folder or ""),
            initial_file=str(resolved.initial_file or ""),
            steps_total=resolved.steps.total,
            data_fingerprint=resolved.spec.fingerprint,
        )
        self.service = CoordinatorService(self.core, reply, self._status)
        self._watch = ShardWatch(self.run_id)

    def http_port(self, host: str, port: int) -> HttpPort:
        """Return the port that serves metrics, probes and the status page."""
        registry = new_registry("coordinator")
        registry.register(CoordinatorCollector(self.core, self._present_status))
        page = {"/": lambda: (200, "text/html; charset=utf-8", status_page(self._present_status()))}
        http = HttpPort(host, port, registry, lambda: "" if self.core.shards.all_registered else self.core.reason, page)
        self._status.http_address = http.address
        return http

    def run(self, stop: Stop) -> None:
        """Lease until the job is over or a stop is asked for."""
        history = History(self._run_dir)
        next_look_s = 0.0
        while not self.core.over and not stop.wait(TICK_S):
            self.service.run(lambda core, now_s: core.tick(now_s))
            if time.monotonic() >= next_look_s and self.core.shards.all_registered:
                next_look_s = time.monotonic() + LOOK_S
                self._look()
                history.add(self._present_status())
            if self.core.complete:
                self._finish()
        if self.core.shards.all_registered:
            self._look()
        history.add(self._present_status())
        history.close()
        if self.core.state is not JobState.DONE:
            save_report(self._run_dir, report(self.core, self._resolved, self._status, time.monotonic()))

    def _look(self) -> bool:
        """Ask every shard for its record; return whether all of them answered."""
        silent = self._watch.look(self.core.shards.lives(), self._status.saw, time.monotonic())
        p95 = quantile(self._status.staleness(), 0.95)

        def note(core: Core, now_s: float) -> None:
            core.staleness_p95 = p95
            for shard, silence in silent.items():
                core.shard_silent(shard, silence.silent_s, str(silence.error))

        self.service.run(note)
        return not silent

    def _finish(self) -> None:
        """Write the final weights and the report; then the job is done."""
        core, resolved = self.core, self._resolved
        try:
            variables = self._final_weights()
        except ParashardError as error:
            reason = f"the final weights could not be pulled: {error}"
            self.service.run(lambda core, now_s: core.fail(reason))
            return
        if not self._everything_applied():
            self.service.run(lambda core, now_s: core.fail("a shard's own record lacks steps that it acknowledged"))
            return
        figures = report(core, resolved, self._status, time.monotonic())
        figures.update(audited(resolved, variables), state="done", reason=core.early_stop or "every step is in")
        save_weights(self._run_dir, variables, self.run_id)
        save_report(self._run_dir, figures)
        self.service.run(lambda core, now_s: core.done())

    def _everything_applied(self) -> bool:
        """Tell whether every shard's own applied set is the job's steps: the promise, looked at once more."""
        deadline_s = time.monotonic() + EXPORT_BUDGET_S
        while not self._look() and time.monotonic() < deadline_s:
            time.sleep(TICK_S)
        whole = IntervalSet([(0, self.core.leases.target)])
        records = self._status.records()
        return all(
            shard in records and intervals_from(records[shard].applied) == whole
            for shard in range(self.core.options.shards)
        )

    def _final_weights(self) -> dict[str, Float32s]:
        """Pull from every shard; in rounds the pull of the round after the last commits the last one (P10)."""
        lives = self.core.shards.lives()
        view = View(self.core.shards.view, tuple(s.address for s in lives), tuple(s.incarnation for s in lives))
        client = ShardClient(
            self.run_id, self._resolved.digest, self._resolved.plan, "coordinator", retry_budget_s=EXPORT_BUDGET_S
        )
        try:
            client.use(view)
            return client.pull(round_=self.core.policy.round_of(self.core.leases.target)).variables
        finally:
            client.close()

    def _present_status(self) -> pb.GetStatusReply:
        return self.service.GetStatus(pb.GetStatusRequest(), None)


def build_core(resolved: ResolvedJob, run_id: str, incarnation: int) -> Core:
    """Return the core of a job, at its start."""
    job, steps = resolved.job, resolved.steps
    policy = leasing_policy(job.consistency.policy)
    after = evaluation_steps(steps.total, steps.steps_per_epoch, job.evaluation.every_epochs)
    evaluations = Evaluations(after if resolved.spec.held_out else [], policy, steps.total)
    launcher: Launcher = ExternalLauncher()
    if job.cluster.launcher == "local":
        restarts = Restarts(job.cluster.restart_backoff_s, job.cluster.max_restarts)
        launcher = LocalLauncher(job.cluster.shards, restarts)
    options = Options(
        run_id=run_id,
        incarnation=incarnation,
        job_digest=resolved.digest,
        steps_total=steps.total,
        shards=job.cluster.shards,
        workers=job.cluster.workers,
        lease_batch=job.cluster.lease_batch,
        lease_ttl_s=job.cluster.lease_ttl_s,
        speculate_after=job.cluster.speculate_after,
        max_attempts=job.job.max_attempts,
        skip_bad_steps=job.job.on_bad_step == "skip",
        target_accuracy=job.evaluation.target_accuracy,
        target_loss=job.evaluation.target_loss,
        same_arithmetic=job.consistency.policy.kind == "sync" and not job.cluster.allow_mixed,
    )
    return Core(options, policy, evaluations, launcher)


def _write_address(run_dir: Path, address: str, http_address: str, run_id: str) -> None:
    temporary = run_dir / f"{ADDRESS_FILE}.tmp"
    temporary.write_text(json.dumps({"address": address, "http": http_address, "run_id": run_id, "pid": os.getpid()}))
    os.replace(temporary, run_dir / ADDRESS_FILE)


if __name__ == "__main__":
    end_process(main())
