"""Options that commands of several files share. Called by `parashard.cli` and the files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parashard.process import TLS_VARIABLE

TlsDir = Annotated[
    Path | None,
    typer.Option(
        envvar=TLS_VARIABLE, help="Folder with ca.pem, cert.pem, key.pem: everything is said inside mutual TLS."
    ),
]
