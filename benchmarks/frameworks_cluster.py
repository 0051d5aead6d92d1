"""`ParameterServerStrategy` against a framework alone, and against TensorFlow's.

    python -m benchmarks.frameworks_cluster [--data FOLDER] [--rounds N] [--write]

in an environment that has PyTorch, JAX and Keras. One worker and one shard (`async`, Adam, batches of 128) race
PyTorch's and JAX' own loops on one thread, with the MLP of `benchmarks.frameworks_one_device` and with one whose step
takes about 50 ms. With MNIST's four files in FOLDER and TensorFlow's environment (`python -m
benchmarks.peers.environments tensorflow`), two workers with 1 and 2 shards train a Keras model on JAX against
`benchmarks.peers.tensorflow_training`: the same MLP written out, since Keras 3 does not train with TensorFlow's
parameter servers. Contestants take turns; a ratio is of two neighbours. Speeds are by the clock, without what is
compiled at first: ours and the plain loops' are those after the first epoch, TensorFlow's those after 20 steps.

"One thread" is a framework's: JAX' loop alone does not wait for XLA's thread, and so has Python on the second core,
where ours has the shard. Contestants read data as their users do: ours float32 in memory, TensorFlow a shuffled
`tf.data.Dataset` of bytes that each batch scales; TensorFlow computes with as many threads as it likes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.environments import DEFAULT_FOLDER
from benchmarks.races.contestants import Running, peer
from benchmarks.tables import spread, table, write

ROOT = Path(__file__).parent.parent
BATCH = 128
DEADLINE_S = 600.0
LOSS_MAX = 2.0  # guessing among ten classes has 2.3
HIDDEN = {"256-128": (256, 128), "2048-1536": (2048, 1536)}
STEPS = {"256-128": 3000, "2048-1536": 180}
TARGETS = {"256-128": 0.7, "2048-1536": 0.9}
SHARD_TARGETS = {1: 2.5, 2: 2.0}
MNIST_BATCHES = 469

Rates = list[float]
Pair = dict[str, Rates]


def run(framework: str, what: str, *words: str) -> float:
    """Return the examples per second of one run, in a process and a folder of its own.

    Raises
    ------
    CalledProcessError
        If it fails; the reason is on standard error.
    RuntimeError
        If it did not learn.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "benchmarks.frameworks.cluster", framework, what, *words]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not found["loss"] < LOSS_MAX:
        raise RuntimeError(f"{framework} {what} did not learn: a loss of {found['loss']:.3f}")
    return float(found["examples_per_s"])


def against_plain(rounds: int, steps: dict[str, int]) -> dict[str, Pair]:
    """Return the speeds of each framework's own loop and of ours, by framework and widths."""
    raced: dict[str, Pair] = {}
    for _ in range(rounds):
        for framework in ("pytorch", "jax"):
            for widths, hidden in HIDDEN.items():
                words = ("--hidden", *map(str, hidden), "--steps", str(steps[widths]))
                pair = raced.setdefault(f"{framework} {widths}", {"plain": [], "ours": []})
                pair["plain"].append(run(framework, "alone", *words))
                pair["ours"].append(run(framework, "ours", *words))
                print(framework, widths, pair["plain"][-1], pair["ours"][-1], flush=True)
    return raced


def against_tensorflow(
    rounds: int, epochs: int, data: Path, environments: Path
) -> tuple[dict[int, Pair], dict[str, str]]:
    """Return the speeds of TensorFlow and of ours by number of shards, and the versions of TensorFlow's environment."""
    raced: dict[int, Pair] = {}
    versions: dict[str, str] = {}
    for shards in SHARD_TARGETS:
        words = ("--servers", str(shards), "--data", str(data))
        own = (
            "--data",
            str(data),
            "--workers",
            "2",
            "--shards",
            str(shards),
            "--steps",
            str(MNIST_BATCHES * (epochs + 1)),
        )
        pair = raced.setdefault(shards, {"plain": [], "ours": []})
        with ExitStack() as stack:
            contestant = peer(environments, "tensorflow", "TensorFlow", "tensorflow_training", *words)
            tensorflow = stack.enter_context(Running(contestant))
            versions = tensorflow.versions
            for seed in range(rounds):
                answer = tensorflow.ask({"epochs": epochs, "parts": 1, "target": 1.0, "seed": seed})
                pair["plain"].append(answer["examples_per_s"])
                pair["ours"].append(run("keras", "ours", *own))
                print("tensorflow", shards, pair["plain"][-1], pair["ours"][-1], flush=True)
    return raced, versions


def ratios(pair: Pair) -> Rates:
    """Return the speed of each of our runs, relative to its neighbour's."""
    return [ours / plain for plain, ours in zip(pair["plain"], pair["ours"], strict=True)]


def main() -> None:
    """Race, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="MNIST's folder; without it TensorFlow is not raced")
    parser.add_argument(
        "--environments", type=Path, default=DEFAULT_FOLDER, help="folder of the peers' environments (default: .peers)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of a turn on MNIST (default: %(default)s)")
    parser.add_argument("--part", type=float, default=1.0, help="fraction of the steps on random data (default: all)")
    parser.add_argument("--write", action="store_true", help="write frameworks_cluster.json and .md")
    asked = parser.parse_args()
    steps = {widths: max(1, round(asked.part * count)) for widths, count in STEPS.items()}
    figures: dict[str, Any] = {
        "steps": steps,
        "frameworks": {name: version(name) for name in ("torch", "jax", "keras")},
    }
    plain = figures["plain"] = against_plain(asked.rounds, steps)
    rows = []
    for case, pair in plain.items():
        framework, _, widths = case.partition(" ")
        step_ms = 1e3 * BATCH / median(pair["plain"])
        goal = f"{TARGETS[widths]}"
        rows.append([framework, widths, f"{step_ms:.1f}", f"{median(pair['ours']):,.0f}", spread(ratios(pair)), goal])
    header = ["framework", "hidden layers", "a step alone, ms", "ours, examples/s", "speed of ours over alone", "goal"]
    sections = {"1 worker and 1 shard, and the framework alone": table(header, rows)}
    if asked.data is not None:
        raced, versions = against_tensorflow(asked.rounds, asked.epochs, asked.data.resolve(), asked.environments)
        figures |= {"tensorflow": raced, "tensorflow_versions": versions}
        rows = [
            [str(shards), *(f"{median(pair[who]):,.0f}" for who in ("plain", "ours")), spread(ratios(pair)), f"{goal}"]
            for (shards, pair), goal in zip(raced.items(), SHARD_TARGETS.values(), strict=True)
        ]
        header = ["shards", "TensorFlow, examples/s", "ours", "times as fast", "goal"]
        sections["2 workers, and TensorFlow's ParameterServerStrategy"] = table(header, rows)
    print("\n\n".join(sections.values()))
    if asked.write:
        write("frameworks_cluster", sections, figures)


if __name__ == "__main__":
    main()
