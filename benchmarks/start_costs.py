"""What the imports of each process cost: `python -m benchmarks.start_costs`.

CPU seconds (user and system) of fresh processes from warm caches, which take turns, so that the machine's other work
meets all of them; beside each median its ratio to importing NumPy, gRPC and protobuf alone, which nothing of ours can
undercut. The aims are ratios too. How long a shard takes until it serves, and what of that is waiting, is
`benchmarks.shard_start`'s.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable

from benchmarks.shard_start import JOB, measure_whole
from benchmarks.tables import load_before, spread, table, write
from parashard.job.load import as_toml, job_from_toml

BASELINE = "numpy, grpc, protobuf"
AIMS = {"worker": 1.3, "coordinator": 1.3, "shard and its kernels": 1.6, "parashard --help": 0.5}
DEADLINE_S = 120.0

END = "\nimport os\nos._exit(0)"  # as services end: the interpreter's own way out is no part of a start
READ_JOB = f"from parashard.job.load import job_from_toml\njob_from_toml({as_toml(job_from_toml(JOB))!r})\n"
KERNELS = """
from parashard.plan.optimizers import Adam
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer
fused.warm_up(rounds=False)
Optimizer(Adam()).warm_up()
"""
PROGRAMS = {
    "interpreter": "",
    BASELINE: "import numpy, grpc, google.protobuf",
    "worker": "import parashard_worker.__main__",
    "worker, its job read": f"import parashard_worker.__main__\n{READ_JOB}",
    "coordinator": "import parashard_coordinator.__main__",
    "coordinator, its job read": f"import parashard_coordinator.__main__\n{READ_JOB}",
    "shard": "import parashard_server.__main__",
    "shard, its job read": f"import parashard_server.__main__\n{READ_JOB}",
    "shard and its kernels": f"import parashard_server.__main__\n{KERNELS}",
}


def cpu_s_of(run: Callable[[], object]) -> float:
    """Return the CPU seconds of the processes that a function starts and waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def of_python(*arguments: str) -> Callable[[], object]:
    """Return what runs this interpreter to its end."""
    command = [sys.executable, "-P", *arguments]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return lambda: subprocess.run(command, env=environ, capture_output=True, timeout=DEADLINE_S, check=True)


def rows(times: dict[str, list[float]]) -> list[tuple[str, str, str, str]]:
    """Return the lines of the table: what, CPU seconds, ratio to the baseline, the aim of that."""
    baseline_s = statistics.median(times[BASELINE])
    return [
        (
            name,
            spread(found),
            f"{statistics.median(found) / baseline_s:.2f}",
            f"{AIMS[name]:.1f}" if name in AIMS else "",
        )
        for name, found in times.items()
    ]


def main() -> None:
    """Measure in turns, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="write start_costs.json and start_costs.md")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process compiles our modules again
    runs = {name: of_python("-c", program + END) for name, program in PROGRAMS.items()}
    load = os.getloadavg()[0]
    runs["shard, until it serves"] = measure_whole
    runs["parashard --help"] = of_python("-m", "parashard", "--help")
    for run in runs.values():
        run()  # fills the caches
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.turns):
        for name, run in runs.items():
            times[name].append(cpu_s_of(run))
    text = table(("process", "CPU seconds: median (least to most)", "ratio", "aim"), rows(times))
    print(text)
    if arguments.write:
        sections = {"Load": load_before(load), "CPU seconds of imports, bytecode and machine code cached": text}
        write("start_costs", sections, {"load": load, "cpu_s": times})


if __name__ == "__main__":
    main()
