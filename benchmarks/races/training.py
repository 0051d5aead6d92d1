"""Race 3: the MNIST MLP end to end, 2 workers, 1 and 2 shards, against TensorFlow and no server.

    python -m benchmarks.races.training --data FOLDER [--peers tensorflow] [--transport shm] [--write]

with MNIST's four IDX files in FOLDER. Contestants train the network of `mnist.toml` with Adam at 0.001 in batches of
128. Ours is `parashard run`, by default and asynchronous with a pipeline; a round of each has one run that is not
evaluated, for the examples per second, and one that is, four times an epoch, until 97 % of the test examples are
classified right. The others are evaluated while their clocks stand still; ours is not. One process without a server,
with Adam and with SGD, shows what distribution costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import DEFAULT_FOLDER
from benchmarks.races.contestants import Contestant, Running, peer, single_process
from benchmarks.races.push_pull import settings_of
from benchmarks.races.rows import Row, as_json, compared, markdown
from benchmarks.tables import spread, table, write
from benchmarks.training import clean_up_when_ended, trained
from parashard.job.policy import Policy

JOB = Path(__file__).parent / "mnist.toml"
BATCH = 128
PARTS = 4
SHARDS = (1, 2)
OURS = "parashard"
OWN = {
    OURS: ['consistency.policy="auto"'],
    "parashard, async": ['consistency.policy="async"', "cluster.pipeline_depth=1"],
}
SGD = ('optimizer.kind="sgd"', "optimizer.learning_rate=0.1")

Result = dict[str, Any]


def main() -> None:
    """Run the race, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four IDX files")
    parser.add_argument(
        "--environments", type=Path, default=DEFAULT_FOLDER, help="folder of the peers' environments (default: .peers)"
    )
    parser.add_argument(
        "--peers", nargs="*", default=[], choices=["tensorflow", "all"], help="peers to race (default: none)"
    )
    parser.add_argument("--transport", default="auto", help='"default" leaves it to the job file')
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of a round (default: %(default)s)")
    parser.add_argument("--target", type=float, default=0.97, help="test accuracy to reach (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write race_training.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    clean_up_when_ended()
    data = arguments.data.absolute()
    request = {"epochs": arguments.epochs, "parts": PARTS, "target": arguments.target}
    settings = [f"data.path={data}", f"job.epochs={arguments.epochs}", *settings_of(arguments.transport)]
    results: dict[int, dict[str, list[Result]]] = {}
    versions: dict[str, dict[str, str]] = {}
    for shards in SHARDS:
        others = [
            single_process("no server, one core", data, threads=1),
            single_process("no server", data),
            single_process("no server, SGD", data, SGD),
        ]
        if arguments.peers:
            tensorflow = ("--servers", str(shards), "--data", str(data))
            others.append(peer(arguments.environments, "tensorflow", "TensorFlow", "tensorflow_training", *tensorflow))
        own = [*settings, f"cluster.shards={shards}"]
        results[shards], told = raced(others, own, request, arguments.rounds)
        versions |= told
    rows = [row for shards, found in results.items() for row in rows_of(shards, found)]
    sections = {
        f"Examples per second, {BATCH} in a batch": figures(results),
        "Milliseconds per batch": markdown(rows),
    }
    print("\n\n".join(sections.values()), flush=True)
    if arguments.write:
        write("race_training", sections, {"peers": versions, "results": results, "rows": as_json(rows)})


def raced(
    others: Sequence[Contestant], settings: Sequence[str], request: dict[str, Any], rounds: int
) -> tuple[dict[str, list[Result]], dict[str, dict[str, str]]]:
    """Return every round's result of ours and of the others, in turns, and the others' versions."""
    found: dict[str, list[Result]] = {}
    with ExitStack() as stack:
        running = [stack.enter_context(Running(other)) for other in others]
        for seed in range(rounds):
            for name, policy in OWN.items():
                found.setdefault(name, []).append(our_result([*settings, *policy], request["target"], seed))
            for other in running:
                found.setdefault(other.name, []).append(other.ask({**request, "seed": seed}))
            for name, results in found.items():
                print(f"{name}, seed {seed}: {results[-1]}", flush=True)
        return found, {other.name: other.versions for other in running}


def our_result(settings: Sequence[str], target: float, seed: int) -> Result:
    """Train twice, for the speed and until the target is reached; every shard must have applied every step."""
    own = [*settings, f"job.seed={seed}"]
    fast = trained("run", JOB, own)
    assert set(fast["steps_applied"]) == {fast["steps_total"]}, fast["steps_applied"]
    stop = [f"evaluation.every_epochs={1 / PARTS}", f"evaluation.target_accuracy={target}"]
    good = trained("run", JOB, [*own, *stop])
    return {
        "examples_per_s": fast["examples_per_s"],
        "to_target_s": to_target_s(good, fast["steps_total"], target),
        "accuracy": fast["held_out"]["accuracy"],
        "staleness_p50": fast["staleness"]["p50"],
    }


def to_target_s(report: Mapping[str, Any], steps_total: int, target: float) -> float | None:
    """Return the seconds of training of a job that was to end at its target; None if it never got there.

    A job that ended before its last step has reached the target. Its report's accuracy was measured later, after the
    steps that were leased already; with a constant learning rate it may be lower again by then.
    """
    if report["steps_total"] == steps_total and report["held_out"]["accuracy"] < target:
        return None
    policy = Policy.parse(report["consistency"])
    parts = policy.bound if policy.kind == "auto" else 1
    return float(report["steps_applied"][0] * BATCH / parts / report["examples_per_s"])


def rows_of(shards: int, found: dict[str, list[Result]]) -> list[Row]:
    """Return the rows of one number of shards: milliseconds per batch."""
    ms = {name: [1000 * BATCH / r["examples_per_s"] for r in results] for name, results in found.items()}
    size = f"{shards} shard{'s' if shards > 1 else ''}"
    return [compared("training", size, (OURS, ms[OURS]), (name, values)) for name, values in ms.items() if name != OURS]


def figures(results: dict[int, dict[str, list[Result]]]) -> str:
    """Return the Markdown table of examples per second, of the time to the target, and of the accuracy."""
    lines = []
    for shards, found in results.items():
        for name, own in found.items():
            times = [r["to_target_s"] for r in own if r["to_target_s"] is not None]
            reached = f"{spread(times)} in {len(times)} of {len(own)}" if times else f"never in {len(own)}"
            rate = spread([r["examples_per_s"] / 1000 for r in own])
            lines.append([str(shards), name, rate, reached, spread([100 * r["accuracy"] for r in own])])
    return table(["shards", "who", "1,000 examples/s", "seconds to the target", "accuracy at the end, %"], lines)


if __name__ == "__main__":
    main()
