"""History: what a `fit` did, by epoch, as `Trainer.fit` returns and tells it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parashard.display.live import console_for
from parashard.display.summary import not_learned
from parashard.process.path_text import short_path


class History:
    """What a `fit` did.

    Attributes
    ----------
    history : dict of str to list of float
        By epoch: "loss", the mean over its examples, the model's metrics over its batches by their names, what the
        validation data gave at its end as "val_NAME", and what callbacks added; NaN where the report has no finite
        figure. But in `sync:N` "val_steps": how many batches were in the weights that were evaluated; more
        than at the epoch's end where training did not wait.
    epoch : list of int
        Their numbers, from 0 on, or from `initial_epoch`.
    report : dict
        The run's report (`report.json`).
    run_dir : Path
        The run's folder: weights, checkpoints, logs.
    """

    def __init__(
        self,
        report: dict[str, Any],
        run_dir: Path,
        history: Mapping[str, list[float]] | None = None,
        *,
        first_epoch: int = 0,
    ) -> None:
        self.report = report
        self.run_dir = run_dir
        figures = history or _reported(report)
        self.history: dict[str, list[float]] = {name: [_number(value) for value in figures[name]] for name in figures}

        self.epoch = [first_epoch + number for number in range(max(map(len, self.history.values()), default=0))]

    def __repr__(self) -> str:
        last = ", ".join(f"{name} {values[-1]:.4g}" for name, values in self.history.items())
        return f"History({last}; {self.run_dir})"


def _reported(report: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Return the figures of a run whose callbacks have kept none."""
    figures = {"loss": [report["training_loss"]]}
    for evaluation in report["evaluations"]:
        for name, value in evaluation.items():
            if name not in ("steps", "judged_steps"):
                figures.setdefault(f"val_{name}", []).append(value)
    return figures


def _number(value: float | None) -> float:
    """Return a figure as a float; JSON has None for one that is not finite."""
    return math.nan if value is None else value


def say_end(history: History) -> None:
    """Print what stays on the screen: a line, and one more if the model did not learn."""
    found = [f"{name} {values[-1]:.4g}" for name, values in history.history.items()]
    words = f"done in {history.report['wall_s']:.1f} s: {', '.join(found)}; {short_path(history.run_dir)}"
    for line in filter(None, (words, not_learned(history.report))):
        console_for(sys.stdout).print(line, soft_wrap=True, markup=False, highlight=False)
