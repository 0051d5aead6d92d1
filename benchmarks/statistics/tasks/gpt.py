"""A small GPT: staleness costs it loss."""

from __future__ import annotations

from pathlib import Path

from benchmarks.statistics.tasks._transformer import reader
from benchmarks.statistics.trial import Trial


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    return reader(seed, characters=200_000, width=64, layers=2, rate=6e-3, epochs=4)
