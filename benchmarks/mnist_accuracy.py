"""Held-out accuracy of `examples/mnist.toml` for three seeds in each consistency: does asynchronous training converge?

`python -m benchmarks.mnist_accuracy --data FOLDER [--write]`, with MNIST's four IDX files in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import described

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "mnist_accuracy.json"
SEEDS = (0, 1, 2)
CASES = {"async": [], "ssp:8": [], "sync:4": ["--set", "optimizer.learning_rate=0.002"]}


def train(consistency: str, seed: int, data: str) -> dict[str, Any]:
    """Run the job and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "parashard", "run", str(ROOT / "examples" / "mnist.toml"), "--json"]
        command += ["--set", f"data.path={data}", "--set", f"job.seed={seed}", "--consistency", consistency]
        command += [*CASES[consistency], "--run-dir", f"{folder}/run"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def main() -> None:
    """Train every case and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder with MNIST's four IDX files")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} under benchmarks/results")
    arguments = parser.parse_args()
    rows = []
    for consistency in CASES:
        for seed in SEEDS:
            report = train(consistency, seed, arguments.data)
            accuracy = report["held_out"]["accuracy"]
            kept = ("examples_per_s", "wall_s", "staleness", "step_lag", "weights_sha256")
            rows.append(
                {"consistency": consistency, "seed": seed, "accuracy": accuracy, **{key: report[key] for key in kept}}
            )
            print(
                f"{consistency:7} seed {seed}: accuracy {accuracy:.4f}, {report['examples_per_s']:,.0f} "
                f"examples/s, staleness {report['staleness']}, step lag {report['step_lag']['max']}",
                flush=True,
            )
    if arguments.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": described(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
