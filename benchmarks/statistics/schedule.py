"""A training in virtual time: its workers and faults (`Schedule`), its update rule (`Method`) and its `Outcome`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Schedule:
    """Workers, and the faults that they meet."""

    policy: str = "sync:1"  # `consistency.policy`
    workers: int = 1
    # `cluster.pipeline_depth`: further steps that a worker pulls for while it computes one. In `auto` the controller
    # chooses it.
    depth: int = 0
    slowest: float = 1.0  # speed of the last worker; the others have 1
    transfer: float = 0.0  # how long a pull or a push takes, in the time of a batch; overlapped as the depth allows
    # Virtual seconds between two kills of a worker, which starts again a step later; 0: never.
    kill_every_s: float = 0.0
    # Virtual seconds between two kills of the shard, which is restored from a cut half as old; 0: never. Not for jobs
    # with embedding tables: the cuts in memory lack them.
    shard_kill_every_s: float = 0.0
    lag: int = 0  # age of the weights that each round of `sync:N` is computed at, in updates


PLAIN = Schedule()


Vector = NDArray[np.float64]
"""All trained variables, concatenated in the order of their names."""


class Method(Protocol):
    """An update rule that the product does not have: it computes the step that is subtracted from the weights."""

    def look(self, worker: int, weights: Vector, eta: float) -> Vector:
        """Return where a worker computes its gradient, from the weights as pulled; `eta` is the next update's rate."""

    def update(self, worker: int, gradient: Vector, weights: Vector, pulled: Vector, eta: float) -> Vector:
        """Return the step that the next update subtracts from the weights, in units of eta.

        The gradient was computed at `look` of the pulled weights. A killed worker keeps its number when it comes back.
        """


@dataclass
class Outcome:
    """Result of a training."""

    # Of the held-out examples at the end; if the loss diverged, only the trial's, at its worst possible value.
    metrics: dict[str, float] = field(default_factory=dict)
    curve: list[tuple[float, float]] = field(default_factory=list)  # epochs complete, and the trial's metric then
    staleness: Counter[int] = field(default_factory=Counter)  # pushes by staleness, in updates
    drift: list[float] = field(default_factory=list)  # |g' - g| / |g| of the batches that were measured
    losses: list[float] = field(default_factory=list)  # of the steps, as they were reported
    virtual_s: float = 0.0
    lags: list[int] = field(default_factory=list)  # of `auto`: the controller's choices, in order
    kills: int = 0
    sha256: str = ""  # of the final variables
