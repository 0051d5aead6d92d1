"""Race 2: empty steps scheduled per second, against `schedule` and `join` of TensorFlow's coordinator.

    python -m benchmarks.races.scheduling [--peers tensorflow] [--write]

Two workers each. Ours is `benchmarks.scheduling`: real worker processes lease each step and report it complete, and
every step must be complete at the end. With a lease batch of 1 every step costs a call of its own, as with the peer; 16
is what a job has by default.
"""

from __future__ import annotations

import argparse
import logging
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers.environments import DEFAULT_FOLDER
from benchmarks.races.contestants import Running, peer
from benchmarks.races.rows import as_json, compared, markdown
from benchmarks.scheduling import measure
from benchmarks.tables import spread, table, write
from benchmarks.training import clean_up_when_ended
from parashard.process.logs import log

WORKERS = 2
BATCHES = {16: 10, 1: 1}
"""Lease batches, and how many times `--steps` each takes: about as long as the others."""


def main() -> None:
    """Run the race, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=DEFAULT_FOLDER, help="the peers' (default: .peers)")
    parser.add_argument("--peers", nargs="*", default=[], choices=["tensorflow", "all"], help="default: none")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3000, help="steps of a round (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write race_scheduling.json and .md")
    arguments = parser.parse_args()
    clean_up_when_ended()
    log.setLevel(logging.WARNING)
    ours: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    theirs: dict[str, list[float]] = {}
    versions: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        others = []
        if arguments.peers:
            entry = peer(arguments.environments, "tensorflow", "TensorFlow", "tensorflow_scheduling")
            others.append(stack.enter_context(Running(entry)))
        for _ in range(arguments.rounds):
            for batch, factor in BATCHES.items():
                ours[batch].append(measure(WORKERS, batch, arguments.steps * factor))
            for other in others:
                rate = other.ask({"steps": arguments.steps})["steps_per_s"]
                theirs.setdefault(other.name, []).append(rate)
                versions[other.name] = other.versions
    rows = [
        compared("scheduling", "empty step", (f"lease batch {batch}", _ms(own)), (name, _ms(rates)))
        for name, rates in theirs.items()
        for batch, own in ours.items()
    ]
    rates = {**{f"parashard, lease batch {batch}": own for batch, own in ours.items()}, **theirs}
    lines = [[name, spread([rate / 1000 for rate in own])] for name, own in rates.items()]
    sections = {"Empty steps per second": table(["coordinator", "1,000 steps/s, median (spread)"], lines)}
    if rows:
        sections["Milliseconds per empty step"] = markdown(rows)
    print("\n\n".join(sections.values()), flush=True)
    if arguments.write:
        write("race_scheduling", sections, {"peers": versions, "steps_per_s": rates, "rows": as_json(rows)})


def _ms(rates: list[float]) -> list[float]:
    return [1000 / rate for rate in rates]


if __name__ == "__main__":
    main()
