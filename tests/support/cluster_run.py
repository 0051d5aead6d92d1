"""ClusterRun: `parashard run` in a process of its own, and a way to ask and kill whatever it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import ParashardError, RetryLater
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.security.credentials import Credentials
from support.command_run import CommandRun
from support.report_oracle import store_of, unsaved
from support.waiting import eventually

DEADLINE_S = 300.0  # a command that starts in a second takes minutes where twenty others run
eventually = partial(eventually, deadline_s=DEADLINE_S)
ENDLESS = 1_000_000  # epochs of the digits: over long after any test
TOLD_S = 5.0  # for a failure's own look at the job


class ClusterRun(CommandRun):
    """One `parashard run`, of whose coordinator a test asks how the job goes."""

    def __init__(self, run_dir: Path, arguments: list[str], cwd: Path) -> None:
        super().__init__(run_dir, ["run", *arguments], cwd)
        self.credentials: Credentials | None = None

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
            self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run has not ended within {deadline_s:.0f} s; seen last: {self.told()}")
        return self.output()

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

    def kill(self, role: str, label: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to one process, waiting until it is there."""
        pid = eventually(lambda: self.pids(role).get(label), f"{role} {label} runs", told=self.told)
        with suppress(ProcessLookupError):
            os.kill(pid, number)

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

    def wait_until_all_exited(self) -> None:
        """Wait until no process of the run is left."""
        eventually(lambda: not self.left_over(), "every process has noticed", told=self.left_over)


def _asked(client: CoordinatorClient) -> pb.GetStatusReply | None:
    try:
        return client.get_status()
    except RetryLater:  # a busy machine
        return None


def sets(**values: Any) -> list[str]:
    """Return `--set` arguments; "__" stands for the dot."""
    return [
        part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={json.dumps(value)}")
    ]
