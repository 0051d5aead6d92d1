"""The commands `parashard predict`, by a run's model for a file, and `parashard plot`, of its loss and metrics."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from parashard.cli.main import complain
from parashard.cli.options import RunName
from parashard.display.chart import panels_of, svg
from parashard.errors import ConfigurationError
from parashard.launch.prediction import predict_file, print_predictions, write_predictions
from parashard.launch.run_folders import run_named
from parashard.process.run_files import HISTORY_FILE, short_path

PLOT_FILE = "plot.svg"


def predict(
    run: RunName,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A CSV or Parquet file with the run's columns; of a run on arrays a .npy file."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="A CSV file of predictions, or a .npy file of the model's outputs.", show_default="standard output"
        ),
    ] = None,
) -> None:
    """Predict for a file with the weights of a run that is done.

    A class comes with its probability; a number is in the unit of the table.
    """
    predictions = predict_file(run_named(run), file)
    for note in predictions.notes:
        complain(f"{file}: {note}")
    if output is not None:
        write_predictions(predictions, output)
        typer.echo(f"wrote {output}: {len(predictions.outputs):,} predictions")
        return
    print_predictions(predictions, sys.stdout)


def plot(
    run: RunName,
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
    """Yield the history's lines, except a torn one, as after a kill of the coordinator."""
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
