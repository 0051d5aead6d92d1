"""Race 1: push and pull of 1, 4 and 64 MiB between one worker and one shard, on one host and across TCP.

    python -m benchmarks.races.push_pull [--peers all] [--transports shm tcp grpc] [--write [NAME]]

Each peer runs against all of our transports, in turns; with `--together` all take turns, so that peers can be compared
with each other. A round's figure is the median of its pushes-and-pulls; every round ends with a check of the weights.
"push + pull" is one after the other; in the "worker's loop" the next pull may run beside a push, as a worker with
`cluster.pipeline_depth = 1` does. Beside the peers there are two floors: a process that does all without a server, and
a bare socket.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import DEFAULT_FOLDER
from benchmarks.races.contestants import Contestant, bare_socket, in_turns, no_server, ours, peer
from benchmarks.races.rows import Row, as_json, compared, markdown
from benchmarks.tables import table, write
from benchmarks.training import clean_up_when_ended

MIB = 1 << 20
RACES = {"shm": "same host", "auto": "same host", "default": "same host", "tcp": "across TCP", "grpc": "across gRPC"}
"""By transport; "default" leaves the choice to the job file's own default."""
PEERS = {
    "tensorflow": ("tensorflow", "TensorFlow", "tensorflow_push_pull"),
    "torch": ("torch", "PyTorch RPC", "torch_push_pull"),
    "torch-tcp": ("torch", "PyTorch RPC (TCP)", "torch_push_pull", "--tcp"),
    "ray": ("ray", "Ray", "ray_push_pull"),
    "flight": ("flight", "Arrow Flight", "flight_push_pull"),
    "grpc": ("grpc", "raw grpcio", "grpc_push_pull"),
}
OPERATIONS = {"both_ms": "push + pull", "loop_ms": "worker's loop", "push_ms": "push", "pull_ms": "pull"}
TOGETHER = ("both_ms", "loop_ms")  # targets are for these
REPEATS = {1: 100, 4: 50, 64: 10, 256: 5}  # multiples of 5, as TensorFlow's contestant needs them


def main() -> None:
    """Run the race, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--environments", type=Path, default=DEFAULT_FOLDER, help="folder of the peers' environments (default: .peers)"
    )
    parser.add_argument("--peers", nargs="*", default=[], choices=[*PEERS, "all"], help="peers to race (default: none)")
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp", "grpc"], choices=list(RACES))
    parser.add_argument("--together", action="store_true", help="let all peers take turns with each other, too")
    parser.add_argument("--sizes-mib", nargs="+", type=int, default=list(REPEATS), metavar="MIB")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant (default: %(default)s)")
    parser.add_argument("--repeats", type=int, help="pushes and pulls of a round (default: by size)")
    parser.add_argument(
        "--write", nargs="?", const="push_pull", metavar="NAME", help="write NAME.json and .md in benchmarks/results"
    )
    arguments = parser.parse_args()
    clean_up_when_ended()
    us = [ours(transport, settings_of(transport)) for transport in arguments.transports]
    names = list(PEERS) if "all" in arguments.peers else arguments.peers
    others = [no_server(), bare_socket(), *(peer(arguments.environments, *PEERS[name]) for name in names)]
    groups = [others] if arguments.together else [[other] for other in others]
    requests = [
        {"size_bytes": mib * MIB, "repeats": arguments.repeats or REPEATS.get(mib, 10)} for mib in arguments.sizes_mib
    ]
    rows: list[Row] = []
    versions: dict[str, dict[str, str]] = {}
    race = partial(raced, us, requests=requests, rounds=arguments.rounds)
    for group in groups:
        found, told = race(group)
        rows += found
        versions |= told
        print(f"\n{markdown(row for row in found if is_together(row))}", flush=True)
    if arguments.write:
        write(arguments.write, sections(rows, versions), {"peers": versions, "rows": as_json(rows)})


def settings_of(transport: str) -> list[str]:
    """Return the settings of the job that choose a transport."""
    return [] if transport == "default" else [f'cluster.transport="{transport}"']


def raced(
    us: Sequence[Contestant], others: Sequence[Contestant], requests: Sequence[Mapping[str, Any]], rounds: int
) -> tuple[list[Row], dict[str, dict[str, str]]]:
    """Return the rows of each of ours against each other, and the versions of all."""
    answers, versions = in_turns([*us, *others], requests, rounds)
    rows = []
    for index, request in enumerate(requests):
        size = f"{request['size_bytes'] // MIB} MiB"
        for operation, what in OPERATIONS.items():
            ms = {
                name: [statistics.median(answer[operation]) for answer in found[index]]
                for name, found in answers.items()
                if operation in found[index][0]
            }
            for other, mine in itertools.product(others, us):
                if other.name in ms:
                    race = RACES[mine.name] if operation in TOGETHER else f"{RACES[mine.name]}, part"
                    rows.append(compared(race, size, (mine.name, ms[mine.name]), (other.name, ms[other.name]), what))
    return rows, versions


def is_together(row: Row) -> bool:
    """Tell whether a row is of pushes and pulls together."""
    return any(row.size.endswith(OPERATIONS[operation]) for operation in TOGETHER)


def sections(rows: Sequence[Row], versions: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the Markdown, by heading."""
    both = [row for row in rows if is_together(row)]
    lines = [[name, ", ".join(f"{package} {of}" for package, of in own.items())] for name, own in versions.items()]
    return {
        "Push and pull": markdown(sorted(both, key=lambda row: row.race, reverse=True)),
        "Pushes and pulls apart": markdown(row for row in rows if row not in both),
        "Contestants": table(["name", "versions"], lines),
    }


if __name__ == "__main__":
    main()
