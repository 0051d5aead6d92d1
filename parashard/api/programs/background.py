"""BackgroundRun: runs a job in a background thread of this program."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from parashard.api.trained_state import TrainedRows
from parashard.client.proto_conversion import plan_from, view_from
from parashard.client.shard_client import ShardClient
from parashard.display.live import JobView
from parashard.errors import ConfigurationError, JobFailed, ParashardError
from parashard.figures import counted
from parashard.job.load import job_from_toml
from parashard.launch.programs import Program, write_program
from parashard.launch.run import Outcome, run_job
from parashard.launch.run_control import RunControl
from parashard.launch.run_folders import discard_unbegun, locked_run
from parashard.launch.runs import Run
from parashard.plan.embedding import EmbeddingTable, Keys
from parashard.plan.variables import Float32s, as_imported
from parashard.process.arguments import checked_timeout_s
from parashard.process.run_files import WEIGHTS_FILE, short_path
from parashard.process.shell import ExitCode
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.store.arrays import read_arrays
from parashard.transports.choosing import connect_by

QUIET_S, SAY_S = 5.0, 60.0  # before the first line about waiting for the end, and between lines
AGAIN_S = 0.05  # between pulls while a restarted shard is catching up
STOP_S = 60.0
"""Time for a stopped run to end; its shards save their state."""


class _NotDone(TimeoutError):
    """A run was not done in time."""

    def __init__(self, late: str, then: str) -> None:
        super().__init__(f"{late}; {then}")
        self.late = late


def checked_variables(values: Any) -> dict[str, Any]:
    """Return the initial variables of a program's job; refuse anything but a mapping."""
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f"variables is a mapping of names to arrays to start from, found {type(values).__name__}"
        )
    return dict(values)


class BackgroundRun:
    """A declared job that runs in the background of its program."""

    def __init__(self, run: Run, control: RunControl, program: Program) -> None:
        self.run_dir = run.folder
        self._begins = run
        self._control = control
        self._program = program
        self._until_end = ExitStack()  # holds the folder's lock until the run ends
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="parashard-run", daemon=True)

    def start(self) -> None:
        """Start the run; return once its coordinator has accepted the job. A refused job leaves no folder."""
        with ExitStack() as until_end:
            until_end.enter_context(locked_run(self.run_dir))
            write_program(self.run_dir, self._program)
            self._until_end = until_end.pop_all()
        atexit.register(self.stop)
        self._thread.start()
        start_s = self._begins.job.cluster.start_s * 2
        if not self._control.wait_for(lambda: self._control.accepted, start_s):
            self.stop()
            self.check()
            raise JobFailed(f"the job did not start within {start_s:.0f} s; {self.run_dir} has its logs")

    def check(self) -> None:
        """Raise the run's error if it ended before it was done."""
        if not self._control.ended:
            return
        if self._error is not None:
            raise self._error
        outcome = self._outcome
        assert outcome is not None
        if outcome.exit_code != ExitCode.DONE:
            raise (ConfigurationError if outcome.is_refused else JobFailed)(outcome.reason)

    def finish(self, timeout_s: float, waits_for: str = "") -> dict[str, Any]:
        """Return the report once the job is done, reporting progress on stderr; a late job keeps running."""
        allowed_s = checked_timeout_s(timeout_s)
        if not self._ended_within(allowed_s, waits_for):
            raise _NotDone(
                f"after {allowed_s:g} s the job is not done",
                "it goes on until the program ends, and its shards save their state then: call this again to wait on, "
                f"or stop(); `parashard status {self.run_dir}` says what it waits for",
            )
        atexit.unregister(self.stop)
        self._thread.join()
        self.check()
        assert self._outcome is not None
        return self._outcome.report

    def _ended_within(self, allowed_s: float, waits_for: str) -> bool:
        """Wait for the end, at most `allowed_s`; report progress, since silence would look like a hang."""
        left_s, pause_s = allowed_s, QUIET_S
        while not self._control.wait_for(lambda: self._control.ended, min(pause_s, left_s)):
            left_s -= min(pause_s, left_s)
            if left_s <= 0:
                return False
            if waits_for:
                done = counted(len(self._control.complete), "step")
                sys.stderr.write(f"parashard: {done} of {short_path(self.run_dir)} are in, not all: {waits_for}\n")
            pause_s = SAY_S
        return True

    def stop(self) -> None:
        """Interrupt the run: shards save their state, and all its processes end."""
        atexit.unregister(self.stop)
        self._control.stop()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def weights(self, steps: int = 0, timeout_s: float = 0.0) -> dict[str, Float32s]:
        """Return the final weights, or the current ones once each shard has applied `steps` (not in rounds)."""
        if self._control.ended:
            self.check()
            return as_imported(read_arrays(self.run_dir / WEIGHTS_FILE))
        credentials = self._begins.credentials
        where = str(self.run_dir)
        with ExitStack() as until_read:
            coordinator = CoordinatorClient(find_coordinator(where), where=where, credentials=credentials)
            until_read.callback(coordinator.close)
            reply = coordinator.get_job()
            job = job_from_toml(reply.job_toml)
            coordinator.retry_budget_s = job.cluster.retry_budget_s
            client = ShardClient(
                reply.run_id,
                reply.job_digest,
                plan_from(reply.plan),
                "reader",
                retry_budget_s=job.cluster.retry_budget_s,
                look=lambda: view_from(coordinator.get_view(reply.run_id)),
                connect=connect_by(job.cluster.transport, credentials),
            )
            until_read.callback(client.close)
            client.use(coordinator.retry(lambda: view_from(coordinator.get_view(reply.run_id))))
            deadline_s = time.monotonic() + timeout_s
            while min((pulled := client.pull()).versions) < steps:
                self.check()
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"after {timeout_s:g} s a shard that was killed has not all steps again")
                pulled.release()
                time.sleep(AGAIN_S)
            return {name: np.array(values) for name, values in pulled.variables.items()}

    def table(self, name: str, tables: Mapping[str, EmbeddingTable]) -> tuple[Keys, Float32s]:
        """Return a table's keys, ascending, and their rows, from the last checkpoint; raise if the job is not done."""
        if not self._control.ended:
            raise ConfigurationError(f"table {name!r}: rows are at hand once the job is done, and it goes on")
        self.check()
        return TrainedRows(tables, self._begins.job.job.seed, self.run_dir).whole(name)

    def _run(self) -> None:
        try:
            self._outcome = run_job(self._begins, JobView(), control=self._control)
        except BaseException as error:  # noqa: BLE001  # the program's thread raises it
            self._error = error
        finally:
            self._until_end.close()
            refused = self._error is not None or (self._outcome is not None and self._outcome.is_refused)
            if refused and not self._begins.resume:
                with suppress(OSError, ParashardError):
                    discard_unbegun(self.run_dir, keep=False)
            self._control.tell(ended=True)


def within(run: BackgroundRun, leave: Callable[[], object], error: BaseException | None) -> None:
    """End a `with` block: call `leave` if its body succeeded; stop the run if either fails."""
    if error is not None:
        run.stop()
        return
    try:
        leave()
    except _NotDone as not_done:
        run.stop()
        raise TimeoutError(
            f"{not_done.late}; the end of the `with` has stopped it, and {run.run_dir} has what its shards saved: call "
            "close or finish with a longer timeout_s in the `with`"
        ) from None
    except BaseException:
        run.stop()
        raise
