"""Saved: what a coordinator's successor cannot learn from the shards, the job file and the manifests (P7).

Stored before a decision acts, and now and then for the counters. Pure; `coordinator.run_store` has the disk.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from parashard.checkpoints.encoding import Record


class Saved(Record):
    """Decisions, and figures for the report.

    Evaluations' results are by the steps before them; a metric that is not finite is None.
    """

    kind: ClassVar[str] = "coordinator"

    target: int
    early_stop: str = ""
    evaluations: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    skips: tuple[int, ...] = ()
    worker_restarts: int = 0
    shard_restarts: int = 0
    shard_lives: tuple[int, ...] = ()  # the last known incarnation of each shard, 0 where it was never heard of
    rollbacks: int = 0
    workers_wanted: int = 0
    scale_requests: int = 0  # how often somebody asked for a number of workers; 0: the manifests' number
    examples: int = 0
    training_s: float = 0.0
    fingerprint: str = ""  # of the arithmetic that the job began with (P13)
