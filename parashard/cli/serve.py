"""The command `parashard serve`: a run's rows and variables, to be read.

Parses, calls, prints; decides nothing. Loaded by `parashard.cli.main`.
"""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from parashard.cli.options import complete_runs
from parashard.launch.run_folders import resumed_job, run_named
from parashard.serving.server import RunServer

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
    run_dir = run_named(run)
    server = RunServer(run_dir, resumed_job(run_dir, []).job, host, port, http_port, insecure=insecure)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    server.start()
    try:
        typer.echo(f"gRPC {server.address}")
        typer.echo(f"HTTP http://{server.http_address}/v1/status")
        _follow(server, stopping)
    finally:
        server.stop()


def _follow(server: RunServer, stopping: threading.Event) -> None:
    """Say what is waited for, and when there is something to serve, until the end is asked for."""
    said = ""
    serving = False
    while not stopping.is_set():
        if not serving:
            why = server.why_not_yet()
            serving = not why
            text = f"waiting: {why}" if why else f"serving {', '.join(map(str, server.run.published_ids()))}"
            if text != said:
                typer.echo(text)
                said = text
        stopping.wait(LOOK_S)
