"""Supervision of the processes of a job: which are started and stopped, their exits, silence and restarts.

Pure: `now_s` is an argument. The first exit counts as a preemption: no pause. From the second in a row on there is a
pause, which doubles. A completed step of the job resets pause and budget, so a job that makes progress is never given
up, however often its processes are killed. Knows neither steps nor leases. `PodLedger` reports each pod's end once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parashard.process.backoff import BACKOFF_MAX_S, backoff_s

FAILED = 1  # exit codes, as in `parashard.process.shell`
CONFIGURATION = 2
IO_ERROR = 74
RETRY = 75


@dataclass(frozen=True, order=True)
class ProcessName:
    """A process of the cluster: role "shard" or "worker", and its index."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


class Exit(NamedTuple):
    """A process that ended, and the reason in words; the launcher numbers all exits, ascending."""

    process: ProcessName
    exit_code: int
    reason: str
    number: int = 0


class Orders(NamedTuple):
    """Processes that their parent should start, stop (excess workers) and kill (silent ones) now."""

    start: tuple[ProcessName, ...] = ()
    stop: tuple[ProcessName, ...] = ()
    kill: tuple[ProcessName, ...] = ()


class LocalLauncher:
    """Restart policy of the processes that `parashard run` starts: every shard and the wanted number of workers.

    A process is restarted after at most `budget` exits in a row, counted from the job's last completed step.
    """

    def __init__(self, shards: int, backoff_s: float, budget: int) -> None:
        self._shards = [ProcessName("shard", i) for i in range(shards)]
        self._backoff_s = backoff_s
        self._budget = budget
        self._exits_in_a_row: dict[ProcessName, int] = {}
        self._not_before_s: dict[ProcessName, float] = {}

    def exited(self, exit_: Exit, now_s: float, *, was_up: bool, waits: bool = False) -> str | None:
        """Record an exit; `was_up`: the process has joined the job. Return why the job must stop, or None.

        A process that ended is restarted, except one that never joined because of a wrong configuration.

        A process that was up had a valid configuration. If it now exits with a configuration error, something else has
        changed, such as an expired certificate: the others go on, and it is retried with the longest pause, within the
        budget.
        """
        process = exit_.process
        if waits or exit_.exit_code == IO_ERROR:  # the job waits, too: for unregistered shards or a failing disk
            self._not_before_s[process] = now_s + BACKOFF_MAX_S
            return None
        misconfigured = exit_.exit_code == CONFIGURATION
        if misconfigured and not was_up:
            return f"{process} ended: {exit_.reason}"
        count = self._exits_in_a_row[process] = self._exits_in_a_row.get(process, 0) + 1
        self._not_before_s[process] = now_s + (BACKOFF_MAX_S if misconfigured else backoff_s(self._backoff_s, count))
        if count > self._budget:
            return f"{process} ended too often without a step completed in between, the last time: {exit_.reason}"
        return None

    def orders(self, running: Sequence[ProcessName], workers_wanted: int, now_s: float) -> Orders:
        """Start missing processes whose pause is over; stop workers over the wanted number, the highest first."""
        alive = set(running)
        wanted = self._shards + [ProcessName("worker", i) for i in range(workers_wanted)]
        missing = [p for p in wanted if p not in alive and now_s >= self._not_before_s.get(p, now_s)]
        excess = sorted((p for p in alive if p.role == "worker" and p.index >= workers_wanted), reverse=True)
        return Orders(tuple(missing), tuple(excess))

    def step_completed(self) -> None:
        """Reset back-off and budget of every process."""
        self._exits_in_a_row.clear()


class Supervision:
    """Exits, restarts and silence of a job's processes; without a launcher, an external system starts and stops them.

    A process that is silent for `silence_s` is killed: a worker not before its leases expire, and a process that this
    coordinator had started and that has not been heard since, only after `start_s`.
    """

    def __init__(self, launcher: LocalLauncher | None, silence_s: float, lease_ttl_s: float, start_s: float) -> None:
        self.worker_restarts = 0
        self.worker_exits = 0
        self.pod_ends: Counter[tuple[str, str]] = Counter()
        """Number of pod ends by role and reason, with the launcher `kubernetes`."""
        self.pod_watch_errors = 0
        self._launcher = launcher
        self._silence_s = {"shard": silence_s, "worker": max(silence_s, lease_ttl_s)}
        self._start_s = start_s
        self._started_s: dict[ProcessName, float] = {}
        self._heard = 0
        self.ended_workers: set[str] = set()
        """Workers whose end is counted, and whose next process has not joined yet."""

    def new_exits(self, exits: Iterable[Exit]) -> list[Exit]:
        """Return the exits that are new: the launcher repeats each until it is acknowledged."""
        new = [exit_ for exit_ in exits if exit_.number > self._heard]
        self._heard = max((self._heard, *(exit_.number for exit_ in new)))
        return new

    def ended(
        self,
        exit_: Exit,
        workers_wanted: int,
        now_s: float,
        *,
        was_up: bool,
        accounted: bool = False,
        shards_up: bool = True,
    ) -> str | None:
        """Record an exit; `was_up`: the process has joined the job. Return why the job must stop, or None."""
        # An `accounted` exit counted as a failed attempt at a step, and does not use the launcher's budget.
        is_worker = exit_.process.role == "worker"
        self.worker_exits += is_worker
        fatal = None
        if self._launcher is not None and not accounted:
            waits = is_worker and not shards_up and exit_.exit_code == RETRY
            fatal = self._launcher.exited(exit_, now_s, was_up=was_up, waits=waits)
        if is_worker and not fatal:
            self.ended_workers.add(str(exit_.process))
            self.worker_restarts += exit_.process.index < workers_wanted  # else it was scaled down
        return fatal

    def pod_ended(self, end: PodEnd) -> str | None:
        """Record a pod's end, which Kubernetes replaces; return why the job must stop, or None."""
        self.pod_ends[end.pod.role, end.reason] += 1
        return str(end) if end.exit_code == CONFIGURATION else None

    def joined(self, worker: str, *, restarted: bool) -> None:
        """Count a worker that was restarted, unless its end was counted already."""
        if worker in self.ended_workers:
            self.ended_workers.discard(worker)
        elif restarted:
            self.worker_restarts += 1

    def step_completed(self) -> None:
        """Reset back-off and budgets."""
        if self._launcher is not None:
            self._launcher.step_completed()

    def silence_s(self, process: ProcessName, seen_s: float | None) -> float:
        """Return how long a process may be silent, given its last sign of life; longer while it starts."""
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
        """Return the processes to start, stop and kill, given the running ones and each one's last sign of life."""
        # Silence counts from `began_s` at the earliest: before it, this coordinator did not run.
        orders = Orders() if self._launcher is None else self._launcher.orders(running, workers_wanted, now_s)
        self._started_s.update(dict.fromkeys(orders.start, now_s))
        silent = tuple(process for process in running if self._is_silent(process, seen_s(process), began_s, now_s))
        return orders._replace(kill=silent)

    def _is_silent(self, process: ProcessName, seen_s: float | None, began_s: float, now_s: float) -> bool:
        """Tell whether a process has been silent for too long, since its last sign of life, its start or `began_s`."""
        signs_s = (seen_s, self._started_s.get(process), began_s)
        since_s = max(sign_s for sign_s in signs_s if sign_s is not None)
        return now_s - since_s > self.silence_s(process, seen_s)


STOPPED_EXIT_CODES = (0, 75, 143)
"""Exit codes of a stopped container: a handled SIGTERM, or SIGTERM before its handler was installed."""

ROLES = ("shard", "worker")

REASONS = ("done", "failed", "preempted", "stopped", "unseen")
"""Why a pod ended.

done: it completed its work. failed: it ended with an error. preempted: by Kubernetes (condition DisruptionTarget).
stopped: on request, such as scaling down. unseen: it is gone, and its end was not observed.
"""


class Pod(NamedTuple):
    """A pod, as the API returned it."""

    uid: str
    name: str  # a replacement may reuse it
    role: str  # "shard" or "worker"
    phase: str  # Pending, Running, Succeeded or Failed
    exit_code: int | None = None  # of its container, once that has ended and is not restarted
    restarts: int = 0  # how often its container was restarted in place, the last time after `last_exit_code`
    last_exit_code: int | None = None
    disruption: str = ""  # reason of the condition DisruptionTarget, such as PreemptionByScheduler; empty: none

    @property
    def over(self) -> bool:
        """Whether it will not run again."""
        return self.phase in ("Succeeded", "Failed")


class PodEnd(NamedTuple):
    """The end of a pod, or of a container that is restarted in place."""

    pod: Pod
    reason: str
    exit_code: int | None

    def __str__(self) -> str:
        code = "" if self.exit_code is None else f", exit code {self.exit_code}"
        why = f" ({self.pod.disruption})" if self.pod.disruption else ""
        return f"pod {self.pod.name} {self.reason}{why}{code}"


class PodLedger:
    """The known pods of one job, by uid. Lists have all pods, events one change; both may repeat known states."""

    def __init__(self) -> None:
        self._known: dict[str, Pod] = {}
        self._ended: set[str] = set()
        self._listed = False

    def listed(self, pods: Iterable[Pod]) -> list[PodEnd]:
        """Process a list of all pods; return the ends since the last one. The first list is the initial state."""
        now = {pod.uid: pod for pod in pods}
        if not self._listed:
            self._listed = True
            self._known = now
            self._ended = {pod.uid for pod in now.values() if pod.over}
            return []
        ends = [end for uid, pod in list(self._known.items()) if uid not in now for end in self.deleted(pod)]
        for pod in now.values():
            ends += self.changed(pod)
        return ends

    def changed(self, pod: Pod) -> list[PodEnd]:
        """Process a new or changed pod; return the ends."""
        before = self._known.get(pod.uid)
        self._known[pod.uid] = pod
        ends = []
        if pod.restarts > (before.restarts if before else 0):
            ends.append(PodEnd(pod, _reason(pod, pod.last_exit_code), pod.last_exit_code))
        if pod.over and pod.uid not in self._ended:
            self._ended.add(pod.uid)
            done = pod.phase == "Succeeded" and not pod.disruption
            ends.append(PodEnd(pod, "done" if done else _reason(pod, pod.exit_code), pod.exit_code))
        return ends

    def deleted(self, pod: Pod) -> list[PodEnd]:
        """Process a deleted pod in its last state; return the ends."""
        ends = self.changed(pod)
        del self._known[pod.uid]
        if pod.uid not in self._ended:
            ends.append(PodEnd(pod, "preempted" if pod.disruption else "unseen", None))
        self._ended.discard(pod.uid)
        return ends


def _reason(pod: Pod, exit_code: int | None) -> str:
    if pod.disruption:
        return "preempted"
    if exit_code is None:
        return "unseen"
    return "stopped" if exit_code in STOPPED_EXIT_CODES else "failed"
