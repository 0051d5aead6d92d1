"""Goodput: the share of a job's speed that is left when a process of a random role is killed every 15 s.

Counts once a second the steps that every shard has applied. A killed shard goes back to its checkpoint, so
repeated work does not count twice. Called by `benchmarks.recovery`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from benchmarks.recovery_times import steady
from benchmarks.watched_run import Watch

SAMPLE_S = 1.0

Sample = tuple[float, int | None]
"""Seconds since the beginning, and the steps that every shard has applied since then; None: a shard did not answer."""


def victims(seed: int, roles: dict[str, int]) -> Iterator[str]:
    """Yield names of processes for ever: in every round each role once, in random order, and a random process of it.

    Parameters
    ----------
    seed : int
        Repeats the sequence.
    roles : dict of str to int
        Number of processes by role.
    """
    rng = random.Random(seed)
    while True:
        for role in rng.sample(list(roles), len(roles)):
            yield role if role == "coordinator" else f"{role}-{rng.randrange(roles[role])}"


def sampled(watch: Watch, seconds: float, every_s: float | None, seed: int) -> tuple[list[Sample], list[str]]:
    """Watch a job for some time; return the samples, and the names of the killed processes.

    Parameters
    ----------
    seconds : float
        For how long.
    every_s : float, optional
        Pause between two kills; the first comes after half of it; None: no kills.
    seed : int
        Chooses the processes to kill.
    """
    status = steady(watch)
    drawn = victims(seed, {"shard": len(status.shards), "worker": len(status.workers), "coordinator": 1})
    killed: list[str] = []
    samples: list[Sample] = []
    began_s, first = time.monotonic(), watch.eventually(lambda: applied_everywhere(watch), "shards that answer")
    kill_s = seconds if every_s is None else every_s / 2
    for tick in range(round(seconds / SAMPLE_S)):
        watch.pause(max(0.0, began_s + (tick + 1) * SAMPLE_S - time.monotonic()))
        applied = applied_everywhere(watch)
        now_s = time.monotonic() - began_s
        samples.append((round(now_s, 3), None if applied is None else applied - first))
        if every_s is not None and kill_s <= now_s < seconds - every_s / 2 + SAMPLE_S:
            killed.append(next(drawn))
            watch.kill(killed[-1])
            kill_s += every_s
    return samples, killed


def applied_everywhere(watch: Watch) -> int | None:
    """Return the least number of steps that a shard has applied; None if one does not answer."""
    view = watch.last_view()
    records = [watch.inspect(shard.address) for shard in view.shards] if view is not None else [None]
    counts = [None if record is None else sum(i.stop - i.start for i in record.applied) for record in records]
    known = [count for count in counts if count is not None]
    return min(known) if len(known) == len(counts) else None


def rate(samples: list[Sample]) -> float:
    """Return the steps per second from the beginning to the last sample that has a count."""
    at_s, steps = next((t, n) for t, n in reversed(samples) if n is not None)
    return steps / at_s
