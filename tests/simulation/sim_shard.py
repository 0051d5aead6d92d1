"""A shard's process: decodes frames, lets the real core decide, encodes its answer. `Parts` says what it is made of.

Knows no fault. A broken rule comes in as another class in `Parts` (`broken_rules`); the product has no switches.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim_jobs import SEED, Job
from sim_world import Process, World

from coordinator.membership import ShardLife
from parashard import wire
from parashard.errors import ParashardError
from parashard.intervals import IntervalSet
from parashard.messages import Target
from parashard.partition import Plan
from ps_server.assembly import Assemblies
from ps_server.ingest import Immediate, Ingest, Rounds
from ps_server.optimizer import Optimizer
from ps_server.shard import Shard
from ps_server.storage import Storage, drawn_from

RUN_ID = "run"
DIGEST = "digest"


@dataclass(frozen=True)
class Push:
    """A frame for the shard's Push."""

    frame: bytes


@dataclass(frozen=True)
class Pull:
    """A frame for the shard's Pull."""

    frame: bytes


@dataclass(frozen=True)
class RegisterShard:
    """A shard announces itself to the coordinator."""

    shard: int
    life: ShardLife
    applied: IntervalSet


@dataclass(frozen=True)
class Parts:
    """The classes that a shard is made of."""

    shard: type[Shard] = Shard
    storage: type[Storage] = Storage
    assemblies: type[Assemblies] = Assemblies
    immediate: type[Immediate] = Immediate
    rounds: type[Rounds] = Rounds


REAL = Parts()


def identity(shard: int, incarnation: int) -> Target:
    """Return what requests to a shard must name."""
    return Target(RUN_ID, DIGEST, 1, shard, incarnation)


def build_shard(job: Job, plan: Plan, index: int, incarnation: int, queue_bytes: int, parts: Parts) -> Shard:
    """Return a shard at the job's start, as `ps_server.build` does from a job file."""
    storage = parts.storage(plan, index, Optimizer(job.spec), drawn_from(SEED))
    ingest: Ingest = parts.immediate(storage)
    if job.round_steps is not None:
        ingest = parts.rounds(storage, round_steps=job.round_steps, steps_total=job.steps_total, mean=job.mean)
    target = identity(index, incarnation)
    return parts.shard(target, job.steps_total, storage, ingest, parts.assemblies(queue_bytes))


class ShardProcess(Process):
    """Serves one shard. An error that is not ours means a broken invariant: it ends the simulation (P14)."""

    def __init__(self, world: World, shard: Shard) -> None:
        super().__init__(world, f"shard-{shard.identity.shard}")
        self.shard = shard

    def registration(self) -> RegisterShard:
        """Return what it announces."""
        mine = self.shard.identity
        return RegisterShard(mine.shard, ShardLife(mine.incarnation, self.name, ""), self.shard.ingest.applied.copy())

    def receive(self, request: Push | Pull) -> bytes:
        """Answer a frame with a frame."""
        if isinstance(request, Pull):
            return wire.encode_weights(self.shard.pull(wire.decode_pull(request.frame)))
        chunk = wire.decode_push(request.frame)
        try:
            receipt = self.shard.push(chunk, self.world.now_s)
        except ParashardError as error:
            self.world.fired[f"refused: {error.code}"] += 1
            raise
        self.world.note(f"{self.name} step {chunk.step} +{chunk.offset_bytes} {receipt.result.name}")
        self.world.fired[f"receipt: {receipt.result.name.lower()}"] += 1
        return wire.encode_receipt(receipt)
