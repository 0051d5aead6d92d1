"""Starts a worker as a process: turns its outcome into an exit code, and ends with it."""

from __future__ import annotations

from collections.abc import Sequence

from parashard.process.allocator import EVERY_STEP, keep_freed_memory
from parashard.process.shell import ExitCode, Stop, end_process, run_service
from parashard.telemetry.tracing import tracing
from parashard_worker.loading import NAMED_BY_JOB, OwnTask
from parashard_worker.service import arguments_of, is_over, serve


def main(words: Sequence[str] | None = None, own: OwnTask = NAMED_BY_JOB) -> int:
    """Run one worker and return its exit code.

    Parameters
    ----------
    words : sequence of str, optional
        Its arguments; None: the command line's.
    own : OwnTask
        The model and the examples of the program that is this worker; by default the job names them.
    """
    arguments = arguments_of(words)
    keep_freed_memory(EVERY_STEP)
    role = arguments.name or "worker"
    code = arguments.stopped_exit_code

    def traced(stop: Stop) -> ExitCode:
        if is_over(arguments.connect):
            return ExitCode.DONE
        with tracing(arguments.trace, "worker", arguments.name) as tracer:
            return serve(arguments, stop, own, tracer=tracer)

    return run_service(role, arguments.lifeline, traced, code, arguments.log_format)


if __name__ == "__main__":
    end_process(main())
