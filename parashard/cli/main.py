"""The command line: a table of the commands with the file of each, and the printing of their errors.

A command's file is imported when the command is used: help needs none of them. Help and mistakes are plain text: rich,
which would draw boxes around them, is loaded by the commands that show tables or the live view. Errors go to standard
error in one line, never a traceback of a user's mistake. Exit codes: 0 done, 1 failed, 2 configuration, 3 fenced, 75
retry later, 130 interrupted.
"""

from __future__ import annotations

import ast
import io
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from parashard import __version__
from parashard.errors import ParashardError
from parashard.process.best_effort import lossy, release_standard_streams
from parashard.process.shell import ExitCode, exit_code_of

COLUMNS_MAX = 120  # of help; on a narrower terminal its width


class _Group(TyperGroup):
    """A group whose help lists each command with the whole first paragraph of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the section of help that lists the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(self.listed())

    def listed(self) -> list[tuple[str, str]]:
        """Return the name and the help of each command that help shows."""
        shown = [(name, command) for name, command in self.commands.items() if not command.hidden]
        return [(name, _first_paragraph(command.help or "")) for name, command in shown]


def _first_paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


class App(typer.Typer):
    """A command with subcommands, in plain text."""

    def __init__(self, cls: type[TyperGroup] = _Group, **settings: Any) -> None:
        super().__init__(
            cls=cls, rich_markup_mode=None, context_settings={"max_content_width": COLUMNS_MAX}, **settings
        )


def folder_of(text: str) -> Path:
    """Return a folder to write; refuse an empty text, such as an unset variable, which would be the current one."""
    if not text:
        raise typer.BadParameter("found ''; allowed: a folder, such as . for the current one")
    return Path(text)


COMMANDS: Mapping[str, str] = {
    "run": "run",
    "resume": "run",
    "init": "jobs",
    "predict": "results",
    "serve": "serve",
    "plot": "results",
    "config": "jobs",
    "status": "runs",
    "scale": "runs",
    "worker": "worker",
    "kill": "runs",
    "chaos": "chaos",
    "health": "health",
    "doctor": "doctor",
    "runs": "runs",
    "checkpoint": "checkpoint",
    "render": "render",
    "certs": "certs",
}
"""The commands that help shows, in its order, each with the file of this folder that has its function or `App`."""


def _loaded(name: str) -> Any:
    """Import a command and return it as click's object."""
    found = getattr(import_module(f"parashard.cli.{COMMANDS[name]}"), name)
    if isinstance(found, App):
        return typer.main.get_group(found)
    alone = App(add_completion=False)
    # After the first argument of `worker`, options belong to another program.
    alone.command(name, context_settings={"allow_interspersed_args": name != "worker"})(found)
    return typer.main.get_command(alone)


def _help_of(name: str) -> str:
    """Return the help of a command from the text of its file, without importing it."""
    for node in ast.parse(Path(__file__).with_name(f"{COMMANDS[name]}.py").read_text()).body:
        match node:
            case ast.FunctionDef(name=found) if found == name:
                return ast.get_docstring(node) or ""
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Call(keywords=[first, *_])) if found == name:
                return str(ast.literal_eval(first.value))
    raise AssertionError(f"{name} is not in its file")


class _CommandLine(_Group):
    """The commands of the table, which are imported when they are used; listing them imports none."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        known: dict[str, Any] = {**dict.fromkeys(COMMANDS), **self.commands}
        self.commands = known

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command as click's object."""
        return _loaded(name) if name in COMMANDS else self.commands.get(name)

    def listed(self) -> list[tuple[str, str]]:
        """Return the name and the help of each command that help shows; imports none."""
        return [(name, _first_paragraph(_help_of(name))) for name in COMMANDS]


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
    """Write an error to standard error, in one line."""
    lossy(sys.stderr, "error lines").write(f"parashard: {text}\n")


def main() -> None:
    """Run the command line; our errors become one line and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a character that a terminal lacks must not end a command
    try:
        app(prog_name="parashard")
    except ParashardError as error:
        complain(str(error))
        sys.exit(int(exit_code_of(error)))
    finally:
        release_standard_streams()
