"""A GPT of a million parameters: staleness costs it loss."""

from __future__ import annotations

from pathlib import Path

from benchmarks.statistics.tasks._transformer import reader
from benchmarks.statistics.trial import Trial


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    return reader(seed, characters=400_000, width=128, layers=5, rate=3e-3, epochs=2)
