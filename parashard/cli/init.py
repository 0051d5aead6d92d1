"""The command `parashard init`: a job file for a table.

Parses, calls, prints; decides nothing. Loaded by `parashard.cli.main`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from parashard.errors import ConfigurationError
from parashard.job.keys import check_path
from parashard.job.load import job_from_toml
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
