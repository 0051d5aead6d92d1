"""ClusterRun: `parashard run` in a process of its own, and a way to find, ask and kill whatever it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from parashard.coordinator_client import CoordinatorClient, find_coordinator
from parashard.errors import RetryLater
from parashard.security.credentials import Credentials
from protos import coordinator_pb2 as pb

DEADLINE_S = 60.0
POLL_S = 0.02
ROOT = Path(__file__).resolve().parent.parent.parent


def eventually(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Return the first true value of a condition that another process makes true; fail after the deadline."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        value = condition()
        if value:
            return value
        time.sleep(POLL_S)
    pytest.fail(f"not within {deadline_s} s: {what}")


class ClusterRun:
    """One `parashard run` and its processes, found by the run directory in their command lines."""

    def __init__(self, run_dir: Path, arguments: list[str], cwd: Path) -> None:
        self.dir = run_dir
        self.credentials: Credentials | None = None
        command = [sys.executable, "-m", "parashard", "run", *arguments, "--run-dir", str(run_dir), "--json"]
        self._err = (run_dir.parent / f"{run_dir.name}.err").open("w+")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._err, text=True, cwd=cwd, start_new_session=True
        )

    def report(self) -> dict[str, Any]:
        """Wait for the end and return the report; the job must have succeeded."""
        out = self.wait()
        assert self.process.returncode == 0, self.complaint()
        return json.loads(out.splitlines()[-1])

    def wait(self, deadline_s: float = DEADLINE_S) -> str:
        """Wait for the end and return standard output."""
        return self.process.communicate(timeout=deadline_s)[0]

    def complaint(self) -> str:
        """Return what went to standard error."""
        self._err.flush()
        self._err.seek(0)
        return self._err.read()

    def pids(self, module: str) -> dict[str, int]:
        """Return the process ids of a role ("worker", "ps_server", "coordinator") by name or index."""
        found = {}
        for pid, words in _command_lines():
            if str(self.dir) in " ".join(words) and words[1:3] == ["-m", module]:
                label = next((words[i + 1] for i, w in enumerate(words) if w in ("--name", "--index")), module)
                found[label] = pid
        return found

    def kill(self, module: str, label: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to one process, waiting until it is there."""
        pid = eventually(lambda: self.pids(module).get(label), f"{module} {label} runs")
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def left_over(self) -> list[list[str]]:
        """Return the command lines of processes of this run, the command line tool apart."""
        return [
            words for pid, words in _command_lines() if str(self.dir) in " ".join(words) and pid != self.process.pid
        ]

    def client(self) -> CoordinatorClient:
        """Return a client of the run's coordinator, once it serves."""
        address = find_coordinator(str(self.dir), wait_s=DEADLINE_S)
        return CoordinatorClient(address, where=str(self.dir), credentials=self.credentials)

    def status(self) -> pb.GetStatusReply:
        """Return how the job goes."""
        client = self.client()
        try:
            return eventually(lambda: self._asked(client), "the coordinator answers")
        finally:
            client.close()

    def wait_for_steps(self, steps: int) -> None:
        """Wait until so many steps are complete."""
        eventually((self.dir / "coordinator.json").exists, "the coordinator serves")
        client = self.client()
        try:
            eventually(lambda: self._asked(client, steps), f"{steps} steps are complete")
        finally:
            client.close()

    def _asked(self, client: CoordinatorClient, steps: int = 0) -> pb.GetStatusReply | None:
        try:
            status = client.get_status()
        except RetryLater:  # a busy machine
            return None
        return status if status.steps_complete >= steps else None

    def clean_up(self) -> None:
        """Kill whatever is left."""
        self.process.kill()
        self.process.wait()
        for pid, words in _command_lines():
            if str(self.dir) in " ".join(words):
                with suppress(ProcessLookupError):  # it may have noticed by itself that its parent is gone
                    os.kill(pid, signal.SIGKILL)
        self._err.close()


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
