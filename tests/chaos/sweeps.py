"""Sweeps: which job passes which failpoints, how often, and what makes it pass those that no job passes by itself.

A failpoint `NAME: K` kills at a hit of each incarnation that is drawn from 1 to K. An incarnation passes the points of
a boot and of the job's end once, so with K = 2 half of the incarnations survive them: they train, and die elsewhere. A
job of S steps is long enough for N firings each if S is well over N times the sum of the K of what each step passes.
Called by `failpoint_sweep`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from job_run import JobRun

from support.command_run import ROOT

ONCE = 2  # of what an incarnation passes once: half of the incarnations die of it
STOP_EVERY_S = 0.5

Provoke = Callable[[JobRun, Counter[str], int], None]
"""Called again and again while a job runs, with how often each failpoint has fired and how often it must."""


@dataclass(frozen=True)
class Sweep:
    """A job, and the failpoints that are to kill processes of it."""

    name: str  # for people
    # file, policy: the job, and its consistency.
    file: str
    policy: str
    epochs: int  # for 20 firings
    # How late in an incarnation each may fire at most; each must fire as often as asked for.
    failpoints: Mapping[str, int]
    values: Mapping[str, Any] = field(default_factory=dict)  # other keys of the job
    provoke: Callable[[], Provoke] | None = None  # makes the job pass what it does not pass by itself
    # As `failpoints`, for points whose kills bring a job to the failpoints; how often they fire does not matter.
    fuel: Mapping[str, int] = field(default_factory=dict)
    digest: bool = False  # whether the weights must be those of a run without faults


class CreateCheckpoints:
    """Asks for one drained checkpoint after the other, until enough of those that ask have been answered by a kill."""

    def __init__(self) -> None:
        self._asking: subprocess.Popen[bytes] | None = None

    def __call__(self, run: JobRun, fired: Counter[str], firings: int) -> None:
        """Request a checkpoint, unless a request is pending: it is repeated to a restarted coordinator."""
        wanted = min(fired["coordinator.checkpoint.parts"], fired["coordinator.checkpoint.manifest"]) < firings
        if wanted and (self._asking is None or self._asking.poll() is not None) and run.lines("worker-0", "joined"):
            command = [sys.executable, "-m", "parashard", "checkpoint", "create", str(run.dir), "--timeout-s", "60"]
            quiet = subprocess.DEVNULL
            self._asking = subprocess.Popen(command, cwd=ROOT, stdin=quiet, stdout=quiet, stderr=quiet)


class StopShards:
    """Asks one shard after the other to stop, each incarnation once."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()
        self._next_s = 0.0

    def __call__(self, run: JobRun, fired: Counter[str], firings: int) -> None:
        """Ask a shard that has come to serve since it was last asked."""
        if fired["shard.stop.saving"] >= firings or time.monotonic() < self._next_s:
            return
        for index in ("0", "1"):
            incarnations = run.lines(f"shard-{index}", "serving")
            if incarnations > self._asked[index]:
                self._asked[index] = incarnations
                self._next_s = time.monotonic() + STOP_EVERY_S
                run.signal("shard", index, signal.SIGTERM)
                return


SWEEPS = (
    Sweep(
        "worker",
        "examples/torn.toml",
        "async",
        10,
        {
            "worker.boot.joined": ONCE,
            "worker.lease.granted": 4,
            "worker.lease.reporting": 8,
            "worker.pull.done": 8,
            "worker.compute.done": 8,
            "worker.push.in_slot": 8,
            "worker.push.between_shards": 8,
            "worker.push.done": 8,
        },
    ),
    Sweep(
        "worker, over gRPC",
        "examples/torn.toml",
        "async",
        4,
        {"worker.push.between_messages": 8},
        {"cluster.transport": "grpc"},
    ),
    Sweep(
        "shard, serving",
        "examples/ledger.toml",
        "ssp:8",
        8,
        {
            "shard.boot.claimed": ONCE,
            "shard.boot.restored": ONCE,
            "shard.boot.registered": ONCE,
            "shard.push.received": 60,
            "shard.push.applied": 60,
            "shard.pull.read": 60,
        },
        {"checkpoint.every_steps": 20},
    ),
    Sweep(
        "shard, saving",
        "examples/ledger.toml",
        "async",
        8,
        {
            "shard.checkpoint.cut": 4,
            "shard.checkpoint.files": 4,
            "shard.checkpoint.manifest": 4,
            "shard.checkpoint.collecting": 4,
        },
        {"checkpoint.every_steps": 20, "checkpoint.keep": 1},
    ),
    Sweep(
        "shard, with rows that come and go",
        "examples/row_ledger.toml",
        "sync:4",
        12,
        {"shard.rows.gone": 4, "shard.rows.moved": 4, "shard.rows.all": 2},
        {
            "checkpoint.every_steps": 40,
            "checkpoint.keep": 1,
            "tables.ledger.admit_after": 2,
            "tables.ledger.evict_unused_steps": 100,
        },
        digest=True,
    ),
    Sweep(
        "shard, whose tables grow",
        "examples/clicks.toml",
        "sync:4",
        2,
        {"shard.rows.grown": 4, "shard.rows.ended": 20},
        {
            "data.examples": 300_000,
            "data.held_out": 1000,
            "checkpoint.every_steps": 20,
            "checkpoint.keep": 1,
            "tables.deep.evict_unused_steps": 20,
        },
        digest=True,
    ),
    Sweep(
        "shard, in rounds",
        "examples/digits.toml",
        "sync:4",
        120,
        {"shard.rollback.claimed": ONCE, "shard.stop.saving": ONCE},
        {"checkpoint.every_steps": 8, "cluster.partitioner": "{kind='fixed-shards'}"},
        provoke=StopShards,
        fuel={"shard.push.received": 200},
        digest=True,
    ),
    Sweep(
        "coordinator",
        "examples/ledger.toml",
        "async",
        16,
        {
            "coordinator.boot.claimed": ONCE,
            "coordinator.boot.serving": ONCE,
            "coordinator.register_shard": 4,
            "coordinator.lease.decided": 20,
            "coordinator.state.saved": ONCE,
            "coordinator.checkpoint.parts": ONCE,
            "coordinator.checkpoint.manifest": ONCE,
            # An incarnation that passes both of these has finished the job.
            "coordinator.finish.weights": 1,
            "coordinator.finish.report": 1,
        },
        {"cluster.lease_batch": 4},
        provoke=CreateCheckpoints,
    ),
)
