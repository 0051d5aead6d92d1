"""MNIST under every strategy: `python -m benchmarks.strategies --data FOLDER [--epochs N] [--write]`.

Runs `examples/strategies.py` once for each, in an environment that has JAX, and prints accuracy, speed and digest. It
fails if one is below 97 %, or if those that are `sync:4` in the same order have different bits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.tables import table, write

EXAMPLE = Path(__file__).parent.parent / "examples" / "strategies.py"
ALIKE = ("mirrored", "central_storage", "multi_worker_mirrored")
STRATEGIES = ("one_device", *ALIKE, "parameter_server", "tpu")
ACCURACY_MIN = 0.97
DEADLINE_S = 600.0


def run(strategy: str, data: Path, epochs: int) -> dict[str, Any]:
    """Return the JSON object that the example prints."""
    words = ["--strategy", strategy, "--data", str(data), "--epochs", str(epochs), "--json"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=DEADLINE_S,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run them, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four files")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of a run (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/strategies.md")
    asked = parser.parse_args()
    found = {name: run(name, asked.data.resolve(), asked.epochs) for name in STRATEGIES}
    rows = [
        [name, f"{100 * one['accuracy']:.2f}", f"{one['examples_per_s']:,.0f}", one["weights_sha256"][:16]]
        for name, one in found.items()
    ]
    text = table(["strategy", "accuracy, %", "examples/s", "SHA-256 of the weights, its beginning"], rows)
    print(text)
    weak = [name for name, one in found.items() if one["accuracy"] < ACCURACY_MIN]
    if weak:
        raise SystemExit(f"below {100 * ACCURACY_MIN:.0f} %: {', '.join(weak)}")
    if len({found[name]["weights_sha256"] for name in ALIKE}) > 1:
        raise SystemExit(f"not the same bits: {', '.join(ALIKE)}")
    if asked.write:
        write("strategies", {"The MLP of examples/strategies.py": text}, found)


if __name__ == "__main__":
    main()
