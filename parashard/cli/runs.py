"""The commands of runs: `parashard status` and `scale`, which ask a coordinator, `runs`, and `kill`."""

from __future__ import annotations

import enum
import json
import os
import shutil
import signal
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from parashard.cli.main import App
from parashard.cli.options import Coordinator, TlsDir, complete_runs, told_how_to_continue
from parashard.display.screen import StatusScreen
from parashard.display.status_tables import print_summary, status_dict
from parashard.display.text_table import print_table
from parashard.errors import ConfigurationError, Unreachable, WrongRun
from parashard.figures import counted
from parashard.launch.programs import program_of, readers_of, send
from parashard.launch.run_folders import (
    check_in_progress,
    coordinator_at,
    is_done,
    job_name_in,
    launcher_of,
    locked,
    newest_run,
    place_of,
    read_report,
    run_began_at,
    run_named,
    runs_here,
)
from parashard.launch.stopping import resume_command
from parashard.protocol.coordinator_client import CoordinatorClient, run_id_in
from parashard.security.given_credentials import credentials_in


def status(
    where: Coordinator = None,
    tls_dir: TlsDir = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask a running coordinator how its job goes."""
    place = place_of(where)
    try:
        with told_how_to_continue(place):
            reply = _coordinator(place, tls_dir).get_status(run_id_in(place))
    except (Unreachable, WrongRun):
        report = read_report(Path(place))
        if not report:
            raise
        # The run is over and its coordinator gone: the report says how it went.
        if json_:
            typer.echo(json.dumps(report))
        else:
            print_summary(report, Path(place).absolute(), Console())
            if report["state"] != "done":
                typer.echo(f"Continue: {resume_command(Path(place).absolute())}")
        return
    if json_:
        typer.echo(json.dumps(status_dict(reply)))
    else:
        Console().print(StatusScreen(reply, fits_height=False))


def scale(
    workers: Annotated[int, typer.Option(min=0, max=4096, help="Workers to keep alive, 0 to 4096.")],
    where: Coordinator = None,
    tls_dir: TlsDir = None,
) -> None:
    """Change the number of workers of a running job, on a local cluster or on Kubernetes."""
    place = place_of(where)
    check_in_progress(place)
    with told_how_to_continue(place):
        reply = _coordinator(place, tls_dir).scale(workers, run_id_in(place))
    typer.echo(f"{counted(reply.workers_wanted, 'worker')} wanted")
    if not reply.workers_wanted:
        typer.echo(f"the job waits until one joins: parashard worker --connect {place}")


def _coordinator(place: str, tls_dir: Path | None) -> CoordinatorClient:
    return CoordinatorClient(coordinator_at(place), credentials=credentials_in(tls_dir))


runs = App(help="List and remove the runs under runs/.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON array.")]


class SignalName(enum.StrEnum):
    """Signals that `parashard kill` sends."""

    KILL = "KILL"
    STOP = "STOP"
    CONT = "CONT"
    TERM = "TERM"


def kill(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] PROCESS",
            help="coordinator, shard-N or worker-N, of a run directory or a name under runs/; default: the newest run.",
            autocompletion=complete_runs,
        ),
    ],
    signal_: Annotated[
        SignalName, typer.Option("--signal", help="KILL, STOP to have it hang, CONT to let it go on, TERM.")
    ] = SignalName.KILL,
) -> None:
    """Kill one process of a run on this machine, to rehearse that nothing is lost: it is started again."""
    if len(what) > 2:
        raise ConfigurationError(f"found {len(what)} words; allowed: [RUN] PROCESS, such as worker-0")
    run_dir = run_named(what[0]) if len(what) == 2 else newest_run().absolute()
    pid = send(run_dir, what[-1], signal.Signals[f"SIG{signal_}"])
    typer.echo(f"SIG{signal_} sent to {what[-1]} of {run_dir.name} (process {pid})")


@runs.callback(invoke_without_command=True)
def _default(context: typer.Context, json_: Json = False) -> None:
    if context.invoked_subcommand is None:
        list_(json_)


@runs.command("list")
def list_(json_: Json = False) -> None:
    """List the runs under runs/, the newest last."""
    rows = sorted(map(_row, runs_here()), key=lambda row: row["began_at"])
    if json_:
        typer.echo(json.dumps(rows))
        return
    print_table(("run", "state", "steps", "began", "size"), map(_cells, rows), right=("steps", "size"), whole=("run",))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    steps = "" if row["steps"] is None else f"{row['steps']:,} of {row['steps_total']:,}"
    began = f"{datetime.fromtimestamp(row['began_at']):%Y-%m-%d %H:%M}"
    return row["run"], row["state"], steps, began, f"{row['size_bytes'] / 2**20:,.1f} MiB"


@runs.command()
def remove(
    names: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run directories, or names under runs/.", autocompletion=complete_runs),
    ],
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also those that are not done, which could go on.")
    ] = False,
) -> None:
    """Remove runs with their weights, checkpoints and logs; a checkpoint.url outside the run directory is kept."""
    found = [run_named(name) for name in names]
    for run in found:
        launcher = launcher_of(run)
        if launcher is not None:
            raise ConfigurationError(
                f"{run.name} is in progress; stop it first: Ctrl-C where it runs, or kill {launcher}"
            )
    _check_unread(found)
    kept = [run for run in found if not unfinished and not is_done(run)]
    if kept:
        raise ConfigurationError(
            f"{', '.join(run.name for run in kept)}: not done, and `parashard resume` could go on with it; "
            "--unfinished removes it all the same"
        )
    for run in found:
        lock = locked(run)  # refuses a run that has just begun
        try:
            shutil.rmtree(run)
        except OSError as error:
            raise ConfigurationError(f"{run}: cannot be removed: {error.strerror}") from None
        finally:
            os.close(lock)
        typer.echo(f"removed {run.name}")


def _check_unread(removed: list[Path]) -> None:
    """Refuse to remove runs that a running program, or a run that could be resumed, reads."""
    stay = [run.absolute() for run in runs_here() if not is_done(run)]
    stay = [run for run in stay if run.resolve() not in {gone.resolve() for gone in removed}]
    for run in removed:
        program = program_of(run)
        if program is not None and program.is_running and program.pid != os.getpid():
            raise ConfigurationError(
                f"{run.name}: process {program.pid} made this run, and what it calls later reads it; end it first"
            )
        readers = readers_of(run, stay)
        if readers:
            raise ConfigurationError(
                f"{run.name}: {readers[-1].name} is not done, and goes on from its weights; remove both, or that one "
                "first"
            )


def _row(run: Path) -> dict[str, Any]:
    report = read_report(run)
    state = "running" if launcher_of(run) is not None else report.get("state", "stopped")
    applied = report.get("steps_applied")
    return {
        "run": run.name,
        "run_dir": str(run.absolute()),
        "job": job_name_in(run),
        "state": state,
        "reason": report.get("reason", ""),
        "steps": min(applied) if applied and state != "running" else None,
        "steps_total": report.get("steps_total"),
        "began_at": run_began_at(run),
        "size_bytes": sum(_size(file) for file in run.rglob("*")),
    }


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:  # removed meanwhile
        return 0
