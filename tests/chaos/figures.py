"""What the programs of this folder write under benchmarks/results: a table with the machine and the command named."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # benchmarks/ is beside the packages and is not installed with them
sys.path.append(str(ROOT / "tests"))  # and so is what tests of several folders share

from benchmarks.machine import arguments, described  # noqa: E402


def write_figures(name: str, figures: Mapping[str, Any]) -> None:
    """Write `benchmarks/results/NAME.json`."""
    program = Path(sys.argv[0]).resolve().relative_to(ROOT)
    machine = {**described(), "command": " ".join(["python", str(program), *arguments()])}
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    path.write_text(json.dumps({"machine": machine, **figures}, indent=2) + "\n")


class Judged(Protocol):
    """A job that has ended."""

    @property
    def broken(self) -> Sequence[str]:
        """The promises that it broke."""


def conclude(done: Sequence[Judged], what: str, folder: Path) -> int:
    """Say how many jobs broke a promise, keep their folder if one did, and return the exit code."""
    broken = sum(bool(job.broken) for job in done)
    say(f"{broken} of {len(done)} {what} broke a promise{f'; see {folder}' if broken else ''}")
    if not broken:
        shutil.rmtree(folder)
    return int(broken > 0)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
