"""How fast a job recovers, what faults leave of its speed, and what it costs to be able to recover.

    python -m benchmarks.recovery --data FOLDER [--part NAME] [--write]

with MNIST's four IDX files in FOLDER. Trains the network of `examples/mnist.toml` on a local cluster of 2 shards and 2
workers, asynchronously, and measures: times, from the death of a process until its work goes on; scripts, the same for
a worker of a PyTorch script, besides its first step and its memory; goodput, the steps per second under a kill every
15 s, relative to none; costs, the speed with checkpoints, relative to without; intervals, what a shard's death costs at
1, 5, 30 and 60 s between checkpoints, with a small shard and, with --gib, one of 1 GiB. On an idle machine: everything
here is a matter of processor time.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import recovery_costs, recovery_goodput, recovery_intervals, recovery_scripts, recovery_times
from benchmarks.tables import table, write
from benchmarks.training import clean_up_when_ended
from benchmarks.watched_run import run_watched
from parashard.job.layers import Override, parse_set
from parashard.job.load import load_job

JOB = Path(__file__).parent.parent / "examples" / "mnist.toml"
BALLAST = Path(__file__).parent / "races" / "ballast.toml"
ONE_GIB = ("cluster.shards=1", "cluster.workers=2", f"model.elements={1 << 28}")
PARTS = ("times", "scripts", "goodput", "costs", "intervals")
ASYNC = "consistency.policy=async"
FOR_EVER = ("job.epochs=100000", "evaluation.every_epochs=0.0", "checkpoint.every_s=5.0")
SHOWN = ("cluster.lease_ttl_s", "cluster.restart_backoff_s", "cluster.silence_s", "checkpoint.every_s")
SEED = 3


def main() -> None:
    """Measure the parts that are asked for, print observations, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with MNIST's four IDX files")
    parser.add_argument("--part", action="append", choices=PARTS, help="measure only this; may be repeated")
    parser.add_argument("--deaths", type=int, default=20, help="times: deaths of each role (default: %(default)s)")
    parser.add_argument(
        "--goodput-s", type=float, default=90.0, help="goodput: how long each of the two runs is watched"
    )
    parser.add_argument("--fault-every-s", type=float, default=15.0, help="goodput: pause between two kills")
    parser.add_argument("--repeats", type=int, default=3, help="costs: runs of each case (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="costs: length of a run (default: %(default)s)")
    parser.add_argument("--gib", action="store_true", help="intervals: also with shards of 1 GiB")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure with (default: the system's)")
    parser.add_argument(
        "--write", action="store_true", help="write recovery.json and .md, or recovery_intervals of that part alone"
    )
    arguments = parser.parse_args()
    clean_up_when_ended()
    parts = {"times": times, "scripts": scripts, "goodput": goodput, "costs": costs, "intervals": intervals}
    sections: dict[str, str] = {}
    figures: dict[str, Any] = {"settings": settings_shown(arguments.data)}
    for part in arguments.part or PARTS:
        print(f"--- {part}", flush=True)
        found, figures[part] = parts[part](arguments)
        sections.update(found)
    for heading, text in sections.items():
        print(f"\n## {heading}\n\n{text}", flush=True)
    if arguments.write:
        told = ", ".join(f"`{key}` {value}" for key, value in figures["settings"].items())
        name = "recovery_intervals" if arguments.part == ["intervals"] else "recovery"
        write(name, {"Settings": f"{told}.", **sections}, figures)


def times(arguments: argparse.Namespace) -> tuple[dict[str, str], Any]:
    """Kill each role `--deaths` times; return tables and figures."""
    imports = recovery_times.imports_s()
    watch = partial(recovery_times.measured, deaths=arguments.deaths, seed=SEED)
    seen = run_watched(JOB, watched_job(arguments.data), arguments.scratch, watch)
    return recovery_times.sections(seen, imports), {"imports_s": imports, "since_death_s": seen}


def scripts(arguments: argparse.Namespace) -> tuple[dict[str, str], Any]:
    """Run a PyTorch script and kill its workers; return table and figures."""
    found = recovery_scripts.measured(arguments.deaths)
    return {"Workers of a PyTorch script": recovery_scripts.section(found)}, found


def goodput(arguments: argparse.Namespace) -> tuple[dict[str, str], Any]:
    """Watch one run without faults and one with; return table and figures."""
    cases: dict[str, Any] = {}
    pauses_s = {"no faults": None, f"a kill every {arguments.fault_every_s:.0f} s": arguments.fault_every_s}
    for case, every_s in pauses_s.items():
        watch = partial(recovery_goodput.sampled, seconds=arguments.goodput_s, every_s=every_s, seed=SEED)
        samples, killed = run_watched(JOB, watched_job(arguments.data), arguments.scratch, watch)
        steps_per_s = recovery_goodput.rate(samples)
        print(
            f"{case}: {steps_per_s:,.1f} steps/s over {arguments.goodput_s:.0f} s; killed: {killed or 'none'}",
            flush=True,
        )
        cases[case] = {"steps_per_s": steps_per_s, "killed": killed, "samples": samples}
    clean = cases["no faults"]["steps_per_s"]
    rows = [
        [name, str(len(case["killed"])), f"{case['steps_per_s']:,.1f}", f"{case['steps_per_s'] / clean:.2f}"]
        for name, case in cases.items()
    ]
    with_kills = list(cases.values())[-1]["steps_per_s"]
    lost_s = (1 - with_kills / clean) * arguments.fault_every_s  # by one kill
    for name, every_s in {"a kill a minute": 60.0, "a kill an hour": 3600.0}.items():
        rows.append([f"{name}, computed", "", "", f"{1 - lost_s / every_s:.4f}"])
    return {"Goodput": table(["run", "kills", "steps applied per second", "relative to no faults"], rows)}, cases


def costs(arguments: argparse.Namespace) -> tuple[dict[str, str], Any]:
    """Run the job with checkpoints, and without; return table and figures."""
    settings = (f"data.path={arguments.data}", ASYNC, f"job.epochs={arguments.epochs}")
    rows = recovery_costs.measured(JOB, settings, arguments.scratch, arguments.repeats)
    return {"Costs of checkpoints": recovery_costs.section(rows)}, rows


def intervals(arguments: argparse.Namespace) -> tuple[dict[str, str], Any]:
    """Kill shards at each interval between checkpoints; return tables and figures."""
    endless = ("job.epochs=100000", "evaluation.every_epochs=0.0")
    cases: dict[str, tuple[Path, tuple[str, ...]]] = {
        "Deaths by interval": (JOB, (f"data.path={arguments.data}", *endless))
    }
    if arguments.gib:
        cases["Deaths by interval, shards of 1 GiB"] = (BALLAST, (*ONE_GIB, *endless))
    deaths = min(arguments.deaths, 3)
    rows = {
        name: recovery_intervals.measured(job, settings, arguments.scratch, deaths)
        for name, (job, settings) in cases.items()
    }
    return {name: recovery_intervals.section(found) for name, found in rows.items()}, rows


def watched_job(data: str) -> list[Override]:
    """Return the overrides of the job file, for a job that does not end by itself."""
    return [parse_set(setting) for setting in (f"data.path={data}", ASYNC, *FOR_EVER)]


def settings_shown(data: str) -> dict[str, Any]:
    """Return the settings that times and goodput depend on."""
    job = load_job(JOB, watched_job(data)).job
    return {key: getattr(getattr(job, key.partition(".")[0]), key.partition(".")[2]) for key in SHOWN}


if __name__ == "__main__":
    main()
