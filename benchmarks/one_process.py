"""A step in one process on a CPU, beside another checkout: `python -m benchmarks.one_process --beside TREE [--write]`.

A network of ours with 3,466 parameters, so that nearly all of a step is Python. The trees take turns, each turn a
process; of a turn the second percentile of its steps counts, since a machine that others use is now fast, now slow.
TREE has a `.venv`, as `git worktree add` and `make` give it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.tables import table, write

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = {
    "OneDeviceStrategy": 'ps.OneDeviceStrategy("cpu")',
    "MirroredStrategy": 'ps.MirroredStrategy(["cpu"] * 2)',
}
LIMIT_S = 300.0
PROGRAM = """
import sys, time
import numpy as np
import parashard as ps
from parashard.layers import Dense, ReLU

began, computed = [], ps.Sequential.loss_and_gradients

def timed(*given):
    began.append(time.perf_counter())
    return computed(*given)

ps.Sequential.loss_and_gradients = timed
x = np.random.default_rng(0).standard_normal((12800, 64), np.float32)
layers = [Dense(32, initializer="he_normal"), ReLU(), Dense(32, initializer="he_normal"), ReLU(), Dense(10)]
model = ps.Sequential(layers, input_shape=(64,), loss="softmax_cross_entropy")
trainer = ps.Trainer(model, ps.Adam(1e-3), STRATEGY, settings={"checkpoint.every_s": 0.0})
trainer.fit((x, x[:, :10].argmax(1)), epochs=31, batch_size=128, verbose=0)
print(np.percentile(np.diff(began[100::2]) / 2, 2) * 1000)  # of two, the steps of a round
"""


def step_ms(tree: Path, strategy: str) -> float:
    """Return the time of a step of a tree."""
    with tempfile.TemporaryDirectory(prefix="parashard-one-process-") as folder:
        program = PROGRAM.replace("STRATEGY", STRATEGIES[strategy])
        one_thread = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        python = [tree / ".venv/bin/python", "-W", "ignore", "-c", program]
        done = subprocess.run(python, cwd=folder, env=one_thread, timeout=LIMIT_S, check=True, stdout=subprocess.PIPE)
        return float(done.stdout.split()[-1])


def main() -> None:
    """Compare this tree with another one, and print a row for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, required=True, metavar="TREE", help="another checkout, with a .venv")
    parser.add_argument("--turns", type=int, default=8, help="of each tree (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write one_process.json and .md in benchmarks/results")
    asked = parser.parse_args()
    there, rows, figures = asked.beside.absolute(), [], {}
    commit = subprocess.check_output(["git", "-C", there, "rev-parse", "--short=8", "HEAD"], text=True).strip()
    for strategy in STRATEGIES:
        turns = [[step_ms(tree, strategy) for tree in (there, ROOT)] for _ in range(asked.turns)]
        before, now = (statistics.median(of_tree) for of_tree in zip(*turns, strict=True))
        rows.append([strategy, f"{before:.3f}", f"{now:.3f}", f"{before / now:.2f}"])
        figures[strategy] = turns
    columns = ["strategy", f"ms at {commit}", "ms now", "speed"]
    text = table(columns, rows)
    sys.stdout.write(text + "\n")
    if asked.write:
        write("one_process", {"A step in one process on a CPU": text}, {"commit": commit, "ms": figures})


if __name__ == "__main__":
    main()
