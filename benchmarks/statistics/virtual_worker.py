"""VirtualWorker: a worker in virtual time, and its leased steps; its transfers and its probe are the product's."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import cast

from parashard._proto import coordinator_pb2 as pb
from parashard.client.pulled import Pulled
from parashard.client.shard_client import ShardClient
from parashard.data.base import Batch
from parashard.plan.variables import Float32s
from parashard_coordinator.core.calls import CompletedStep, LeaseCall
from parashard_coordinator.core.controller import Drift
from parashard_coordinator.core.leases import Grant
from parashard_coordinator.core.membership import PHASES
from parashard_worker.computing import Task
from parashard_worker.leasing import Leasing
from parashard_worker.loop import Probe
from parashard_worker.transfers import Transfers


@dataclass
class Leased:
    grant: Grant
    batch: Batch
    pulled: Pulled
    values: dict[str, Float32s]  # to compute at
    ready_s: float  # when the pull is complete
    examples: int


class Reports:
    """Stand-in for the leasing thread of transfers and a probe; no view is newer than the client's."""

    view = 0

    def __init__(self) -> None:
        self.drifts: list[Drift] = []

    def reading(self, grant: Grant) -> contextlib.AbstractContextManager[None]:
        """Nothing watches the reading."""
        return contextlib.nullcontext()

    def drifted(self, drift: pb.StepDrift) -> None:
        """Keep a measurement for the next call."""
        self.drifts.append(Drift(drift.step, drift.drift, drift.updates))


class VirtualWorker:
    """A worker's process, and its leased steps."""

    def __init__(self, index: int, speed: float, client: ShardClient, task: Task) -> None:
        self.index, self.speed, self.client = index, speed, client
        self.reports = Reports()
        leasing = cast(Leasing, self.reports)
        self.transfers = Transfers(client, leasing, task.round_steps)
        self.probe = Probe(task, self.transfers, leasing)
        self.phases_s = dict.fromkeys(PHASES, 0.0)
        self.idle_since_s: float | None = 0.0
        self.pushing = 0
        self.depth = 0
        self.name = f"worker-{index}"
        self.call = LeaseCall(self.name, 0, 0)
        self.pulled: deque[Leased] = deque()
        self.computing: Leased | None = None
        self.pushed_steps: list[int] = []
        self.completed: list[CompletedStep] = []
        self.process = 0

    @property
    def held(self) -> list[int]:
        computing = [] if self.computing is None else [self.computing.grant.step]
        return self.pushed_steps + computing + [leased.grant.step for leased in self.pulled]
