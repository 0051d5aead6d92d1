"""The command `parashard serve`: serve a run's rows and variables to readers."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from parashard.cli.options import LogFormatName, TlsDir, complete_runs
from parashard.process.addresses import own_host
from parashard.process.shell import LogFormat, log_to_standard_error
from parashard.security.given_credentials import check_host, credentials_in
from parashard.security.identity import Role
from parashard.serving.served import ServedRun
from parashard.serving.server import Ports, run_at, why_not_yet

LOOK_S = 0.5


def serve(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|ADDR",
            help="A run directory, a name under runs/, or host:port of a running job's coordinator.",
            autocompletion=complete_runs,
        ),
    ],
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Live weights of the running shards, not checkpoints; they may be taken back."),
    ] = False,
    host: Annotated[str, typer.Option(help="Where to listen; auto or interface:NAME, too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of gRPC; 0: any that is free.")] = 0,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of HTTP; 0: any that is free.")] = 0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen off loopback, on a network where everyone is trusted.")
    ] = False,
    tls_dir: TlsDir = None,
    log_format: LogFormatName = LogFormat.TEXT,
) -> None:
    """Serve rows and variables of a run to read, from its checkpoints, while it runs and after.

    A run in progress is followed; what is served is committed, so that no restart takes it back. Ctrl-C ends it.
    With --tls-dir gRPC is inside mutual TLS, and look-ups over HTTP, which has none, need --insecure besides.
    """
    log_to_standard_error(log_format)
    credentials = credentials_in(tls_dir)
    if credentials is not None:
        credentials.require(Role.SERVER)
    host = own_host(host)
    check_host(host, insecure, credentials)
    served = run_at(run, fresh=fresh, credentials=credentials, tell=lambda why: typer.echo(f"waiting: {why}"))
    ports = Ports(served, host, port, http_port, credentials, lookups_over_http=credentials is None or insecure)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    ports.start()
    try:
        typer.echo(f"gRPC {ports.address}")
        typer.echo(f"HTTP http://{ports.http_address}{'/v1/status' if ports.lookups_over_http else '/metrics'}")
        _tell(served, run, stopping)
    finally:
        ports.stop()


def _tell(run: ServedRun, place: str, stopping: threading.Event) -> None:
    """Print why nothing is served yet, and the first versions that are served; return when stopped."""
    said, serving = "", False
    while not stopping.is_set():
        if not serving:
            why = why_not_yet(run, place)
            serving = not why
            text = f"waiting: {why}" if why else f"serving {', '.join(str(v.id) for v in run.published().versions)}"
            if text != said:
                typer.echo(text)
                said = text
        stopping.wait(LOOK_S)
