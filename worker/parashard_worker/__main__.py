"""Starts a worker as a process: reads its arguments, and turns its outcome into an exit code."""

from __future__ import annotations

from parashard.process.imports import imported

# isort: split

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from parashard.data.base import DataSource
from parashard.errors import JobFailed
from parashard.job.layers import parse_set
from parashard.job.schema import Job
from parashard.launch.run_folders import how_it_ended
from parashard.models.base import Model
from parashard.process.allocator import EVERY_STEP, keep_freed_memory
from parashard.process.arguments import credentials_of, service_arguments
from parashard.process.coordinator_watchdog import client_of, connecting_arguments
from parashard.process.logs import log
from parashard.process.shell import ExitCode, Stop, end_process, run_service
from parashard.security.identity import Role
from parashard.telemetry.observing import NO_STEP_OBSERVER, StepObserver
from parashard.telemetry.tracing import tracing
from parashard_worker.loading import job_of
from parashard_worker.worker import Worker, WorkerSettings

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer

imported()


class OwnTask(NamedTuple):
    """What a program that is a worker computes, as it is declared; None: what the job names."""

    model: Model | None = None
    source: DataSource | None = None
    model_sha256: str = ""
    check: Callable[[Job], None] | None = None
    """Raises if the coordinator's job is not the program's."""


def main(words: Sequence[str] | None = None, own: OwnTask | None = None) -> int:
    """Run one worker and return its exit code.

    Parameters
    ----------
    words : sequence of str, optional
        Its arguments; None: the command line's.
    own : OwnTask, optional
        The model and the examples of the program that is this worker; None: the job names them.
    """
    parser = service_arguments("One parashard worker: leases steps, computes gradients, pushes them.")
    connecting_arguments(parser)
    parser.add_argument("--name", default="", help="its name in the job, such as worker-0 (default: the next free one)")
    parser.add_argument("--device", default="", help="auto, cpu, cuda or cuda:N (default: what the job file says)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="such as data.path=/mnt/mnist")
    parser.add_argument("--model-folder", default="", help="where a model of your own is looked up on this machine")
    arguments = parser.parse_args(words)
    keep_freed_memory(EVERY_STEP)
    role = arguments.name or "worker"
    code = arguments.stopped_exit_code

    def traced(stop: Stop) -> ExitCode:
        if _is_over(arguments.connect):
            return ExitCode.DONE
        with tracing(arguments.trace, "worker", arguments.name) as tracer:
            return serve(arguments, stop, tracer, own)

    return run_service(role, arguments.lifeline, traced, code, arguments.log_format)


def serve(arguments: Namespace, stop: Stop, tracer: Tracer | None, own: OwnTask | None = None) -> ExitCode:
    """Work for one job until it is over or a stop is asked for."""
    credentials = credentials_of(arguments, Role.WORKER)
    settings = WorkerSettings(
        name=arguments.name,
        device=arguments.device,
        host=arguments.host,
        http_port=arguments.http_port,
        overrides=[parse_set(text) for text in arguments.set],
        model_folder=Path(arguments.model_folder) if arguments.model_folder else None,
        own_process=True,
    )
    coordinator = client_of(arguments, stop, credentials)
    model, source, model_sha256, check = own or OwnTask()
    reply = None
    if check is not None:
        reply = coordinator.get_job()
        check(job_of(reply))
    worker = Worker(
        coordinator,
        model,
        source,
        reply,
        model_sha256=model_sha256,
        settings=settings,
        credentials=credentials,
        observer=_observer_of(tracer),
    )
    end = worker.run(stop)
    return ExitCode.JOB_FAILED if end.job_failed else ExitCode.DONE


def _observer_of(tracer: Tracer | None) -> StepObserver:
    if tracer is None:
        return NO_STEP_OBSERVER
    from parashard_worker.traced import StepSpans

    return StepSpans(tracer)


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


if __name__ == "__main__":
    end_process(main())
