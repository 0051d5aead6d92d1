"""Starts a worker: as a process, whose exit code is the outcome, or as a thread of a program.

`main` runs the process; `serve` handles no signals and does not exit, and is also called by `parashard.api.backends`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from parashard.errors import JobFailed
from parashard.launch.run_folders import how_it_ended
from parashard.process.logs import log
from parashard.process.resources import EVERY_STEP, keep_freed_memory
from parashard.process.shell import ExitCode, Stop, end_process, run_service
from parashard.process.starts import WorkerStart
from parashard.protocol.coordinator_client import client_of
from parashard.security.given_credentials import credentials_of
from parashard.security.identity import Role
from parashard.telemetry.tracing import tracing
from parashard_worker.loading import NAMED_BY_JOB, OwnTask
from parashard_worker.worker import Worker

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer


def main(given: WorkerStart | None = None, own: OwnTask = NAMED_BY_JOB) -> int:
    """Run one worker as this process and return its exit code; a program that is a worker passes `given` and `own`."""
    start = given or WorkerStart.read()
    keep_freed_memory(EVERY_STEP)

    def traced(stop: Stop) -> ExitCode:
        if is_over(start.connect):
            return ExitCode.DONE
        with tracing(start.trace, "worker", start.name) as tracer:
            return serve(start, stop, own, tracer=tracer)

    return run_service(start.name or "worker", start.lifeline, traced, start.stopped_exit_code, start.log_format)


def serve(
    start: WorkerStart,
    stop: Stop,
    own: OwnTask = NAMED_BY_JOB,
    *,
    tracer: Tracer | None = None,
    on_hung: Callable[[str], None] | None = None,
) -> ExitCode:
    """Work for one job until it is over or a stop is requested; parameters as in `Worker`."""
    credentials = credentials_of(start, Role.WORKER)
    coordinator = client_of(start, stop, credentials)
    try:
        worker = Worker(coordinator, own, start, credentials=credentials, tracer=tracer, on_hung=on_hung)
        end = worker.run(stop)
    finally:
        coordinator.close()
    return ExitCode.JOB_FAILED if end.job_failed else ExitCode.DONE


def is_over(run_dir: str) -> bool:
    """Tell, and log, whether a run is done: then no coordinator will answer. Raise JobFailed if it has failed."""
    ended = how_it_ended(Path(run_dir))
    if ended is None:
        return False
    state, reason = ended
    if state == "failed":
        raise JobFailed(f"{run_dir} has failed: {reason}; `parashard resume {run_dir}` goes on with it")
    log.info("left", reason=f"{run_dir} is done: {reason}")
    return True


if __name__ == "__main__":
    end_process(main())
