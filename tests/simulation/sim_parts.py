"""Parts: what the processes of a run are made of, and the messages and names that they share.

A broken rule comes in as another class in `Parts` (`broken_rules`); the product has no switches. Knows no process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sim_jobs import SEED, Job

from parashard.checkpoints.state import ShardState
from parashard.job.sections import CheckpointOptions
from parashard.plan.partition import Plan
from parashard.protocol.messages import Target
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.rounds import Rounds
from parashard_coordinator.run.store import RunStore
from parashard_server.build import stored_values
from parashard_server.core.shard import Shard
from parashard_server.core.update_policies import BatchUpdates, ImmediateUpdates, RoundUpdates, UpdatePolicy
from parashard_server.push_memory import PushMemory
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.rows.embedding_tables import EmbeddingTables
from parashard_server.state.storage import Storage, drawn_from

RUN_ID = "run"
DIGEST = "d" * 64
COORDINATOR = "coordinator"


@dataclass(frozen=True)
class Frame:
    """What a shard's data plane takes."""

    frame: bytes


@dataclass(frozen=True)
class PushMessage(Frame):
    """A message for the shard's Push: its first has a header, the others are more of the payload.

    gRPC says which call a message is of, in which order they came, and which is the last.
    """

    call: int
    index: int
    last: bool
    step: int  # for the habit of "P4-calls-mixed" alone: only the first message of a call says it


class PullFrame(Frame):
    """A frame for the shard's Pull."""


@dataclass(frozen=True)
class Parts:
    """The classes that the processes are made of."""

    shard: type[Shard] = Shard
    storage: type[Storage] = Storage
    immediate: type[ImmediateUpdates] = ImmediateUpdates
    batches: type[BatchUpdates] = BatchUpdates
    rounds: type[RoundUpdates] = RoundUpdates
    tables: type[EmbeddingTables] = EmbeddingTables
    core: type[Core] = Core
    job_record: type[JobRecord] = JobRecord
    book: type[Rounds] = Rounds
    run_store: type[RunStore] = RunStore
    habits: frozenset[str] = field(default_factory=frozenset)  # of processes that have no class for it, by rule


REAL = Parts()


def identity(shard: int, incarnation: int) -> Target:
    """Return what requests to a shard must name."""
    return Target(RUN_ID, DIGEST, 1, shard, incarnation)


@dataclass(frozen=True)
class _Cluster:
    queue_pushes: int = 64


@dataclass(frozen=True)
class _JobFile:
    checkpoint: CheckpointOptions
    cluster: _Cluster = field(default_factory=_Cluster)


class Builder:
    """Builds a shard's incarnations, as `parashard_server.build.ShardBuilder` does from a job file."""

    def __init__(
        self, job: Job, plan: Plan, index: int, queue_bytes: int, parts: Parts, options: CheckpointOptions
    ) -> None:
        self.job = _JobFile(options)
        self.plan = plan
        self.index = index
        self.optimizer = Optimizer(job.spec)
        self._job = job
        self.push_memory = PushMemory(queue_bytes)
        self._parts = parts

    @property
    def round_steps(self) -> int | None:
        """N in `sync:N`, else None."""
        return self._job.round_steps

    @property
    def parts_of_batch(self) -> int:
        """P in `auto:P`, else 1."""
        return self._job.policy.parts

    def build(self, incarnation: int, state: ShardState | None) -> Shard:
        """Return a shard with the state of a checkpoint, or with its first values."""
        job, parts = self._job, self._parts
        values = drawn_from(SEED) if state is None else stored_values(state)
        storage = parts.storage(self.plan, self.index, self.optimizer, values)
        if state is not None:
            storage.restore_slots(state.slots)
        tables = None
        if job.tables:
            tables = parts.tables(job.tables, SEED, self.index, len(self.plan.shards), job.spec.learning_rate)
            if state is not None:
                tables.restore(state.rows, clock=state.version, files=state.table_files)
        applied = None if state is None else state.applied.copy()
        updates: UpdatePolicy = parts.immediate(storage, applied=applied, tables=tables)
        if job.policy.kind == "auto":
            updates = parts.batches(storage, parts=job.policy.parts, applied=applied, tables=tables)
        if job.round_steps is not None:
            updates = parts.rounds(
                storage,
                round_steps=job.round_steps,
                steps_total=job.steps_total,
                mean=job.mean,
                round_=0 if state is None else state.round or 0,
                tables=tables,
            )
        if state is not None:
            updates.skipped = state.skipped.copy()
        storage.begin_at(updates.version)
        target = identity(self.index, incarnation)
        return parts.shard(target, job.steps_total, storage, updates, tables=tables)
