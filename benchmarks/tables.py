"""Results of the recovery benchmarks: a JSON file with every figure, and a summary as a Markdown table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import described

RESULTS = Path(__file__).parent / "results"


def median_and_worst(values_s: Sequence[float]) -> tuple[str, str]:
    """Return the median and the largest of some times, as text in seconds."""
    return f"{statistics.median(values_s):.2f} s", f"{max(values_s):.2f} s"


def spread(values: Sequence[float]) -> str:
    """Return the median and the range of some figures."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def load_before(load: float) -> str:
    """Return the line on how busy the machine was in the minute before."""
    return f"{load:.1f} processes in the minute before; 0 is best."


def write(name: str, sections: dict[str, str], figures: dict[str, Any], folder: Path = RESULTS) -> None:
    """Write `NAME.json` and `NAME.md` in a folder.

    Parameters
    ----------
    name : str
        Name of both files.
    sections : dict of str to str
        Markdown by heading.
    figures : dict
        All figures that the tables were made from.
    folder : Path
        Where; default: `benchmarks/results/`.
    """
    machine = described()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"machine": machine, **figures}, indent=2) + "\n")
    (folder / f"{name}.md").write_text(page(machine, sections))


def page(machine: dict[str, str], sections: dict[str, str]) -> str:
    """Return the Markdown page of some sections, measured on a machine that `described` has described."""
    versions = ", ".join(f"{key} {value}" for key, value in machine.items() if key not in ("command", "cpu", "cores"))
    place = f"`{machine['command']}` on {machine['cpu']}, {machine['cores']} cores; {versions}."
    parts = [f"## {heading}\n\n{text}" for heading, text in sections.items()]
    return "\n\n".join([place, *parts]) + "\n"
