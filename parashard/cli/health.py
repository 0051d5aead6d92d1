"""The command `parashard health`, which container engines and people ask about one service.

Parses, calls, prints; decides nothing. Loaded by `parashard.cli.main`.
"""

from __future__ import annotations

import argparse
from typing import Annotated

import typer

from parashard.errors import ConfigurationError
from parashard.process.arguments import finite
from parashard.process.health import ask
from parashard.process.starts import address, own_host


def health(
    where: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="host:port of its HTTP port; host `auto` is this machine.")
    ],
    live: Annotated[bool, typer.Option("--live", help="Ask only whether it answers, not whether it is ready.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=600, callback=finite, help="How long to wait for it.")] = 3.0,
) -> None:
    """Ask a coordinator, shard or worker whether it is ready: exit code 0 if so, 75 if not."""
    try:
        host, _, port = address(where).rpartition(":")
        there = f"{own_host(host)}:{port}"
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise ConfigurationError(str(error)) from None
    ask(there, live=live, timeout_s=timeout_s)
    typer.echo("ok")
