"""Campaign: faults with targets, times and durations, drawn from a seed; begins, ends and counts them."""

from __future__ import annotations

import math
import operator
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from parashard.chaos.proxied_cluster import ProxiedCluster
from parashard.chaos.proxy import NO_LINK_FAULTS, LinkFaults

LENGTHS_S: Mapping[str, tuple[float, float]] = {
    "kill_worker": (0.0, 0.0),
    "kill_shard": (0.0, 0.0),
    "kill_coordinator": (0.0, 0.0),
    "pause_worker": (0.2, 5.0),
    "pause_shard": (0.2, 3.0),
    "pause_coordinator": (0.2, 3.0),
    "hang_worker": (0.0, 0.0),
    "hang_shard": (0.0, 0.0),
    "hang_coordinator": (0.0, 0.0),
    "stray_shard": (0.0, 0.0),
    "stray_coordinator": (0.0, 0.0),
    "partition": (0.2, 5.0),
    "one_way": (0.2, 5.0),
    "reset": (0.0, 0.0),
    "delay": (1.0, 5.0),
    "duplicate": (1.0, 5.0),
    "fill_disk": (1.0, 5.0),
}
"""Every kind of fault, and its shortest and longest duration in seconds; 0: the campaign does not end it."""

PROCESS_KINDS = tuple(kind for kind in LENGTHS_S if kind.startswith(("kill_", "pause_", "hang_", "stray_")))
"""Kinds of faults of a process."""

DISK_KINDS = ("fill_disk",)
"""Kinds of faults of the run directory's file system, which must be small; only on request."""

LINK_KINDS = tuple(kind for kind in LENGTHS_S if kind not in (*PROCESS_KINDS, *DISK_KINDS))
"""Kinds of faults of a link."""

DISK = "disk"


@dataclass(frozen=True)
class ScheduledFault:
    """One fault."""

    at_s: float  # when it begins, in seconds after the start of the campaign
    kind: str  # one of `LENGTHS_S`
    target: str  # name of the process or of the link, or "disk"
    length_s: float  # its duration
    towards_backend: bool  # for "one_way": whether requests, not answers, are held


def scheduled_faults(
    seed: int, mean_interval_s: float, kinds: Sequence[str], processes: Sequence[str], links: Sequence[str]
) -> Iterator[ScheduledFault]:
    """Yield an endless sequence of faults, in order of time, determined by the arguments."""
    # Times between beginnings are exponential: a fault does not wait for the previous one's end, nor for a recovery.
    draw = random.Random(seed)
    at_s = 0.0
    while True:
        at_s += draw.expovariate(1.0 / mean_interval_s)
        kind = draw.choice(kinds)
        target = draw.choice(targets_of(kind, processes, links))
        yield ScheduledFault(at_s, kind, target, draw.uniform(*LENGTHS_S[kind]), draw.random() < 0.5)


def targets_of(kind: str, processes: Sequence[str], links: Sequence[str]) -> Sequence[str]:
    """Return the possible targets of a kind of fault."""
    if kind in DISK_KINDS:
        return (DISK,)
    if kind in LINK_KINDS:
        return links
    role = kind.partition("_")[2]
    return [name for name in processes if name.partition("-")[0] == role]


DELAY_S = 0.1  # of bytes in each direction during a "delay"
RETRY_S = 0.1
RESTART_S_MAX = 10.0  # maximum wait for a target process that is being restarted


class Campaign:
    """Execution of a schedule of faults; its clock is paused while a fault waits for a process that restarts."""

    def __init__(
        self,
        cluster: ProxiedCluster,
        schedule: Iterator[ScheduledFault],
        faults_max: int | None,
        tell: Callable[[ScheduledFault], None] = lambda fault: None,
    ) -> None:
        self._cluster = cluster
        self._schedule = schedule
        self._faults_max = faults_max
        self._tell = tell
        self._next = next(schedule)
        self._began_s: float | None = None
        self._waiting = False  # for the target of the next fault
        self._lasting: list[tuple[float, ScheduledFault]] = []  # (end, fault) of present faults
        self.faults: Counter[str] = Counter()

    def advance(self, now_s: float) -> float:
        """End and begin faults that are due; return the seconds until the next event, infinity if there is none."""
        if self._began_s is None:
            if not self._cluster.ready():
                return RETRY_S
            self._began_s = now_s
        for end in [end for end in self._lasting if end[0] <= now_s]:
            self._lasting.remove(end)
            self._settle(end[1])
        while self._wanted and self._began_s + self._next.at_s <= now_s:
            if self._begin(self._next, now_s):
                self.faults[self._next.kind] += 1
                self._tell(self._next)
            elif now_s < self._began_s + self._next.at_s + RESTART_S_MAX:
                self._waiting = True
                return RETRY_S
            if self._waiting:  # shift later faults, so that they do not all hit a process that is just starting
                self._began_s, self._waiting = now_s - self._next.at_s, False
            self._next = next(self._schedule)
        ends_s = [end_s for end_s, _ in self._lasting]
        begins_s = [self._began_s + self._next.at_s] if self._wanted else []
        return max(0.0, min([*ends_s, *begins_s], default=math.inf) - now_s)

    def lift(self) -> None:
        """End every present fault, and start no more."""
        self._faults_max = 0
        lasting, self._lasting = self._lasting, []
        for _, fault in lasting:
            self._settle(fault)

    @property
    def _wanted(self) -> bool:
        return self._faults_max is None or self.faults.total() < self._faults_max

    def _begin(self, fault: ScheduledFault, now_s: float) -> bool:
        """Begin a fault; return whether its target was running."""
        if fault.kind.startswith("stray_"):
            if not self._cluster.stray(fault.target):
                return False
        elif fault.kind in PROCESS_KINDS:
            # A hang has no end: the supervisor has to detect it. (If an earlier pause ends during the hang, it resumes
            # the process: then both are one longer pause.)
            number = signal.SIGKILL if fault.kind.startswith("kill_") else signal.SIGSTOP
            if not self._cluster.signal(fault.target, number):
                return False
        if fault.length_s > 0:
            self._lasting.append((now_s + fault.length_s, fault))
        if fault.kind in DISK_KINDS:
            self._cluster.fill_disk()
        if fault.kind in LINK_KINDS:
            self._settle(fault)
            if fault.kind in ("reset", "duplicate"):  # only new connections are duplicated
                self._cluster.reset(fault.target)
        return True

    def _settle(self, fault: ScheduledFault) -> None:
        """Set a target's state to the union of its present faults."""
        link = fault.kind in LINK_KINDS
        others = [s for _, s in self._lasting if s.target == fault.target and (s.kind in LINK_KINDS) == link]
        if link:
            faults = (_LINK_FAULTS[other.kind](other) for other in others)
            self._cluster.set_faults(fault.target, reduce(operator.or_, faults, NO_LINK_FAULTS))
        elif others:
            pass  # the last present fault to end restores the target
        elif fault.kind in DISK_KINDS:
            self._cluster.free_disk()
        else:
            self._cluster.signal(fault.target, signal.SIGCONT)


_LINK_FAULTS: dict[str, Callable[[ScheduledFault], LinkFaults]] = {
    "partition": lambda _: LinkFaults(requests_held=True, answers_held=True),
    "one_way": lambda fault: LinkFaults(requests_held=fault.towards_backend, answers_held=not fault.towards_backend),
    "delay": lambda _: LinkFaults(delay_s=DELAY_S),
    "duplicate": lambda _: LinkFaults(duplicate=True),
}
