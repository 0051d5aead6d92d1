"""Race: rows of an embedding table of 2^20 x 16, in steps of 4,096 x 26 ids by Zipf(1.2), with Adagrad.

    python -m benchmarks.races.embedding_rows [--torch PYTHON] [--write]

TensorFlow's parameter server and a single PyTorch process against a shard and a worker of ours, in turns: a figure is
the median over rounds of a round's median over batches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from benchmarks.peers.environments import DEFAULT_FOLDER
from benchmarks.races.contestants import Contestant, in_turns, peer
from benchmarks.tables import table, write
from benchmarks.training import clean_up_when_ended

OURS = {"shm": "same host", "tcp": "across TCP", "grpc": "across gRPC"}


def main() -> None:
    """Run the race, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--environments", type=Path, default=DEFAULT_FOLDER, help="folder of the peers' environments (default: .peers)"
    )
    parser.add_argument("--torch", type=Path, help="a Python with PyTorch (default: PyTorch is left out)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write embedding_rows.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    clean_up_when_ended()
    module = (sys.executable, "-m", "benchmarks.races.our_rows")
    contestants = [Contestant(way, (*module, "--set", f'cluster.transport="{way}"')) for way in OURS]
    contestants.append(peer(arguments.environments, "tensorflow", "TensorFlow", "tensorflow_rows"))
    if arguments.torch is not None:
        contestants.append(Contestant("PyTorch", (str(arguments.torch), "-m", "benchmarks.peers.torch_rows")))
    answers, versions = in_turns(contestants, [{"batches": 16}], arguments.rounds)
    ms = {
        name: {kind: statistics.median(statistics.median(answer[kind]) for answer in found[0]) for kind in found[0][0]}
        for name, found in answers.items()
    }
    kinds = ("pull_ms", "push_ms", "adagrad_ms", "step_ms")
    times = [[name, *(f"{own[kind]:.1f} ms" if kind in own else "" for kind in kinds)] for name, own in ms.items()]
    theirs = ms["TensorFlow"]
    ratios = []
    for way, where in OURS.items():
        own = ms[way]
        both = (theirs["pull_ms"] + theirs["push_ms"]) / (own["pull_ms"] + own["adagrad_ms"])
        step = f"{ms['PyTorch']['step_ms'] / own['step_ms']:.2f}" if "PyTorch" in ms else ""
        ratios.append([where, f"{theirs['pull_ms'] / own['pull_ms']:.2f}", f"{both:.2f}", step])
    shown = {
        "Milliseconds": table(["", "pull of unique ids", "push by SGD", "push by Adagrad", "whole step"], times),
        "Times as fast": table(
            ["", "pull", "pull and Adagrad, of their look-up and SGD", "step, of PyTorch's in one process"], ratios
        ),
        "Contestants": table(["", "versions"], [[name, str(own)] for name, own in versions.items()]),
    }
    for heading, text in shown.items():
        print(f"\n{heading}\n\n{text}")
    if arguments.write:
        write("embedding_rows", shown, {"peers": versions, "milliseconds": ms, "answers": answers})


if __name__ == "__main__":
    main()
