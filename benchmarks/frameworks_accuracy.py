"""The same MLP on MNIST in PyTorch, JAX, Keras 3 on both backends and `ps.layers`: accuracy, alone and by parashard.

`python -m benchmarks.frameworks_accuracy --data FOLDER [--write]`, with MNIST's four IDX files in FOLDER, in an
environment that has the frameworks (`make test-frameworks` makes one). Three seeds each; gradients of a step are
compared bit by bit with the framework's own, and those of a round of four steps with one batch of all of it. What
stands alone for `ps.layers` is PyTorch, whose matrices it multiplies the other way round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.machine import described

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "frameworks_accuracy.json"
SEEDS = (0, 1, 2)
CASES = {
    "PyTorch": ("torch", ""),
    "JAX": ("jax", ""),
    "Keras on JAX": ("keras", "jax"),
    "Keras on PyTorch": ("keras", "torch"),
    "ps.layers, and PyTorch": ("layers", ""),
}
PACKAGES = ("torch", "jax", "keras")
DEADLINE_S = 600.0


def run(case: str, what: str, data: str, seed: int = 0) -> dict[str, Any]:
    """Run one MLP in its own process and folder, and return its output."""
    framework, backend = CASES[case]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "KERAS_BACKEND": backend or "jax"}
    environ |= dict.fromkeys(("OMP_NUM_THREADS", "NPROC"), "1")
    command = [sys.executable, "-m", "benchmarks.frameworks.one", framework, what, "--data", data, "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Train every case and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder with MNIST's four IDX files")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.stem}.json and .md to benchmarks/results")
    arguments = parser.parse_args()
    data = str(Path(arguments.data).resolve())
    rows = []
    for case in CASES:
        row: dict[str, Any] = {"case": case, **run(case, "gradients", data)}
        for what in ("alone", "ours"):
            row[what] = [run(case, what, data, seed)["accuracy"] for seed in SEEDS]
        row["points_lower"] = 100 * (sum(row["alone"]) - sum(row["ours"])) / len(SEEDS)
        del row["wall_s"]
        rows.append(row)
        print(line(row), flush=True)
    if arguments.write:
        machine = {**described(), **{name: version(name) for name in PACKAGES}}
        RESULTS.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
        RESULTS.with_suffix(".md").write_text(table(machine, rows))


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    alone, ours = (" ".join(f"{100 * accuracy:.2f}" for accuracy in row[what]) for what in ("alone", "ours"))
    bits = f"{row['same_bits']} of {row['variables']}"
    return f"| {row['case']} | {alone} | {ours} | {row['points_lower']:+.2f} | {bits} | {row['round_apart']:.1e} |"


def table(machine: dict[str, str], rows: list[dict[str, Any]]) -> str:
    """Return the table, with the machine that it was measured on."""
    head = [
        "# The same MLP in every framework, alone and by parashard",
        "",
        "784-128-10 on MNIST, Adam at 0.001, batches of 128, 5 epochs, seeds 0, 1 and 2; parashard: 2 shards, 2 "
        "workers, `async`. Held-out accuracy in percent.",
        "",
        "| framework | alone | by parashard | points lower, mean | gradients of a step with the same bits | a round of "
        "4 from one batch of it, in norm |",
        "|---|---|---|---|---|---|",
    ]
    measured = ", ".join(f"{key} {value}" for key, value in machine.items())
    return "\n".join([*head, *map(line, rows), "", f"Measured: {measured}.", ""])


if __name__ == "__main__":
    main()
