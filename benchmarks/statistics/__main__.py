"""Whether training stays as good with many workers: `python -m benchmarks.statistics --data FOLDER [--part NAME]`.

Trains each task in each scenario in virtual time, appends the results to a file of JSON lines, and prints the table.
Run again, it trains only what the file does not have, and tasks that were edited; after a change of the product, begin
with another file. Needs PyTorch and JAX for most tasks; tasks whose framework or files are missing are left out, and
named.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.statistics import tasks
from benchmarks.statistics.cells import PARTS, Cell, cells_of, run
from benchmarks.statistics.page import page

CELLS = Path("build") / "statistics.jsonl"
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
}


def main() -> None:
    """Run the cells that are missing, and write the table and the plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with MNIST's four files")
    parser.add_argument(
        "--part", choices=list(PARTS), default="quick", help="group of cells to run (default: %(default)s)"
    )
    parser.add_argument(
        "--tasks", nargs="+", metavar="TASK", help=f"tasks to run: {', '.join(tasks.names())} (default: all)"
    )
    parser.add_argument("--scenarios", nargs="+", metavar="NAME", help="run only these scenarios, and plain")
    parser.add_argument("--workers", nargs="+", type=int, metavar="N", help="run only these numbers of workers")
    parser.add_argument("--seeds", type=int, default=1000, help="most seeds of each cell")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=CELLS, help="the file of cells (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write statistics.md and plots in benchmarks/results")
    asked = parser.parse_args()
    os.environ.update(ONE_THREAD)
    data = None if asked.data is None else asked.data.absolute()
    found = read(asked.results)
    named = asked.tasks or [name for name in tasks.names() if asked.part == "night" or name not in tasks.LONG]
    due = [
        cell
        for cell in dict.fromkeys(cells_of(asked.part, available(named, data)))
        if cell not in found
        and cell.seed < asked.seeds
        and (not asked.scenarios or cell.scenario in {"plain", *asked.scenarios})
        and (not asked.workers or cell.scenario == "plain" or cell.workers in asked.workers)
    ]
    failed = run_all(due, data, asked.results, asked.jobs)
    print(page(list(read(asked.results).values()), written=asked.write))
    if failed:
        sys.exit(f"{failed} cells failed")


def read(path: Path) -> dict[Cell, dict[str, Any]]:
    """Return the cells of a file, without those of a task that was edited since, and a line that was cut off."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            content = json.loads(line)
            if content["task_sha256"] == tasks.digest(content["task"]):
                found[Cell(*(content[name] for name in Cell._fields))] = content
        except (ValueError, KeyError, FileNotFoundError):
            continue
    return found


def available(asked: Iterable[str], data: Path | None) -> list[str]:
    """Return the tasks whose framework and files are here."""
    kept = []
    for name in asked:
        try:
            tasks.make(name, 0, data)
        except (ImportError, tasks.NoData) as error:
            print(f"{name} is left out: {error or 'needs --data'}", file=sys.stderr)
        else:
            kept.append(name)
    return kept


def run_all(due: list[Cell], data: Path | None, results: Path, jobs: int) -> int:
    """Run cells in processes, append each to the file as it is done, and return how many failed."""
    failed, began_s = 0, time.monotonic()
    context = multiprocessing.get_context("spawn")
    results.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs, context) as pool, results.open("a") as file:
        running = {pool.submit(run, cell, data): cell for cell in due}
        for number, future in enumerate(as_completed(running), 1):
            cell = running[future]
            try:
                content = future.result()
            except Exception as error:  # noqa: BLE001  # a task's code
                failed += 1
                print(f"{'/'.join(map(str, cell))} failed: {error!r}", file=sys.stderr, flush=True)
                continue
            if content is not None:
                print(json.dumps(content), file=file, flush=True)
                passed_s = time.monotonic() - began_s
                line = f"{number}/{len(due)} {passed_s:.0f} s {'/'.join(map(str, cell))} {content['value']:.4f}"
                print(line, file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    main()
