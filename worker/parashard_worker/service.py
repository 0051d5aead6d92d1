"""One worker from its arguments to its outcome, as a process of its own or in a thread of another.

Knows no signal and ends nothing. Called by `parashard_worker.__main__`, and by a program whose threads are workers
(`parashard.api.worker_threads`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parashard.errors import JobFailed
from parashard.job.layers import parse_set
from parashard.launch.run_folders import how_it_ended
from parashard.process.arguments import credentials_of, service_arguments
from parashard.process.logs import log
from parashard.process.shell import ExitCode, Stop
from parashard.protocol.coordinator_watchdog import client_of, connecting_arguments
from parashard.security.identity import Role
from parashard_worker.leasing import end_process
from parashard_worker.loading import NAMED_BY_JOB, OwnTask
from parashard_worker.worker import Worker, WorkerSettings

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer


def arguments_of(words: Sequence[str] | None) -> Namespace:
    """Return a worker's arguments; None: the command line's."""
    parser = service_arguments("One parashard worker: leases steps, computes gradients, pushes them.")
    connecting_arguments(parser)
    parser.add_argument("--name", default="", help="its name in the job, such as worker-0 (default: the next free one)")
    parser.add_argument("--device", default="", help="auto, cpu, cuda or cuda:N (default: what the job file says)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="such as data.path=/mnt/mnist")
    parser.add_argument("--model-folder", default="", help="where a model of your own is looked up on this machine")
    return parser.parse_args(words)


def serve(
    arguments: Namespace,
    stop: Stop,
    own: OwnTask = NAMED_BY_JOB,
    *,
    tracer: Tracer | None = None,
    on_hung: Callable[[str], None] | None = None,
) -> ExitCode:
    """Work for one job until it is over or a stop is asked for.

    Parameters
    ----------
    arguments : Namespace
        As `arguments_of` returned them.
    stop : Stop
        Asks for a stop.
    own : OwnTask
        What it computes; by default what the job names.
    tracer : Tracer, optional
        Makes the spans of its steps.
    on_hung : callable, optional
        Of a worker that is a thread: called with the reason, in another thread, when a step hangs in the model. None:
        the process is the worker's, and ends then.
    """
    credentials = credentials_of(arguments, Role.WORKER)
    settings = WorkerSettings(
        name=arguments.name,
        device=arguments.device,
        host=arguments.host,
        http_port=arguments.http_port,
        overrides=[parse_set(text) for text in arguments.set],
        model_folder=Path(arguments.model_folder) if arguments.model_folder else None,
        own_process=on_hung is None,
    )
    coordinator = client_of(arguments, stop, credentials)
    try:
        worker = Worker(
            coordinator,
            own,
            settings=settings,
            credentials=credentials,
            tracer=tracer,
            on_hung=on_hung or end_process,
        )
        end = worker.run(stop)
    finally:
        coordinator.close()
    return ExitCode.JOB_FAILED if end.job_failed else ExitCode.DONE


def is_over(run_dir: str) -> bool:
    """Tell, and say, whether a run is done: its coordinator is gone, and would be waited for in vain."""
    ended = how_it_ended(Path(run_dir))
    if ended is None:
        return False
    state, reason = ended
    if state == "failed":
        raise JobFailed(f"{run_dir} has failed: {reason}; `parashard resume {run_dir}` goes on with it")
    log.info("left", reason=f"{run_dir} is done: {reason}")
    return True
