"""How much one coordinator bears: `python -m benchmarks.scheduling [--workers 10 100 1000] [--write]`.

A real coordinator process, 64 stand-ins for shards, and crowds of workers that decide and call as real ones do, a
connection each, over gRPC on loopback; their steps are pauses. All share the machine's cores, so that on two cores the
crowds take about as much as the coordinator: a coordinator with a core of its own bears no less.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Sequence
from typing import Any

from benchmarks.scheduling.coordinator import LoadedCoordinator, Phase
from benchmarks.scheduling.crowd import SHARDS
from benchmarks.tables import table, write

STEP_S = 1.0
BEGIN_STEPS = 4  # of each worker before its steps and calls are counted
PACED = 4  # times as long as the other phases: each worker's first call in a phase reports no step
COMPLETE_SHARE = 0.9  # least share of the computed steps: late ones are computed twice, and counted once


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return the value that this share of some ascending values does not exceed; 0: there are none."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] if ascending else 0.0


def figures_of(phase: Phase) -> dict[str, Any]:
    """Return a phase's figures for the file of results."""
    return {
        "seconds": round(phase.seconds, 2),
        "counts": phase.counts,
        "calls_per_s": round(phase.counts.get("calls", 0) / phase.seconds, 1),
        "steps_per_s": round(phase.counts.get("steps", 0) / phase.seconds, 1),
        "median_ms": round(1e3 * percentile(phase.latencies_s, 0.5), 2),
        "p99_ms": round(1e3 * percentile(phase.latencies_s, 0.99), 2),
        "cpu_share": round(phase.cpu_share, 3),
        "memory_mib": round(phase.memory_mib, 1),
        "threads": phase.threads,
        "refused": sum(count for name, count in phase.counts.items() if name.startswith("refused")),
    }


def measured(workers: int, seconds: float, pace: float) -> dict[str, Any]:
    """Return the figures of one number of workers."""
    found: dict[str, Any] = {"workers": workers}
    with LoadedCoordinator.of("async", workers, SHARDS) as it:
        phases = {"join": it.do("join")}
        views: dict[str, Any] = {}
        paced = {"step_s": STEP_S / pace, "batch": 16, "apart": True}
        begun = it.do("work", **paced, seconds=BEGIN_STEPS * STEP_S / pace)  # first calls report no step
        phases["paced"] = it.do("work", lambda: views.update(it.views()), **paced, seconds=PACED * seconds)
        phases["a call a step"] = it.do("work", step_s=0.0, batch=1, seconds=seconds)
        phases["16 steps a call"] = it.do("work", step_s=0.0, batch=16, seconds=seconds)
        phases["leave"] = it.do("leave")
        found |= {"phases": {name: figures_of(phase) for name, phase in phases.items()}, "views": views}
        computed = sum(phase.counts.get("computed", 0) for phase in (begun, *phases.values()))
        found["computed"], found["complete"] = computed, it.steps_complete()
        assert computed > 0, found
        assert COMPLETE_SHARE * computed <= found["complete"] <= computed, found
    with LoadedCoordinator.of("auto", workers, SHARDS) as it:
        it.do("join")
        phase = it.do("work", step_s=STEP_S, batch=16, seconds=seconds + STEP_S)
        batches = it.steps_complete() / workers
        assert batches >= 1, f"no batch of `auto` is complete: {figures_of(phase)}; --seconds is too short"
        found["auto"] = figures_of(phase) | {"batch_s": round(phase.working_s / batches, 3)}
    return found


def main() -> None:
    """Measure each number of workers, print the tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[10, 100, 1000], help="numbers of workers (default: 10 100 1000)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each phase (default: %(default)s)")
    parser.add_argument("--pace", type=float, default=1.0, help="steps a second of a worker (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write scheduling.json and .md")
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the crowds inherit it
    rows = []
    for workers in arguments.workers:
        rows.append(measured(workers, arguments.seconds, arguments.pace))
        print(rows[-1], flush=True)
    sections = sections_of(rows, arguments.pace)
    print("\n\n".join(f"{heading}\n\n{text}" for heading, text in sections.items()))
    if arguments.write:
        write("scheduling", sections, {"rows": rows})


def sections_of(rows: Sequence[dict[str, Any]], pace: float) -> dict[str, str]:
    """Return the tables by heading."""
    return {
        f"Each worker {pace:g} steps a second, a call a step": calls_table(rows, "paced"),
        "As fast as they can, a call a step": calls_table(rows, "a call a step"),
        "As fast as they can, 16 steps a call": calls_table(rows, "16 steps a call"),
        f"auto: a batch has a part for each worker, and a part takes {STEP_S:g} s": auto_table(rows),
        "Joining, and what people ask for": views_table(rows),
    }


def calls_table(rows: Sequence[dict[str, Any]], phase: str) -> str:
    """Return a phase's figures by number of workers; its steps are those that were reported complete within it."""
    header = [
        "workers",
        "steps/s",
        "p50 of a lease, ms",
        "p99, ms",
        "coordinator's CPU, cores",
        "memory, MiB",
        "refused",
    ]
    found = [(row["workers"], row["phases"][phase]) for row in rows]
    return table(
        header,
        [
            [
                f"{workers:,}",
                f"{p['steps_per_s']:,.0f}",
                f"{p['median_ms']:.1f}",
                f"{p['p99_ms']:.1f}",
                f"{p['cpu_share']:.2f}",
                f"{p['memory_mib']:.0f}",
                f"{p['refused']:,}",
            ]
            for workers, p in found
        ],
    )


def auto_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return how long a batch takes by number of workers."""
    header = ["workers", "a batch, s", "coordinator's CPU, cores", "threads", "memory, MiB", "refused"]
    found = [(row["workers"], row["auto"]) for row in rows]
    return table(
        header,
        [
            [
                f"{workers:,}",
                f"{p['batch_s']:.2f}",
                f"{p['cpu_share']:.2f}",
                f"{p['threads']:,}",
                f"{p['memory_mib']:.0f}",
                f"{p['refused']:,}",
            ]
            for workers, p in found
        ],
    )


def views_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the costs of joining and of status views by number of workers."""
    names = ("status", "page", "status.json", "metrics")
    header = ["workers", "all join, s", "all leave, s", *(f"{name}, ms (KiB)" for name in names), "samples in metrics"]
    lines = []
    for row in rows:
        views, phases = row["views"], row["phases"]
        asked = [f"{1e3 * views[name]['median_s']:.0f} ({views[name]['bytes'] / 1024:.0f})" for name in names]
        spent = [f"{phases[name]['seconds']:.2f}" for name in ("join", "leave")]
        lines.append([f"{row['workers']:,}", *spent, *asked, f"{views['metrics']['samples']:.0f}"])
    return table(header, lines)


if __name__ == "__main__":
    main()
