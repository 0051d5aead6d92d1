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
    """Return the beginning of the SHA-256 of a task's file and those that tasks share: other cells are out of date."""
    folder = Path(__file__).parent
    shared = sorted(path for path in folder.glob("_*.py") if path.name != "__init__.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in (folder / f"{name}.py", *shared))).hexdigest()[:12]


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
