"""Supervision of the local launcher's processes: exits, silence and restarts.

Pure: `now_s` is an argument. Counts restarts, hears each exit once, and asks for the end of a process that runs and
gives no sign of life. Knows neither steps nor leases; called by `parashard_coordinator.core.core`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from parashard_coordinator.core.launchers import CONFIGURATION, Exit, Launcher, Orders, ProcessName
from parashard_coordinator.core.pod_ledger import PodEnd


class Supervision:
    """The launcher's side of a job.

    Parameters
    ----------
    launcher : Launcher
        Says which processes are to run.
    silence_s : float
        A process that gives no sign of life for longer is to be killed.
    lease_ttl_s : float
        A worker may be silent for as long as its leases last: it promises no more than to renew them.
    start_s : float
        A process that was started at this coordinator's wish and has not been heard since is killed after so long.
    """

    def __init__(self, launcher: Launcher, silence_s: float, lease_ttl_s: float, start_s: float) -> None:
        self.worker_restarts = 0
        self.worker_exits = 0
        self.pod_ends: Counter[tuple[str, str]] = Counter()
        """By role and reason, as the launcher `kubernetes` saw them."""
        self.pod_watch_errors = 0
        self._launcher = launcher
        self._silence_s = {"shard": silence_s, "worker": max(silence_s, lease_ttl_s)}
        self._start_s = start_s
        self._started_s: dict[ProcessName, float] = {}
        self._heard = 0
        self.ended_workers: set[str] = set()
        """Workers whose end is counted, and whose next process has not joined yet."""

    def new_exits(self, exits: Iterable[Exit]) -> list[Exit]:
        """Return the exits that are new: each is told until it is heard, and counts once."""
        new = [exit_ for exit_ in exits if exit_.number > self._heard]
        self._heard = max((self._heard, *(exit_.number for exit_ in new)))
        return new

    def ended(
        self, exit_: Exit, workers_wanted: int, now_s: float, *, was_up: bool, accounted: bool = False
    ) -> str | None:
        """Take note of an exit, of a process that has been in the job or never was; return why the job must stop.

        One that is accounted for, as a failed attempt at a step, counts there and not against the launcher's budget.
        """
        is_worker = exit_.process.role == "worker"
        self.worker_exits += is_worker
        fatal = None if accounted else self._launcher.exited(exit_, now_s, was_up=was_up)
        if is_worker and not fatal:
            self.ended_workers.add(str(exit_.process))
            self.worker_restarts += exit_.process.index < workers_wanted  # else it was scaled down
        return fatal

    def pod_ended(self, end: PodEnd) -> str | None:
        """Take note of a pod's end, which Kubernetes makes up for; return why the job must stop, or None."""
        self.pod_ends[end.pod.role, end.reason] += 1
        return str(end) if end.exit_code == CONFIGURATION else None

    def joined(self, worker: str, *, restarted: bool) -> None:
        """Count a worker that was restarted, unless its end was counted already."""
        if worker in self.ended_workers:
            self.ended_workers.discard(worker)
        elif restarted:
            self.worker_restarts += 1

    def step_completed(self) -> None:
        """Take note of progress: back-off and budgets begin anew."""
        self._launcher.step_completed()

    def silence_s(self, process: ProcessName, seen_s: float | None) -> float:
        """Return for how long a process may be silent, given its last sign of life; one that starts, for longer."""
        started_s = self._started_s.get(process)
        if started_s is not None and (seen_s is None or seen_s < started_s):
            return self._start_s
        return self._silence_s[process.role]

    def orders(
        self,
        running: Sequence[ProcessName],
        workers_wanted: int,
        now_s: float,
        seen_s: Callable[[ProcessName], float | None],
        began_s: float,
    ) -> Orders:
        """Return what to start, stop and kill, given what runs and when each process gave its last sign of life.

        Silence counts from `began_s` at the earliest: before it, this coordinator could hear no process.
        """
        orders = self._launcher.orders(running, workers_wanted, now_s)
        self._started_s.update(dict.fromkeys(orders.start, now_s))
        silent = tuple(process for process in running if self._is_silent(process, seen_s(process), began_s, now_s))
        return orders._replace(kill=silent)

    def _is_silent(self, process: ProcessName, seen_s: float | None, began_s: float, now_s: float) -> bool:
        """Tell whether a process is silent for too long; one never heard, since this coordinator began."""
        signs_s = (seen_s, self._started_s.get(process), began_s)
        since_s = max(sign_s for sign_s in signs_s if sign_s is not None)
        return now_s - since_s > self.silence_s(process, seen_s)
