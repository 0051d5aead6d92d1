"""Campaign: begins, ends and counts the faults of a schedule.

Knows neither clock nor thread (`now_s` is an argument), and processes and links only through `Injector`.
"""

from __future__ import annotations

import math
import operator
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Protocol

from parashard.chaos.proxy import NO_LINK_FAULTS, LinkFaults
from parashard.chaos.schedule import DISK_KINDS, LINK_KINDS, PROCESS_KINDS, ScheduledFault

DELAY_S = 0.1  # of bytes, each way, while a "delay" lasts
RETRY_S = 0.1
RESTART_S_MAX = 10.0  # wait for a target process that is being restarted


class Injector(Protocol):
    """Injects faults into processes, links and the disk."""

    def ready(self) -> bool:
        """Return whether every initial process of the job is running."""

    def signal(self, process: str, number: int) -> bool:
        """Send a signal to a process; return whether it was running."""

    def stray(self, process: str) -> bool:
        """Start a duplicate process of a service, which claims an incarnation and dies; return whether it started."""

    def set_faults(self, link: str, faults: LinkFaults) -> None:
        """Set the present faults of a link."""

    def reset(self, link: str) -> None:
        """Reset every connection of a link."""

    def fill_disk(self) -> None:
        """Fill the file system of the run directory."""

    def free_disk(self) -> None:
        """Free that space."""


class Campaign:
    """Execution of a schedule of faults.

    The schedule's clock starts when the injector is ready, and is paused while a fault waits for a process that is
    being restarted.
    """

    def __init__(
        self,
        injector: Injector,
        schedule: Iterator[ScheduledFault],
        faults_max: int | None,
        tell: Callable[[ScheduledFault], None] = lambda fault: None,
    ) -> None:
        self._injector = injector
        self._schedule = schedule
        self._faults_max = faults_max
        self._tell = tell
        self._next = next(schedule)
        self._began_s: float | None = None
        self._waiting = False  # for the target of the next fault
        self._lasting: list[tuple[float, ScheduledFault]] = []  # with their ends
        self.faults: Counter[str] = Counter()

    def advance(self, now_s: float) -> float:
        """Do what is due; return the seconds until the next event, infinity if there is none."""
        if self._began_s is None:
            if not self._injector.ready():
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
        """End every present fault, and begin no more."""
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
            if not self._injector.stray(fault.target):
                return False
        elif fault.kind in PROCESS_KINDS:
            # A hang has no end: its supervisor has to detect it. (The end of an earlier pause would resume the process:
            # the two are then one longer pause.)
            number = signal.SIGKILL if fault.kind.startswith("kill_") else signal.SIGSTOP
            if not self._injector.signal(fault.target, number):
                return False
        if fault.length_s > 0:
            self._lasting.append((now_s + fault.length_s, fault))
        if fault.kind in DISK_KINDS:
            self._injector.fill_disk()
        if fault.kind in LINK_KINDS:
            self._settle(fault)
            if fault.kind in ("reset", "duplicate"):  # only a new connection is carried twice
                self._injector.reset(fault.target)
        return True

    def _settle(self, fault: ScheduledFault) -> None:
        """Set a target's state to the union of its present faults."""
        link = fault.kind in LINK_KINDS
        others = [s for _, s in self._lasting if s.target == fault.target and (s.kind in LINK_KINDS) == link]
        if link:
            faults = (_LINK_FAULTS[other.kind](other) for other in others)
            self._injector.set_faults(fault.target, reduce(operator.or_, faults, NO_LINK_FAULTS))
        elif others:
            pass  # the last one to end brings relief
        elif fault.kind in DISK_KINDS:
            self._injector.free_disk()
        else:
            self._injector.signal(fault.target, signal.SIGCONT)


_LINK_FAULTS: dict[str, Callable[[ScheduledFault], LinkFaults]] = {
    "partition": lambda _: LinkFaults(requests_held=True, answers_held=True),
    "one_way": lambda fault: LinkFaults(requests_held=fault.towards_backend, answers_held=not fault.towards_backend),
    "delay": lambda _: LinkFaults(delay_s=DELAY_S),
    "duplicate": lambda _: LinkFaults(duplicate=True),
}
