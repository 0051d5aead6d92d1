"""The tasks, one file each: `make(seed, data)` returns the `Trial` of a seed.

All are deterministic, and take 5 to 20 s on one core; those of `LONG` a minute or two.
`data` is the folder with MNIST's four files, or None; a task that needs them raises `NoData` without them.
"""

from __future__ import annotations

import hashlib
import re
from importlib import import_module
from pathlib import Path

from benchmarks.statistics.trial import Trial

LONG = frozenset({"gpt_1m"})
"""Only in the part of a night, or by name."""


class NoData(Exception):
    """The task needs files, and the command has named no folder."""


def names() -> list[str]:
    """Return the names of all tasks."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def digest(name: str) -> str:
    """Return the beginning of the SHA-256 of a task's file and of those beside it that it imports, in turn."""
    files: dict[str, bytes] = {}
    due = [name]
    while due:
        each = due.pop()
        if each not in files:
            files[each] = (Path(__file__).parent / f"{each}.py").read_bytes()
            due += [found.decode() for found in re.findall(rb"statistics\.tasks\.(\w+)", files[each])]
    return hashlib.sha256(b"".join(files[each] for each in sorted(files))).hexdigest()[:12]


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
