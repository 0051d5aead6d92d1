"""The cost of a PyTorch script's workers: seconds until the first step, from a death to the next step, and memory.

Runs `examples/digits_torch.py` as a user does, follows it by its run folder, and kills its workers. Called by
`benchmarks.recovery`.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.tables import median_and_worst, table
from parashard._proto import coordinator_pb2 as pb
from parashard.errors import JobFailed, RetryLater, StaleRequest
from parashard.launch.programs import processes_of, send
from parashard.protocol.coordinator_client import CoordinatorClient, coordinator_in

SCRIPT = Path(__file__).parent.parent / "examples" / "digits_torch.py"
WORKERS_MANY = 8
WAIT_S = 120.0
POLL_S = 0.005
MIB = 1 << 20

_Value = TypeVar("_Value")


class ScriptJob:
    """A script that trains for ever, seen from outside."""

    def __init__(self, folder: Path, workers: int) -> None:
        command = [sys.executable, str(SCRIPT), "--workers", str(workers), "--epochs", "1000000"]
        self._runs = folder / "runs"
        self.began_s = time.monotonic()
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._client: CoordinatorClient | None = None

    @property
    def run_dir(self) -> Path | None:
        """Its run folder, once there is one."""
        return next(iter(self._runs.glob("*")), None) if self._runs.is_dir() else None

    def status(self) -> pb.GetStatusReply | None:
        """Return the job's status; None without an answer."""
        run_dir = self.run_dir
        if self._client is None and run_dir is not None and (address := coordinator_in(run_dir).get("address")):
            self._client = CoordinatorClient(address, where=str(run_dir))
        try:
            return None if self._client is None else self._client.get_status()
        except (RetryLater, StaleRequest):
            return None

    def worker(self, name: str) -> pb.WorkerStatus | None:
        """Return a worker that has completed a step; None: there is none of that name."""
        status = self.status()
        return (
            next((w for w in status.workers if w.name == name and w.live and w.steps_complete), None)
            if status
            else None
        )

    def eventually(self, look: Callable[[], _Value | None], what: str) -> _Value:
        """Poll every 5 ms until `look` returns a value, and return it."""
        until_s = time.monotonic() + WAIT_S
        while not (seen := look()):
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise JobFailed(f"the script ended, or {WAIT_S:.0f} s have passed, and there was not: {what}")
            time.sleep(POLL_S)
        return seen

    def first_step_s(self) -> float:
        """Wait for the first step, and return the seconds from the script's start to it."""

        def complete() -> bool:
            status = self.status()
            return status is not None and status.steps_complete > 0

        self.eventually(complete, "a step")
        return time.monotonic() - self.began_s

    def pids(self) -> dict[str, int]:
        """Return the process ids of its workers."""
        assert self.run_dir is not None
        return {name: pid for name, pid in processes_of(self.run_dir).items() if name.startswith("worker")}


@contextmanager
def running(workers: int) -> Iterator[ScriptJob]:
    """Run the script in a folder of its own, and end it."""
    with tempfile.TemporaryDirectory() as folder:
        job = ScriptJob(Path(folder), workers)
        try:
            yield job
        finally:
            job.process.send_signal(signal.SIGINT)
            job.process.wait()


def measured(deaths: int) -> dict[str, Any]:
    """Run the script by two workers and kill them in turns; run it by eight and add up their memory."""
    with running(2) as job:
        first_s = job.first_step_s()
        deaths_s = [worker_dies(job, f"worker-{turn % 2}") for turn in range(deaths)]
    with running(WORKERS_MANY) as job:
        job.first_step_s()
        names = [f"worker-{index}" for index in range(WORKERS_MANY)]
        for name in names:
            job.eventually(partial(job.worker, name), f"a step of {name}")
        memory_mib = sum(pss_bytes(pid) for pid in job.pids().values()) / MIB
    return {"first_step_s": first_s, "death_to_step_s": deaths_s, "workers_pss_mib": memory_mib}


def worker_dies(job: ScriptJob, name: str) -> float:
    """Kill a worker, and return the seconds until its next process has completed a step."""
    old = job.eventually(lambda: job.worker(name), f"a step of {name}").incarnation
    assert job.run_dir is not None
    send(job.run_dir, name, signal.SIGKILL)
    killed_s = time.monotonic()

    def again() -> bool:
        now = job.worker(name)
        return now is not None and now.incarnation > old

    job.eventually(again, f"a step of the next {name}")
    return time.monotonic() - killed_s


def pss_bytes(pid: int) -> int:
    """Return a process's memory, with its share of pages that others also use."""
    found = re.search(r"^Pss:\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    assert found is not None
    return int(found[1]) << 10


def section(found: dict[str, Any]) -> str:
    """Return the table."""
    deaths = found["death_to_step_s"]
    rows = [
        ["from the script's start to the first step, 2 workers", f"{found['first_step_s']:.2f} s", ""],
        [f"from a worker's death to its next step, of {len(deaths)}", *median_and_worst(deaths)],
        [f"memory of {WORKERS_MANY} workers (PSS)", f"{found['workers_pss_mib']:,.0f} MiB", ""],
    ]
    return table(["`examples/digits_torch.py`", "median", "worst"], rows)
