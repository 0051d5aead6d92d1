"""A shard's resident memory under load, over the variables, slots and buffers that it holds.

    python -m benchmarks.races.memory [--size-mib 256] [--transport shm] [--write]

One shard with Adam (weights and two slots), asynchronously, two workers that do nothing but pull and push. Looks at
the shard's process from outside, ten times a second: RSS, which counts a page that others have mapped as well, and PSS,
which counts a share of it. The largest RSS is judged: at most 1.3 times what the shard must hold, and 200 MiB.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.races.push_pull import MIB, settings_of
from benchmarks.tables import table, write
from benchmarks.training import clean_up_when_ended
from benchmarks.watched_run import Watch, run_watched
from parashard._proto import shard_pb2
from parashard.job.layers import parse_set
from parashard.job.load import load_job

JOB = Path(__file__).parent / "ballast.toml"
WORKERS = 2
SAMPLE_S = 0.1
BEGIN_PUSHES = 4
FACTOR, CONSTANT_BYTES = 1.3, 200 * MIB


def main() -> None:
    """Run the job, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=256, help="size of the variables (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="duration of the measurement (default: %(default)s)"
    )
    parser.add_argument("--transport", default="auto", help='"default" leaves it to the job file')
    parser.add_argument("--scratch", type=Path, help="folder for the run's files (default: the system's)")
    parser.add_argument("--write", action="store_true", help="write memory.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    clean_up_when_ended()
    settings = [
        f"model.elements={arguments.size_mib * MIB // 4}",
        "data.examples=1000000",
        'optimizer.kind="adam"',
        "optimizer.learning_rate=0.001",
        f"cluster.workers={WORKERS}",
        *settings_of(arguments.transport),
    ]
    overrides = [parse_set(setting) for setting in settings]
    job = load_job(JOB, overrides, {}).job
    budget_bytes = job.cluster.push_memory_bytes(arguments.size_mib * MIB, job.depth_max)
    seen = run_watched(JOB, overrides, arguments.scratch, partial(sampled, seconds=arguments.seconds))
    figures = judged(seen, budget_bytes)
    lines = [[name, f"{value / MIB:,.0f}"] for name, value in figures["bytes"].items()]
    text = table(["of the shard", "MiB"], lines) + "\n\n" + verdict(figures)
    print(text, flush=True)
    if arguments.write:
        write("memory", {"Memory of a shard": text}, {"transport": arguments.transport, **figures})


def sampled(watch: Watch, seconds: float) -> dict[str, int]:
    """Watch the shard for some time; return its greatest RSS and PSS, and the size that it reports, in bytes."""
    address = watch.eventually(watch.view, "the shard").shards[0].address

    def begun() -> shard_pb2.InspectReply | None:
        record = watch.inspect(address)
        return record if record is not None and record.version >= BEGIN_PUSHES else None

    first = watch.eventually(begun, "the first pushes")
    process = Path("/proc") / str(watch.cluster.pid("shard-0"))
    greatest = {"rss": 0, "pss": 0}
    for _ in range(round(seconds / SAMPLE_S)):
        now = rolled_up((process / "smaps_rollup").read_text())
        greatest = {name: max(value, now[name]) for name, value in greatest.items()}
        watch.pause(SAMPLE_S)
    last = watch.eventually(lambda: watch.inspect(address), "the shard's record")
    return {
        **greatest,
        "variables": last.variable_bytes,
        "slots": last.slot_bytes,
        "assembled_max": last.queue_bytes_max,
        "pushes": last.version - first.version,
    }


def rolled_up(text: str) -> dict[str, int]:
    """Return RSS and PSS in bytes from the text of a process's `smaps_rollup`."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("Rss:", "Pss:")))
    return {name.lower(): 1024 * int(value.split()[0]) for name, value in fields.items()}


def judged(seen: dict[str, int], budget_bytes: int) -> dict[str, Any]:
    """Return the figures, and whether they keep the bound.

    Parameters
    ----------
    seen : dict of str to int
        As `sampled` returns it.
    budget_bytes : int
        Maximum memory of pushes in flight in a shard: `cluster.queue_bytes`.
    """
    held = seen["variables"] + seen["slots"] + budget_bytes
    bound = FACTOR * held + CONSTANT_BYTES
    return {
        "bytes": {
            "variables": seen["variables"],
            "slots": seen["slots"],
            "pushes in flight, bound": budget_bytes,
            "pushes in flight, most seen": seen["assembled_max"],
            "RSS, most seen": seen["rss"],
            "PSS, most seen": seen["pss"],
            "target for RSS": round(bound),
        },
        "pushes": seen["pushes"],
        "ratio": seen["rss"] / held,
        "reached": seen["rss"] <= bound,
    }


def verdict(figures: dict[str, Any]) -> str:
    """Return a summary of the figures, in one sentence."""
    kept = "kept" if figures["reached"] else "not kept"
    return (
        f"RSS is {figures['ratio']:.2f} times variables, slots and the bound of what is in flight, over "
        f"{figures['pushes']:,} pushes; the target, {FACTOR} times and {CONSTANT_BYTES // MIB} MiB, is {kept}."
    )


if __name__ == "__main__":
    main()
