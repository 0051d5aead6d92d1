"""CommandRun: a command of `parashard` that runs a job, in a process of its own, and whatever it started.

Owns the processes, found by the run directory in their command lines, and what the command prints. Knows no verdict:
`cluster_run.ClusterRun` asks the running job, `tests/chaos/job_run.py` judges what came of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from parashard.launch.local_cluster import MODULES

ROOT = Path(__file__).resolve().parents[2]
DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []  # even if a test is killed


class CommandRun:
    """A command and its processes; what it prints is kept beside the run directory.

    Parameters
    ----------
    run_dir : Path
        The run's own directory, which another command may have used.
    command : sequence of str
        Such as "run", the job file and flags.
    cwd : Path
        Where it runs.
    environ : mapping, optional
        Added to the environment.
    """

    def __init__(
        self, run_dir: Path, command: Sequence[str], cwd: Path = ROOT, environ: Mapping[str, str] | None = None
    ) -> None:
        self.dir = run_dir
        self._out, self._err = _beside(run_dir, ".out"), _beside(run_dir, ".err")
        words = [sys.executable, "-m", "parashard", *command, "--run-dir", str(run_dir), "--json"]
        self.process = subprocess.Popen(
            [*DIES_WITH_US, *words],
            stdout=self._out,
            stderr=self._err,
            cwd=cwd,
            start_new_session=True,
            env={**os.environ, **(environ or {})},
        )

    def output(self) -> str:
        """Return what went to standard output."""
        return Path(self._out.name).read_text()

    def complaint(self) -> str:
        """Return what went to standard error."""
        return Path(self._err.name).read_text()

    def pids(self, role: str) -> dict[str, int]:
        """Return the process ids of a role ("worker", "shard", "coordinator") by name or index."""
        found = {}
        for pid, words in self._processes():
            if words[1:4] == ["-P", "-m", MODULES[role]]:
                label = next((words[i + 1] for i, w in enumerate(words) if w in ("--name", "--index")), role)
                found[label] = pid
        return found

    def left_over(self) -> list[list[str]]:
        """Return the command lines of processes of this run, the command apart."""
        return [words for _, words in self._processes()]

    def clean_up(self) -> None:
        """Kill whatever is left."""
        self.process.kill()
        self.process.wait()
        for pid, _ in self._processes():
            with suppress(ProcessLookupError):  # it may have noticed by itself that its parent is gone
                os.kill(pid, signal.SIGKILL)
        self._out.close()
        self._err.close()

    def _processes(self) -> list[tuple[int, list[str]]]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                with suppress(OSError):
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    if str(self.dir) in " ".join(words):
                        found.append((int(entry.name), words))
        return found


def _beside(run_dir: Path, suffix: str) -> IO[bytes]:
    # A name of its own: another command may run in the same directory, before this one has ended.
    return tempfile.NamedTemporaryFile(prefix=f"{run_dir.name}-", suffix=suffix, dir=run_dir.parent, delete=False)
