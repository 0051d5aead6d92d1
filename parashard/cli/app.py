"""App: the layout of typer's help, and a group whose commands are imported on first use.

Help and mistakes are plain text: rich, which would draw boxes around them, is loaded by the commands that show tables
or the live view.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from parashard.process.best_effort import lossy

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
    """Where a command is: a function or an `App`, which is imported when the command is used."""

    file: str
    """Of this folder, without its ending."""
    attribute: str
    help: str
    """The first paragraph of its help."""
    words_last: bool = False
    """Whether what follows its first argument is another program's, options too."""

    def load(self, name: str) -> Any:
        """Import the command and return it as click has it."""
        found = getattr(import_module(f"parashard.cli.{self.file}"), self.attribute)
        if isinstance(found, App):
            return typer.main.get_group(found)
        alone = App(add_completion=False)
        alone.command(name, context_settings={"allow_interspersed_args": not self.words_last})(found)
        return typer.main.get_command(alone)


class OnDemandGroup(_Group):
    """A group of commands that are imported when they are used; to list them, none is."""

    table: ClassVar[Mapping[str, OnDemand]] = {}
    """The commands that help shows, by name and in its order."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        known: dict[str, Any] = {**self.table, **self.commands}
        self.commands = known

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command as click has it."""
        found: Any = self.commands.get(name)
        return found.load(name) if isinstance(found, OnDemand) else found

    def listed(self) -> list[tuple[str, str]]:
        """Return the name and the help of each command that help shows; imports none."""
        return [(name, command.help) for name, command in self.table.items()]


def complain(text: str) -> None:
    """Write one line to standard error, as the command line says that something went wrong."""
    lossy(sys.stderr, "error lines").write(f"parashard: {text}\n")  # the one place that speaks to standard error
