"""Options that commands of several files share, and the job that they load."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parashard.errors import ConfigurationError, Unreachable
from parashard.job.layers import Override, parse_set
from parashard.job.load import LoadedJob, load_job
from parashard.launch.run_folders import LOCK_FILE, discard_unbegun, launcher_of, locked_run, runs_here
from parashard.launch.stopping import resume_command
from parashard.process.shell import LogFormat
from parashard.process.starts import TLS_VARIABLE, TRACE_VARIABLE

if TYPE_CHECKING:
    from parashard.display.live import JobView
    from parashard.launch.run import Outcome


def complete_runs(incomplete: str) -> list[str]:
    """Return the names under `runs/` that a shell may complete to."""
    return [run.name for run in runs_here() if run.name.startswith(incomplete)]


@contextmanager
def told_how_to_continue(place: str) -> Iterator[None]:
    """Add to an Unreachable error that a run of this machine is in progress, or the command that resumes it.

    A run directory without a lock file is that of a run with an external launcher: its error stays as it is.
    """
    try:
        yield
    except Unreachable as error:
        run_dir = Path(place)
        if not (run_dir / LOCK_FILE).exists():
            raise
        launcher = launcher_of(run_dir)
        if launcher is not None:
            raise Unreachable(
                f"{error}; the run is in progress: process {launcher}, which started it, restarts a coordinator that "
                "hangs (cluster.silence_s)"
            ) from None
        command = resume_command(run_dir.absolute())
        raise Unreachable(f"{error}; its `parashard run` is gone. Continue: {command}") from None


RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory, or a name under runs/.", autocompletion=complete_runs)
]
Coordinator = Annotated[
    str | None,
    typer.Argument(
        metavar="ADDR|RUN",
        help="The coordinator: host:port, a run directory or a name under runs/; default: the newest run.",
        autocompletion=complete_runs,
    ),
]
RunDir = Annotated[Path | None, typer.Option(help="The run's own directory; must be empty or new.")]
ReportJson = Annotated[bool, typer.Option("--json", help="Print the report as one JSON line.")]
LogFormatName = Annotated[
    LogFormat, typer.Option(help="text for people; logfmt or json: a line of fields for each event.")
]
JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.")]
Shards = Annotated[int | None, typer.Option(help="Number of shards (cluster.shards).")]
Workers = Annotated[int | None, typer.Option(help="Number of workers (cluster.workers).")]
Consistency = Annotated[str | None, typer.Option(help="auto, async, ssp:K or sync:N (consistency.policy).")]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="WHERE",
        help="Where shards and workers run: local, ssh:HOSTFILE, or ray[:ADDRESS] (cluster.launcher).",
    ),
]
DeviceName = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N (cluster.device).")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key, such as job.epochs=3.")
]
TlsDir = Annotated[
    Path | None,
    typer.Option(envvar=TLS_VARIABLE, help="Folder with ca.pem, cert.pem, key.pem: all traffic is inside mutual TLS."),
]
Trace = Annotated[
    bool,
    # The services read the variable, which they inherit: one place checks its value.
    typer.Option("--trace", help=f"Send spans of every step by OpenTelemetry (the extra otel); or {TRACE_VARIABLE}=1."),
]


def job_flags(
    shards: int | None,
    workers: int | None,
    consistency: str | None,
    device: str | None,
    sets: Sequence[str] | None,
    on: str | None = None,
) -> list[Override]:
    """Return the flags' overrides; ConfigurationError if `--set` and another flag set the same key."""
    flags: list[Override] = [parse_set(text) for text in sets or ()]
    by_set = {key for key, _, _ in flags}
    for key, value, flag in (
        ("cluster.shards", shards, "--shards"),
        ("cluster.workers", workers, "--workers"),
        ("consistency.policy", consistency, "--consistency"),
        ("cluster.device", device, "--device"),
        ("cluster.launcher", on, "--on"),
    ):
        if value is not None:
            if key in by_set:
                raise ConfigurationError(f"found {flag} and --set {key}; allowed: one of the two")
            flags.append((key, value, flag))
    return flags


def loaded_job(path: Path, flags: Sequence[Override], *, begun: bool = False) -> LoadedJob:
    """Load a job file under the environment and flags; print its warnings on standard error."""
    loaded = load_job(path, flags, begun=begun)
    for warning in loaded.warnings:
        print(f"parashard: warning: {warning}", file=sys.stderr, flush=True)  # noqa: T201  # for people
    return loaded


def begin_run(run_dir: Path, view: JobView, run: Callable[[], Outcome], *, keep: bool) -> Outcome:
    """Run a new job, and restore the terminal; if no run began, remove its directory, or with `keep` empty it."""
    unbegun = False
    try:
        with locked_run(run_dir):
            outcome = run()
        unbegun = outcome.is_unbegun
    except ConfigurationError:
        unbegun = True
        raise
    finally:
        view.close()
        if unbegun:
            discard_unbegun(run_dir, keep=keep)
    return outcome
