"""The tasks, one file each: `make(seed, data)` returns the `Trial` of a seed, deterministic and 5 to 20 s on one core.

`data` is the folder with MNIST's four files, or None; a task that needs them raises `NoData` without them.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path

from benchmarks.statistics.trial import Trial


class NoData(Exception):
    """The task needs files, and the command has named no folder."""


def names() -> list[str]:
    """Return the names of all tasks."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def digest(name: str) -> str:
    """Return the beginning of the SHA-256 of a task's file: a cell of another one is out of date."""
    return hashlib.sha256((Path(__file__).parent / f"{name}.py").read_bytes()).hexdigest()[:12]


def make(name: str, seed: int, data: Path | None) -> Trial:
    """Return the trial of a task's seed.

    Raises
    ------
    ImportError
        If the task's framework is not installed.
    NoData
        If the task needs `data`.
    """
    trial: Trial = import_module(f"{__name__}.{name}").make(seed, data)
    return trial
