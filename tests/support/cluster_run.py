"""ClusterRun: `parashard run` in a process of its own, and a way to find, ask and kill whatever it started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import ParashardError, RetryLater
from parashard.launch.local_cluster import MODULES
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.security.credentials import Credentials
from support.report_oracle import store_of, unsaved
from support.waiting import eventually

DEADLINE_S = 300.0  # a command that starts in a second takes minutes where twenty others run
eventually = partial(eventually, deadline_s=DEADLINE_S)
ENDLESS = 1_000_000  # epochs of the digits: over long after any test
TOLD_S = 5.0  # for a failure's own look at the job
ROOT = Path(__file__).resolve().parents[2]
DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []  # even if a test is killed


class ClusterRun:
    """One `parashard run` and its processes, found by the run directory in their command lines."""

    def __init__(self, run_dir: Path, arguments: list[str], cwd: Path) -> None:
        self.dir = run_dir
        self.credentials: Credentials | None = None
        command = [sys.executable, "-m", "parashard", "run", *arguments, "--run-dir", str(run_dir), "--json"]
        self._err = (run_dir.parent / f"{run_dir.name}.err").open("w+")
        self.process = subprocess.Popen(
            [*DIES_WITH_US, *command],
            stdout=subprocess.PIPE,
            stderr=self._err,
            text=True,
            cwd=cwd,
            start_new_session=True,
        )

    def report(self) -> dict[str, Any]:
        """Return the report of a job that ends well, with every step in the last manifest of every shard (P1)."""
        out = self.wait()
        assert self.process.returncode == 0, self.complaint()
        report = json.loads(out.splitlines()[-1])
        assert unsaved(store_of(self.dir), report) == []
        return report

    def wait(self, deadline_s: float = DEADLINE_S) -> str:
        """Wait for the end and return standard output."""
        try:
            return self.process.communicate(timeout=deadline_s)[0]
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run has not ended within {deadline_s:.0f} s; seen last: {self.told()}")

    def told(self) -> str:
        """Return what can be said of the run when something has not come, for a failure."""
        try:
            status = self.status(deadline_s=TOLD_S)
            for shard in status.shards:
                shard.record.ClearField("staleness")
            how = str(status)
        except (ParashardError, pytest.fail.Exception) as error:
            how = str(error)
        return f"{how}\nprocesses: {self.left_over()}\nstandard error: {self.complaint()}"

    def complaint(self) -> str:
        """Return what went to standard error."""
        self._err.flush()
        self._err.seek(0)
        return self._err.read()

    def pids(self, role: str) -> dict[str, int]:
        """Return the process ids of a role ("worker", "shard", "coordinator") by name or index."""
        found = {}
        for pid, words in _command_lines():
            if str(self.dir) in " ".join(words) and words[1:4] == ["-P", "-m", MODULES[role]]:
                label = next((words[i + 1] for i, w in enumerate(words) if w in ("--name", "--index")), role)
                found[label] = pid
        return found

    def kill(self, role: str, label: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to one process, waiting until it is there."""
        pid = eventually(lambda: self.pids(role).get(label), f"{role} {label} runs", told=self.told)
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def left_over(self) -> list[list[str]]:
        """Return the command lines of processes of this run, the command line tool apart."""
        return [
            words for pid, words in _command_lines() if str(self.dir) in " ".join(words) and pid != self.process.pid
        ]

    def client(self, deadline_s: float = DEADLINE_S) -> CoordinatorClient:
        """Return a client of the run's coordinator, once it serves."""
        address = find_coordinator(str(self.dir), wait_s=deadline_s)
        return CoordinatorClient(address, where=str(self.dir), credentials=self.credentials)

    def status(self, deadline_s: float = DEADLINE_S) -> pb.GetStatusReply:
        """Return how the job goes."""
        client = self.client(deadline_s)
        try:
            return eventually(lambda: _asked(client), "the coordinator answers", deadline_s=deadline_s)
        finally:
            client.close()

    def until(self, condition: Callable[[pb.GetStatusReply], Any], what: str) -> pb.GetStatusReply:
        """Wait until the status of the job, which must not be over by then, is so; return it."""
        eventually((self.dir / "coordinator.json").exists, "the coordinator serves", told=self.complaint)
        client = self.client()

        def met() -> pb.GetStatusReply | None:
            assert self.process.poll() is None, f"the run has ended before {what}: {self.complaint()}"
            status = _asked(client)
            return status if status is not None and condition(status) else None

        try:
            return eventually(met, what, told=self.told)
        finally:
            client.close()

    def wait_for_steps(self, steps: int) -> None:
        """Wait until so many steps are complete; the job must not be over by then."""
        self.until(lambda status: status.steps_complete >= steps, f"{steps} steps are complete")

    def wait_for_event(self, text: str) -> None:
        """Wait until one of the coordinator's latest events has a text in it."""
        self.until(lambda status: any(text in event for event in status.events), f"event: {text}")

    def wait_for_nobody(self) -> None:
        """Wait until no process of the run is left."""
        eventually(lambda: not self.left_over(), "every process has noticed", told=self.left_over)

    def clean_up(self) -> None:
        """Kill whatever is left."""
        self.process.kill()
        self.process.wait()
        for pid, words in _command_lines():
            if str(self.dir) in " ".join(words):
                with suppress(ProcessLookupError):  # it may have noticed by itself that its parent is gone
                    os.kill(pid, signal.SIGKILL)
        self._err.close()


def _asked(client: CoordinatorClient) -> pb.GetStatusReply | None:
    try:
        return client.get_status()
    except RetryLater:  # a busy machine
        return None


def _command_lines() -> list[tuple[int, list[str]]]:
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            lines.append((int(entry.name), words))
    return lines


def sets(**values: Any) -> list[str]:
    """Return `--set` arguments; "__" stands for the dot."""
    return [
        part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={json.dumps(value)}")
    ]
