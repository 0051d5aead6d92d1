"""Schedule: which fault strikes whom, when and for how long, drawn from a seed.

Pure: no clock, no process, no socket. Called by `parashard.chaos.runner`, which makes the strikes happen.
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
"""Every kind of fault, and the shortest and longest time in seconds that one lasts; 0: nothing ends it later."""

PROCESS_KINDS = tuple(kind for kind in LENGTHS_S if kind.startswith(("kill_", "pause_", "hang_", "stray_")))
"""Kinds that strike a process."""

DISK_KINDS = ("fill_disk",)
"""Kinds that strike the file system of the run directory, which must be a small one: only where they are asked for."""

LINK_KINDS = tuple(kind for kind in LENGTHS_S if kind not in (*PROCESS_KINDS, *DISK_KINDS))
"""Kinds that strike a link."""

DISK = "disk"


@dataclass(frozen=True)
class Strike:
    """One fault.

    Attributes
    ----------
    at_s : float
        When it begins, in seconds after the campaign's beginning.
    kind : str
        One of `LENGTHS_S`.
    target : str
        Name of the process or of the link, or "disk".
    length_s : float
        How long it lasts.
    towards_backend : bool
        Of "one_way": which of the two ways is closed.
    """

    at_s: float
    kind: str
    target: str
    length_s: float
    towards_backend: bool


def strikes(
    seed: int, mean_interval_s: float, kinds: Sequence[str], processes: Sequence[str], links: Sequence[str]
) -> Iterator[Strike]:
    """Yield strikes without end, in order of time; the same for the same arguments.

    Times between beginnings are exponential: the next strike does not wait for the last one's end, nor for the job to
    have recovered. Each kind is as likely as any other, and each of its targets.

    Parameters
    ----------
    seed : int
        Whatever is drawn comes from it.
    mean_interval_s : float
        Mean time between two beginnings, in seconds.
    kinds : sequence of str
        Which kinds may strike; not empty. Their order counts.
    processes : sequence of str
        Names such as "coordinator", "shard-0" and "worker-1"; one of each role that a kind strikes.
    links : sequence of str
        Names of the links; not empty if a kind strikes links.
    """
    draw = random.Random(seed)
    at_s = 0.0
    while True:
        at_s += draw.expovariate(1.0 / mean_interval_s)
        kind = draw.choice(kinds)
        target = draw.choice(targets_of(kind, processes, links))
        yield Strike(at_s, kind, target, draw.uniform(*LENGTHS_S[kind]), draw.random() < 0.5)


def targets_of(kind: str, processes: Sequence[str], links: Sequence[str]) -> Sequence[str]:
    """Return whom a kind of fault may strike."""
    if kind in DISK_KINDS:
        return (DISK,)
    if kind in LINK_KINDS:
        return links
    role = kind.partition("_")[2]
    return [name for name in processes if name.partition("-")[0] == role]
