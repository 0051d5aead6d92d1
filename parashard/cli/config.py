"""The command `parashard config`: every value of a job and where it came from.

Parses, calls, prints; decides nothing. Loaded by `parashard.cli.main`.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from parashard.cli.options import Consistency, DeviceName, JobFile, Sets, Shards, Workers, job_flags, loaded_job
from parashard.display.text_table import print_table
from parashard.job.load import describe


def config(
    job: JobFile,
    shards: Shards = None,
    workers: Workers = None,
    consistency: Consistency = None,
    device: DeviceName = None,
    set_: Sets = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every value of a job and where it came from."""
    rows = describe(loaded_job(job, job_flags(shards, workers, consistency, device, set_)))
    if json_:
        typer.echo(json.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, default=str))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("key", "value", "origin"):
        table.add_column(name, overflow="fold", no_wrap=name == "key")
    for key, value, origin in rows:
        shown = "" if value is None else json.dumps(value, default=str)
        table.add_row(Text(key), Text(shown), Text(origin, style="dim" if origin == "default" else ""))
    print_table(table)
