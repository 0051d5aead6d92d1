"""The command `parashard predict`: what the model of a run says about a file.

Parses, calls, prints; decides nothing. Loaded by `parashard.cli.main`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from parashard.cli.app import complain
from parashard.cli.options import complete_runs
from parashard.launch.prediction import predict_file, print_predictions, write_predictions
from parashard.launch.run_folders import run_named


def predict(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run directory, or a name under runs/.", autocompletion=complete_runs),
    ],
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
