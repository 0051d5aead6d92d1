"""The command `parashard plot`: a picture of a run's loss and metrics.

Parses, calls, prints; decides nothing. Loaded by `parashard.cli.main`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from parashard.cli.options import complete_runs
from parashard.display.chart import panels_of, svg
from parashard.errors import ConfigurationError
from parashard.launch.run_folders import run_named
from parashard.process.run_files import HISTORY_FILE, short_path

PLOT_FILE = "plot.svg"


def plot(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run directory, or a name under runs/.", autocompletion=complete_runs),
    ],
    output: Annotated[
        Path | None, typer.Option(help="The picture.", show_default=f"{PLOT_FILE} in the run directory")
    ] = None,
) -> None:
    """Draw a run's loss and metrics into an SVG file.

    A run in progress can be drawn, too. Browsers, GitHub and most programs of text show SVG.
    """
    run_dir = run_named(run)
    panels = panels_of(list(_lines(run_dir / HISTORY_FILE)))
    if not panels:
        raise ConfigurationError(f"{run_dir}: its {HISTORY_FILE} has no loss and no metric yet")
    path = output or run_dir / PLOT_FILE
    try:
        path.write_text(svg(run_dir.absolute().name, panels), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {short_path(path)}: {', '.join(panel.name for panel in panels)}")


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the history's lines; one that is torn, as its coordinator was killed, is left out."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror}") from None
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
