"""Options that commands of several files share, and the job that they load. Called by the `cli` files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from parashard.arguments import TLS_VARIABLE, TRACE_VARIABLE
from parashard.job.layers import Override
from parashard.job.load import LoadedJob, load_job

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
