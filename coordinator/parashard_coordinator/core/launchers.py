"""Launchers: which processes are to be started and stopped. One interface, pure; `now_s` is an argument.

`LocalLauncher` is the coordinator's half of `parashard run`: the CLI is the parent of all processes, tells of exits and
does what is asked. `ExternalLauncher` leaves it to what started the processes (compose, a person).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from parashard.process.backoff import BACKOFF_MAX_S, backoff_s


class Restarts:
    """Back-off and budget of the processes of one job, by name.

    Parameters
    ----------
    backoff_s : float
        Pause after the second exit in a row.
    budget : int
        Exits in a row, without a completed step in between, after which the job is given up.
    """

    def __init__(self, backoff_s: float, budget: int) -> None:
        self._backoff_s = backoff_s
        self._budget = budget
        self._exits_in_a_row: dict[str, int] = {}
        self._not_before_s: dict[str, float] = {}

    def step_completed(self) -> None:
        """Reset back-off and budget of every process."""
        if self._exits_in_a_row:
            self._exits_in_a_row.clear()

    def exited(self, process: str, now_s: float, at_least_s: float = 0.0) -> bool:
        """Record an exit, with a pause of at least so long; return False when the budget is spent."""
        count = self._exits_in_a_row[process] = self._exits_in_a_row.get(process, 0) + 1
        self._not_before_s[process] = now_s + max(at_least_s, backoff_s(self._backoff_s, count))
        return count <= self._budget

    def pause(self, process: str, now_s: float, pause_s: float) -> None:
        """Record an exit that does not count, with a pause."""
        self._not_before_s[process] = now_s + pause_s

    def may_start(self, process: str, now_s: float) -> bool:
        """Tell whether a process that does not run may be started now."""
        return now_s >= self._not_before_s.get(process, now_s)


FAILED = 1  # exit codes, as in `parashard.process.shell`
CONFIGURATION = 2
IO_ERROR = 74


@dataclass(frozen=True, order=True)
class ProcessName:
    """A process of the cluster: role "shard" or "worker", and its index."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


class Exit(NamedTuple):
    """A process that ended, and why in words; `number` rises with every exit that its launcher has seen."""

    process: ProcessName
    exit_code: int
    reason: str
    number: int = 0


class Orders(NamedTuple):
    """What the parent of the processes should do now."""

    start: tuple[ProcessName, ...] = ()
    stop: tuple[ProcessName, ...] = ()
    kill: tuple[ProcessName, ...] = ()


class Launcher(Protocol):
    """Decides which processes should run."""

    def exited(self, exit_: Exit, now_s: float, *, was_up: bool) -> str | None:
        """Take note of an exit, of a process that has been in the job or never was; return why the job must stop."""

    def orders(self, running: Sequence[ProcessName], workers_wanted: int, now_s: float) -> Orders:
        """Return what to start and stop, given what runs."""

    def step_completed(self) -> None:
        """Take note of progress."""


class LocalLauncher:
    """Keeps every shard and the wanted number of workers running on this machine.

    Parameters
    ----------
    shards : int
        Number of shards.
    restarts : Restarts
        When a process is started again: a shard restores its newest checkpoint, a worker joins anew.
    """

    def __init__(self, shards: int, restarts: Restarts) -> None:
        self._shards = [ProcessName("shard", i) for i in range(shards)]
        self._restarts = restarts

    def exited(self, exit_: Exit, now_s: float, *, was_up: bool) -> str | None:
        """A process that ended is started again, but for one that a wrong configuration kept from ever being up.

        What has been up is configured rightly. If it does not come back for its configuration, something else has
        changed, such as a certificate that expired: the others go on, and it is tried now and then, within the budget.
        """
        if exit_.exit_code == IO_ERROR:  # it waits for its disk, and so does the job
            self._restarts.pause(str(exit_.process), now_s, BACKOFF_MAX_S)
            return None
        misconfigured = exit_.exit_code == CONFIGURATION
        if misconfigured and not was_up:
            return f"{exit_.process} ended: {exit_.reason}"
        pause_s = BACKOFF_MAX_S if misconfigured else 0.0
        if not self._restarts.exited(str(exit_.process), now_s, pause_s):
            return f"{exit_.process} ended too often without a step completed in between, the last time: {exit_.reason}"
        return None

    def orders(self, running: Sequence[ProcessName], workers_wanted: int, now_s: float) -> Orders:
        """Start what is missing and may start; stop workers over the wanted number, the highest first."""
        alive = set(running)
        wanted = self._shards + [ProcessName("worker", i) for i in range(workers_wanted)]
        missing = [p for p in wanted if p not in alive and self._restarts.may_start(str(p), now_s)]
        excess = sorted((p for p in alive if p.role == "worker" and p.index >= workers_wanted), reverse=True)
        return Orders(tuple(missing), tuple(excess))

    def step_completed(self) -> None:
        """Reset the restart budget."""
        self._restarts.step_completed()


class ExternalLauncher:
    """Starts and stops nothing."""

    def exited(self, exit_: Exit, now_s: float, *, was_up: bool) -> str | None:
        """Exits are not reported to this launcher; workers that vanish lose their leases by time."""
        return None

    def orders(self, running: Sequence[ProcessName], workers_wanted: int, now_s: float) -> Orders:
        """Nothing."""
        return Orders()

    def step_completed(self) -> None:
        """Nothing."""
