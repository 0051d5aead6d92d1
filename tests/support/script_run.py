"""ScriptRun: a Python script that trains by `parashard.Trainer`, in a process of its own, and whatever it started.

`LEDGER` is such a script: it counts each example of each epoch, so that a step that is lost or in twice is seen.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from parashard.errors import ConfigurationError, RetryLater
from parashard.launch.programs import processes_of, send
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.security.credentials import Credentials
from support.cluster_run import DEADLINE_S, eventually
from support.command_run import DIES_WITH_US

LEDGER = """
import json, os, sys, time
from pathlib import Path
import numpy as np
import parashard as ps

EXAMPLES, EPOCHS, slow = 60, int(sys.argv[1]), Path("slow")

class Ledger:
    adds_losses = True

    def initial_variables(self):
        return {"counts": np.zeros(EXAMPLES, np.float32)}

    def loss_and_gradients(self, variables, batch, xp):
        end_s = time.monotonic() + 20  # a step before 30 may be reported only after this one
        while slow.exists() and batch.step >= 30 and time.monotonic() < end_s:
            time.sleep(0.05)
        gradient = np.zeros(EXAMPLES, np.float32)
        gradient[batch.inputs[:, 0]] = -1.0
        return 0.5, {"counts": gradient}

    def evaluate(self, variables, batch, xp):
        return {"loss": 0.0, "least": float(variables["counts"].min())}

strategy = ps.ParameterServerStrategy(shards=2, workers=2, consistency=sys.argv[2])
trainer = ps.Trainer(Ledger(), ps.SGD(1.0), strategy, settings={"checkpoint.every_s": 0.2, "consistency.reduce": "sum"})
data = np.arange(EXAMPLES)[:, None], np.zeros(EXAMPLES, np.float32)
"""
"""Takes the number of epochs and the consistency; what is to be done with `trainer` and `data` follows."""


class ScriptRun:
    """A script in a folder, with words for its command line."""

    def __init__(self, folder: Path, text: str, *words: str, flags: tuple[str, ...] = ()) -> None:
        self.folder = folder
        (folder / "train.py").write_text(text)
        self._out, self._err = (folder / "out").open("w+"), (folder / "err").open("w+")
        self.process = self._started(*flags, "train.py", *words)

    def _started(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*DIES_WITH_US, sys.executable, *words],
            cwd=self.folder,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def resume(self, *words: str) -> None:
        """Wait for the end, then start `parashard resume`."""
        self.process.wait(DEADLINE_S)
        self.process = self._started("-m", "parashard", "resume", *words)

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        return self.process.wait(DEADLINE_S)

    def output(self) -> str:
        """Return what went to standard output."""
        return (self.folder / "out").read_text()

    def complaint(self) -> str:
        """Return what went to standard error."""
        return (self.folder / "err").read_text()

    def runs(self) -> list[Path]:
        """Return the run folders, the oldest first."""
        return sorted(self.folder.glob("runs/*"))

    def processes(self) -> dict[str, int]:
        """Return the process ids of the newest run by name."""
        try:
            return processes_of(self.runs()[-1])
        except (ConfigurationError, IndexError):
            return {}

    def kill(self, name: str) -> None:
        """Kill a process of the newest run, waiting until it is there."""
        eventually(lambda: name in self.processes(), f"{name} runs", told=self.complaint)
        send(self.runs()[-1], name, signal.SIGKILL)

    def steps_complete(self, credentials: Credentials | None = None) -> int:
        """Return how many steps of the newest run every shard has; 0 while its coordinator is away."""
        if "coordinator" not in self.processes():
            return 0
        where = str(self.runs()[-1])
        client = CoordinatorClient(find_coordinator(where), where=where, credentials=credentials)
        try:
            return client.get_status().steps_complete
        except RetryLater:
            return 0
        finally:
            client.close()

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def clean_up(self) -> None:
        """Kill the script; what it started ends with it."""
        self.process.kill()
        self.process.wait()
        self._out.close()
        self._err.close()
