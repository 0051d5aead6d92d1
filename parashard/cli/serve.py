"""The command `parashard serve`: a run's rows and variables, to be read.

Parses, calls, prints; decides nothing. Loaded by `parashard.cli.main`.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from parashard.cli.options import complete_runs
from parashard.launch.run_folders import resumed_job, run_named
from parashard.process.arguments import check_host
from parashard.serving.served import ServedRun
from parashard.serving.server import Ports, run_of, why_not_yet

LOOK_S = 0.5


def serve(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run directory, or a name under runs/.", autocompletion=complete_runs),
    ],
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of gRPC; 0: any that is free.")] = 0,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of HTTP; 0: any that is free.")] = 0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen off loopback, on a network where everyone is trusted.")
    ] = False,
) -> None:
    """Serve rows and variables of a run to read, from its checkpoints, while it runs and after.

    A run in progress is followed; what is served is committed, so that no restart takes it back. Ctrl-C ends it.
    """
    check_host(host, insecure)
    run_dir = run_named(run)
    ports = Ports(run_of(run_dir, resumed_job(run_dir, []).job), host, port, http_port)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    ports.start()
    try:
        typer.echo(f"gRPC {ports.address}")
        typer.echo(f"HTTP http://{ports.http_address}/v1/status")
        _tell(ports.run, run_dir, stopping)
    finally:
        ports.stop()


def _tell(run: ServedRun, run_dir: Path, stopping: threading.Event) -> None:
    """Say what is waited for, and when there is something to serve, until the end is asked for."""
    said, serving = "", False
    while not stopping.is_set():
        if not serving:
            why = why_not_yet(run, run_dir)
            serving = not why
            text = f"waiting: {why}" if why else f"serving {', '.join(map(str, run.published_ids()))}"
            if text != said:
                typer.echo(text)
                said = text
        stopping.wait(LOOK_S)
