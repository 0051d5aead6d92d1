"""Two running jobs in turns of half a second: all processes of one are stopped while the other runs.

    python -m benchmarks.slices --beside TREE [--transports shm tcp] [--kib 64 65536] [--depth 0] [--write NAME]

A machine that others use is now fast, now slow; by turns this short it is as fast for both jobs (a model of 64 MiB has
turns of a second). The same tree twice differs by up to 4 %, where two whole runs differ by 30 %. TREE is another
checkout of parashard with a `.venv`, such as `git worktree add` and `make` give; the job is `ballast.toml` of the
races, which computes nothing. `duel` takes any two jobs. Needs a quiet machine: what else runs is charged to both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence, Set
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from benchmarks.tables import table, write
from benchmarks.training import clean_up_when_ended

ROOT = Path(__file__).resolve().parents[1]
SLICE_S = 0.5
DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []  # else it stays stopped for ever
SETTLED_STEPS = 50  # by then every process has its memory
SETTLING_S = 1.5
DEADLINE_S = 60.0  # of a start and of an answer
STEPS = re.compile(r"^\w+_steps_complete (\S+)$", re.MULTILINE)


class Pace(NamedTuple):
    """A job's progress in its turns."""

    steps: int
    seconds: float
    cpu_s: float

    @property
    def step_ms(self) -> float:
        """Time of a step."""
        return 1000 * self.seconds / self.steps

    @property
    def cpu_ms(self) -> float:
        """Processor time of a step, of all processes of the job."""
        return 1000 * self.cpu_s / self.steps


class Job(Protocol):
    """A job that takes turns."""

    def signalled(self, number: signal.Signals) -> None:
        """Send a signal to all of it."""

    def turn(self, seconds: float) -> None:
        """Let it run for this time."""

    def so_far(self) -> Pace:
        """Return its progress until now, and stop it."""


class Sliced:
    """A running job, all of whose processes stop and go on together.

    Parameters
    ----------
    run_dir : Path
        Folder of the run; its coordinator is asked for the steps.
    roots : sequence of int
        Ancestors of the job's processes; they take part if they are not in `before`.
    before : set of int, optional
        Processes that existed before the job was started.
    """

    def __init__(self, run_dir: Path, roots: Sequence[int], before: Set[int] = frozenset()) -> None:
        self._metrics = f"http://{json.loads((run_dir / 'coordinator.json').read_text())['http']}/metrics"
        began_s = time.monotonic()
        while self.steps() < SETTLED_STEPS:
            if time.monotonic() - began_s > DEADLINE_S:
                raise TimeoutError(f"{run_dir}: fewer than {SETTLED_STEPS} steps in {DEADLINE_S:.0f} s")
            time.sleep(0.1)
        time.sleep(SETTLING_S)
        self._pids = with_descendants(roots) - before
        self._seconds = 0.0

    def steps(self) -> int:
        """Return how many steps are complete."""
        with urllib.request.urlopen(self._metrics, timeout=DEADLINE_S) as answer:
            found = STEPS.search(answer.read().decode())
        return int(float(found[1])) if found else 0

    def signalled(self, number: signal.Signals) -> None:
        """Send a signal to every process that is left."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def turn(self, seconds: float) -> None:
        """Let the job run for this time."""
        began_s = time.monotonic()
        self.signalled(signal.SIGCONT)
        time.sleep(seconds)
        self.signalled(signal.SIGSTOP)
        self._seconds += time.monotonic() - began_s

    def so_far(self) -> Pace:
        """Return the job's progress until now, and stop it."""
        # Raises RuntimeError if one of its processes has ended: another one in its place would not have been stopped.
        if gone := self._pids - parents().keys():
            raise RuntimeError(f"processes of the job have ended: {gone}")
        self.signalled(signal.SIGCONT)
        steps = self.steps()
        self.signalled(signal.SIGSTOP)
        return Pace(steps, self._seconds, sum(map(_cpu_s, self._pids)))


def duel(jobs: Sequence[Job], rounds: int, slice_s: float = SLICE_S) -> list[Pace]:
    """Give each job `rounds` turns, and return its progress in them. Stops all jobs first, and leaves them stopped."""
    for job in jobs:
        job.signalled(signal.SIGSTOP)
    before = [job.so_far() for job in jobs]
    for number in range(rounds):
        for job in jobs if number % 2 == 0 else reversed(jobs):
            job.turn(slice_s)
    after = [job.so_far() for job in jobs]
    return [
        Pace(late.steps - early.steps, late.seconds - early.seconds, late.cpu_s - early.cpu_s)
        for late, early in zip(after, before, strict=True)
    ]


def parents() -> dict[int, int]:
    """Return the parent of each process of this machine."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):
            found[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def with_descendants(roots: Sequence[int]) -> set[int]:
    """Return some processes and their descendants."""
    found, parent = set(roots), parents()
    while more := {pid for pid, of in parent.items() if of in found} - found:
        found |= more
    return found


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, except those that have ended."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


class Ballast:
    """The job that computes nothing, run by a tree's own `parashard` until this context ends."""

    def __init__(self, tree: Path, folder: Path, settings: Sequence[str]) -> None:
        run = folder / "run"
        races = tree / "benchmarks" / "races"
        words = [
            *DIES_WITH_US,
            str(tree / ".venv/bin/parashard"),
            "run",
            str(races / "ballast.toml"),
            "--run-dir",
            str(run),
            "--json",
        ]
        words += [word for setting in settings for word in ("--set", setting)]
        with (folder / "err").open("w") as err:
            self._process = subprocess.Popen(
                words,
                cwd=tree,
                env={**os.environ, "PYTHONPATH": f"{races}:{tree}"},
                stdout=subprocess.DEVNULL,
                stderr=err,
                start_new_session=True,
            )
        self.sliced: Sliced | None = None
        try:
            began_s = time.monotonic()
            while not (run / "coordinator.json").exists():
                if self._process.poll() is not None or time.monotonic() - began_s > DEADLINE_S:
                    raise RuntimeError(f"{tree} has not begun: {(folder / 'err').read_text()}")
                time.sleep(0.1)
            self.sliced = Sliced(run, [self._process.pid])
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.sliced is not None:
            self.sliced.signalled(signal.SIGCONT)
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children end with it
            self._process.wait()


def compared(trees: Sequence[Path], settings: Sequence[str], rounds: int, slice_s: float) -> list[Pace]:
    """Run the job of each tree in turns, and return their progress."""
    with ExitStack() as stack:
        jobs = []
        for tree in trees:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="parashard-slices-"))
            ballast = stack.enter_context(Ballast(tree, Path(folder), settings))
            assert ballast.sliced is not None
            ballast.sliced.signalled(signal.SIGSTOP)
            jobs.append(ballast.sliced)
        return duel(jobs, rounds, slice_s)


def main() -> None:
    """Compare this tree with another one, print a row for each case, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, required=True, metavar="TREE", help="another checkout, with a .venv")
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp", "grpc"])
    parser.add_argument(
        "--kib", nargs="+", type=int, default=[64, 1024, 4096, 65536], help="sizes of the model (default: %(default)s)"
    )
    parser.add_argument("--depth", type=int, default=0, help="cluster.pipeline_depth of both (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=16, help="turns of each job (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each case (default: %(default)s)")
    parser.add_argument("--write", metavar="NAME", help="write NAME.json and NAME.md in benchmarks/results")
    arguments = parser.parse_args()
    clean_up_when_ended()
    trees = (arguments.beside.absolute(), ROOT)
    lines, figures = [], []
    for transport in arguments.transports:
        for kib in arguments.kib:
            settings = [f'cluster.transport="{transport}"', f"cluster.pipeline_depth={arguments.depth}"]
            settings += [f"model.elements={kib * 256}", "data.examples=100000000"]
            slice_s = max(SLICE_S, kib / 65536)  # several steps in each turn
            runs = [compared(trees, settings, arguments.rounds, slice_s) for _ in range(arguments.runs)]
            there, here = ([run[i] for run in runs] for i in (0, 1))
            ratios = [one.step_ms / other.step_ms for one, other in zip(there, here, strict=True)]
            middle = [statistics.median(ratios)]
            middle += [statistics.median(pace.step_ms for pace in paces) for paces in (there, here)]
            middle += [statistics.median(pace.cpu_ms for pace in paces) for paces in (there, here)]
            row = [transport, f"{kib:,} KiB", f"{middle[0]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
            lines.append([*row, *(f"{value:.2f}" for value in middle[1:])])
            print(*lines[-1], flush=True)
            figures.append({"transport": transport, "kib": kib, "ratios": ratios, "runs": runs})
    header = ["transport", "model", "speed over the other tree's", "ms a step there", "here", "CPU ms there", "here"]
    text = table(header, lines)
    print(f"\n{text}")
    if arguments.write:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=trees[0], stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()
        heading = f"A step that computes nothing, beside commit {commit}, pipeline_depth {arguments.depth}"
        write(arguments.write, {heading: text}, {"other": commit, "cases": figures})


if __name__ == "__main__":
    main()
