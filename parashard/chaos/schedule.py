"""Schedule: faults with their targets, times and durations, drawn from a seed.

Pure: no clock, no process, no socket.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
"""Every kind of fault, and its shortest and longest duration in seconds; 0: it has no end."""

PROCESS_KINDS = tuple(kind for kind in LENGTHS_S if kind.startswith(("kill_", "pause_", "hang_", "stray_")))
"""Kinds of faults of a process."""

DISK_KINDS = ("fill_disk",)
"""Kinds of faults of the run directory's file system, which must be a small one; only on request."""

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
    towards_backend: bool  # of "one_way": which direction is closed


def scheduled_faults(
    seed: int, mean_interval_s: float, kinds: Sequence[str], processes: Sequence[str], links: Sequence[str]
) -> Iterator[ScheduledFault]:
    """Yield faults without end, in order of time; the same for the same arguments.

    Times between beginnings are exponential: a fault does not wait for the end of the last one, nor for the job to
    recover. Kinds are equally likely, and so are the targets of a kind.
    """
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
