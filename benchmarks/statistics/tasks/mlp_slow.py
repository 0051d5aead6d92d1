"""The MLP at a small rate: an update changes a gradient so little that `auto` takes a lag where workers wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import parashard as ps
from benchmarks.statistics.tasks.mlp import make as make_mlp
from benchmarks.statistics.trial import Trial


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    trial = make_mlp(seed, data)
    return replace(trial, optimizer=ps.Momentum(0.005, momentum=0.9), epochs=2 * trial.epochs)
