"""The command line: a table of the commands with the file of each, and the printing of their errors.

A command's file is imported when the command is used: help needs none of them. Errors go to standard error in one line,
never a traceback of a user's mistake. Exit codes: 0 done, 1 failed, 2 configuration, 3 fenced, 75 retry later, 130
interrupted.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer

from parashard import __version__
from parashard.cli.app import App, OnDemand, OnDemandGroup, complain
from parashard.errors import ParashardError
from parashard.process.best_effort import release_standard_streams
from parashard.process.shell import ExitCode, exit_code_of


class _CommandLine(OnDemandGroup):
    table: ClassVar[Mapping[str, OnDemand]] = {
        "run": OnDemand("run", "run", "Train a job on a local cluster, and show how it goes."),
        "resume": OnDemand(
            "run",
            "resume",
            "Go on with a run that was stopped, with the values that it began with and the flags of now over them.",
        ),
        "init": OnDemand("init", "init", "Write a job file for a table, with a comment on each of its lines."),
        "predict": OnDemand("predict", "predict", "Predict for a file with the weights of a run that is done."),
        "serve": OnDemand(
            "serve",
            "serve",
            "Serve rows and variables of a run to read, from its checkpoints, while it runs and after.",
        ),
        "plot": OnDemand("plot", "plot", "Draw a run's loss and metrics into an SVG file."),
        "config": OnDemand("config", "config", "Show every value of a job and where it came from."),
        "status": OnDemand("ask", "status", "Ask a running coordinator how its job goes."),
        "scale": OnDemand(
            "ask",
            "scale",
            "Change the number of workers of a running job, on a local cluster or on Kubernetes.",
        ),
        "worker": OnDemand(
            "worker", "worker", "Join a running job with one more worker, from anywhere.", words_last=True
        ),
        "kill": OnDemand(
            "runs",
            "kill",
            "Kill one process of a run on this machine, to rehearse that nothing is lost: it is started again.",
        ),
        "chaos": OnDemand(
            "chaos",
            "chaos",
            "Run a job under faults, of all kinds but --disk unless some are asked for; "
            "tell whether promises were kept.",
        ),
        "health": OnDemand(
            "health",
            "health",
            "Ask a coordinator, shard or worker whether it is ready: exit code 0 if so, 75 if not.",
        ),
        "runs": OnDemand("runs", "runs", "List and remove the runs under runs/."),
        "checkpoint": OnDemand("checkpoint", "checkpoint", "Create, list, verify and export checkpoints."),
        "render": OnDemand("render", "render_app", "Write a job as manifests for a platform."),
        "certs": OnDemand(
            "certs",
            "certs",
            "Make certificates for mutual TLS: an authority of your own, for development.",
        ),
    }


app = App(
    cls=_CommandLine,
    help="A parameter server for training on machines that come and go.",
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"parashard {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def parashard(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """A parameter server for training on machines that come and go."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.CONFIGURATION)


@app.command(hidden=True)
def version() -> None:
    """Print the version."""
    typer.echo(f"parashard {__version__}")


def main() -> None:
    """Run the command line; errors of ours become one line and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a letter that a terminal lacks ends no command
    try:
        app(prog_name="parashard")
    except ParashardError as error:
        complain(str(error))
        sys.exit(int(exit_code_of(error)))
    finally:
        release_standard_streams()
