"""The commands `parashard init` and `parashard config`: a job file for a table, and all values of a job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from parashard.cli.options import Consistency, DeviceName, JobFile, Sets, Shards, Workers, job_flags, loaded_job
from parashard.display.text_table import print_table
from parashard.errors import ConfigurationError
from parashard.job.keys import check_path
from parashard.job.load import describe, job_from_toml
from parashard.job.sections import job_name_from
from parashard.job.starter import starter_of


def init(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A CSV file with a header row, or a Parquet file.")],
    label: Annotated[
        str | None, typer.Option(help="The column to predict (data.label).", show_default="the last one")
    ] = None,
    encoding: Annotated[str, typer.Option(help="Encoding of the table (data.encoding), such as latin-1.")] = "utf-8",
    output: Annotated[
        Path | None, typer.Option(help="The job file.", show_default="TABLE.toml beside the table")
    ] = None,
) -> None:
    """Write a job file for a table, with a comment on each of its lines.

    It can be run as it is. The label is the last column; columns that look like ids, dates or notes are left out.
    """
    if table.suffix.lower() == ".toml":
        raise ConfigurationError(f"{table}: this is a job file; due is a table, such as data.csv")
    path = output or table.with_suffix(".toml")
    check_path(path.absolute(), f"job file {path.name!r}")
    name = job_name_from(table.stem.lower().replace("_", "-").replace(".", "-"), "table")
    shown = os.path.relpath(table, path.parent)
    starter = starter_of(table, label, name, shown, encoding)
    job_from_toml(starter.text)  # a job file that could not be read is not written
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(starter.text)
    except FileExistsError:
        raise ConfigurationError(f"{path} exists; --output names another file") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}") from None
    for line in starter.left_out:
        typer.echo(f"left out: {line}")
    typer.echo(f"{starter.summary}\nwrote {path}; train with: parashard run {path}")


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
    table = []
    for key, value, origin in rows:
        shown = "" if value is None else json.dumps(value, default=str)
        table.append((key, shown, Text(origin, "dim" if origin == "default" else "")))
    print_table(("key", "value", "origin"), table, whole=("key",))
