"""The commands `parashard status` and `parashard scale`, which ask the coordinator of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from parashard.cli.options import Coordinator, TlsDir, told_how_to_continue
from parashard.display.screen import StatusScreen
from parashard.display.status_tables import print_summary, status_dict
from parashard.errors import Unreachable, WrongRun
from parashard.figures import counted
from parashard.launch.run_folders import check_in_progress, coordinator_at, place_of, read_report
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
