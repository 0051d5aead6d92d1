"""Options that commands of several files share. Called by `parashard.cli` and the files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parashard.arguments import TLS_VARIABLE, TRACE_VARIABLE

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
