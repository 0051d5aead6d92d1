"""The command line: a table of the commands with the file of each, their help, and the printing of their errors.

A command's file is imported when the command is used: help needs none of them. Help and mistakes are plain text: rich,
which would draw boxes around them, is loaded by the commands that show tables or the live view. Errors go to standard
error in one line, never a traceback of a user's mistake. Exit codes: 0 done, 1 failed, 2 configuration, 3 fenced, 75
retry later, 130 interrupted.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from parashard import __version__
from parashard.errors import ParashardError
from parashard.process.best_effort import lossy, release_standard_streams
from parashard.process.shell import ExitCode, exit_code_of

COLUMNS_MAX = 120  # of help; on a narrower terminal its width

_Run = TypeVar("_Run", bound=Callable[..., Any])


class _PlainFlags:
    """Help that shows no type beside a flag, which takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; those without a value have nothing to be shown for it."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the command that this is mixed into
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_PlainFlags, TyperCommand):
    pass


class _Group(_PlainFlags, TyperGroup):
    """A group whose help lists each command with the whole first paragraph of its own."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the section of help that lists the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(self.listed())

    def listed(self) -> list[tuple[str, str]]:
        """Return the name and the help of each command that help shows."""
        shown = [(name, command) for name, command in self.commands.items() if not command.hidden]
        return [(name, " ".join((command.help or "").partition("\n\n")[0].split())) for name, command in shown]


class App(typer.Typer):
    """A command with commands of its own, whose flags are shown as flags."""

    def __init__(self, cls: type[TyperGroup] = _Group, **settings: Any) -> None:
        super().__init__(
            cls=cls, rich_markup_mode=None, context_settings={"max_content_width": COLUMNS_MAX}, **settings
        )

    def command(self, *names: Any, **settings: Any) -> Callable[[_Run], _Run]:
        """Return a decorator that registers a command."""
        return super().command(*names, cls=_Command, **settings)


class OnDemand(NamedTuple):
    """Where a command is: a function or an `App` of its name, which is imported when the command is used."""

    file: str
    """Of this folder, without its ending."""
    help: str
    """The first paragraph of its help."""
    words_last: bool = False
    """Whether what follows its first argument is another program's, options too."""

    def load(self, name: str) -> Any:
        """Import the command and return it as click has it."""
        found = getattr(import_module(f"parashard.cli.{self.file}"), name)
        if isinstance(found, App):
            return typer.main.get_group(found)
        alone = App(add_completion=False)
        alone.command(name, context_settings={"allow_interspersed_args": not self.words_last})(found)
        return typer.main.get_command(alone)


COMMANDS: Mapping[str, OnDemand] = {
    "run": OnDemand("run", "Train a job, on this machine or on others, and show how it goes."),
    "resume": OnDemand(
        "run",
        "Go on with a run that was stopped, with the values that it began with and the flags of now over them.",
    ),
    "init": OnDemand("jobs", "Write a job file for a table, with a comment on each of its lines."),
    "predict": OnDemand("results", "Predict for a file with the weights of a run that is done."),
    "serve": OnDemand(
        "serve",
        "Serve rows and variables of a run to read, from its checkpoints, while it runs and after.",
    ),
    "plot": OnDemand("results", "Draw a run's loss and metrics into an SVG file."),
    "config": OnDemand("jobs", "Show every value of a job and where it came from."),
    "status": OnDemand("ask", "Ask a running coordinator how its job goes."),
    "scale": OnDemand(
        "ask",
        "Change the number of workers of a running job, on a local cluster or on Kubernetes.",
    ),
    "worker": OnDemand("worker", "Join a running job with one more worker, from anywhere.", words_last=True),
    "kill": OnDemand(
        "runs",
        "Kill one process of a run on this machine, to rehearse that nothing is lost: it is started again.",
    ),
    "chaos": OnDemand(
        "chaos",
        "Run a job under faults, of all kinds but --disk unless some are asked for; tell whether promises were kept.",
    ),
    "health": OnDemand(
        "health",
        "Ask a coordinator, shard or worker whether it is ready: exit code 0 if so, 75 if not.",
    ),
    "doctor": OnDemand(
        "doctor", "Check machines, and the network between them, for a job; exit code 1 where one would not work."
    ),
    "runs": OnDemand("runs", "List and remove the runs under runs/."),
    "checkpoint": OnDemand("checkpoint", "Create, list, verify and export checkpoints."),
    "render": OnDemand("render", "Write a job as manifests for a platform of containers, or as a script for Slurm."),
    "certs": OnDemand(
        "certs",
        "Make certificates for mutual TLS: an authority of your own, for development.",
    ),
}
"""The commands that help shows, in its order."""


class _CommandLine(_Group):
    """The commands of the table, which are imported when they are used; to list them, none is."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        known: dict[str, Any] = {**COMMANDS, **self.commands}
        self.commands = known

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command as click has it."""
        found: Any = self.commands.get(name)
        return found.load(name) if isinstance(found, OnDemand) else found

    def listed(self) -> list[tuple[str, str]]:
        """Return the name and the help of each command that help shows; imports none."""
        return [(name, command.help) for name, command in COMMANDS.items()]


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


def complain(text: str) -> None:
    """Write one line to standard error, as the command line says that something went wrong."""
    lossy(sys.stderr, "error lines").write(f"parashard: {text}\n")  # the one place that speaks to standard error


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
