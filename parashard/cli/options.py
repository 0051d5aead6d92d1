"""Options that commands of several files share, and the job that they load. Called by the `cli` files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from parashard.display.live import JobView
from parashard.errors import ConfigurationError, Unreachable
from parashard.job.layers import Override
from parashard.job.load import LoadedJob, load_job
from parashard.launch.run import Outcome
from parashard.launch.run_folders import LOCK_FILE, discard_unbegun, launcher_of, runs_here
from parashard.launch.stopping import resume_command
from parashard.process.arguments import TLS_VARIABLE, TRACE_VARIABLE

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
    pass


class App(typer.Typer):
    """A command with commands of its own, whose flags are shown as flags."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, **settings)

    def command(self, *names: Any, **settings: Any) -> Callable[[_Run], _Run]:
        """Return a decorator that registers a command."""
        return super().command(*names, cls=_Command, **settings)


def complete_runs(incomplete: str) -> list[str]:
    """Return the names under `runs/` that a shell may complete to."""
    return [run.name for run in runs_here() if run.name.startswith(incomplete)]


@contextmanager
def told_how_to_continue(place: str) -> Iterator[None]:
    """Say what goes on with a run of this machine where its coordinator does not answer, as its launcher is gone.

    A directory that no launcher has locked is that of a run whose processes somebody else starts.
    """
    try:
        yield
    except Unreachable as error:
        run_dir = Path(place)
        if not (run_dir / LOCK_FILE).exists() or launcher_of(run_dir) is not None:
            raise
        command = resume_command(run_dir.absolute())
        raise Unreachable(f"{error}; its `parashard run` is gone. Continue: {command}") from None


Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key, such as job.epochs=3.")
]
TlsDir = Annotated[
    Path | None,
    typer.Option(
        envvar=TLS_VARIABLE, help="Folder with ca.pem, cert.pem, key.pem: everything is said inside mutual TLS."
    ),
]
Trace = Annotated[
    bool,
    # The services read the variable, which they inherit: one place says what it may be.
    typer.Option("--trace", help=f"Send spans of every step by OpenTelemetry (the extra otel); or {TRACE_VARIABLE}=1."),
]


def told_job(path: Path, flags: Sequence[Override]) -> LoadedJob:
    """Load a job file under the environment and flags; warn on standard error of what was ignored."""
    loaded = load_job(path, flags)
    for warning in loaded.warnings:
        print(f"parashard: warning: {warning}", file=sys.stderr, flush=True)  # noqa: T201  # for people
    return loaded


def begin_run(run_dir: Path, view: JobView, run: Callable[[], Outcome], *, keep: bool) -> Outcome:
    """Run a new job, and give the terminal back; a job that is refused leaves no directory.

    Parameters
    ----------
    run_dir : Path
        The new run's.
    view : JobView
        Where `run` shows how it goes.
    run : callable
        Returns how it ended, or raises a ConfigurationError.
    keep : bool
        True: the directory was there before, and stays, empty.
    """
    refused = False
    try:
        outcome = run()
        refused = outcome.is_refused
    except ConfigurationError:
        refused = True
        raise
    finally:
        view.close()
        if refused:
            discard_unbegun(run_dir, keep=keep)
    return outcome
