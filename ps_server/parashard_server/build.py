"""Builds a shard from the coordinator's description of the job."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.row_files import iterate_initial_rows
from parashard.checkpoints.state import ShardState, first_slots, first_values
from parashard.client.proto_conversion import plan_from
from parashard.encodings import codec
from parashard.errors import ConfigurationError, Unavailable
from parashard.job.embeddings import tables_of
from parashard.job.load import job_from_toml
from parashard.job.schema import Job
from parashard.plan.flat import FlatLayout
from parashard.plan.partition import ELEMENT_BYTES, Partition
from parashard.plan.variables import Float32s, Variable
from parashard.process.resources import threads_for
from parashard.protocol.messages import Target
from parashard.store import Store
from parashard.transports.base import allows
from parashard.transports.shared_weights import WeightMemory, weight_memory
from parashard_server.core.shard import Shard
from parashard_server.core.update_policies import BatchUpdates, ImmediateUpdates, RoundUpdates, UpdatePolicy
from parashard_server.push_memory import PushMemory
from parashard_server.state import cuda_storage
from parashard_server.state.cuda_device import open_device
from parashard_server.state.cuda_storage import CudaStorage, ShardDevice
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Before, Optimizer
from parashard_server.state.rows.embedding_tables import EmbeddingTables
from parashard_server.state.storage import InitialRows, Storage, drawn_from, offsets_of


class ShardBuilder:
    """Builds the incarnations of one shard of a job, as the coordinator's reply describes it.

    `store` has initial values that are not drawn from the seed. `device` overrides the job's. With a `flat` layout its
    vectors have that layout, and a model of this process computes with the weights in place.
    """

    def __init__(
        self,
        reply: pb.GetJobReply,
        index: int,
        store: Store | None = None,
        *,
        device: str = "",
        open_device: Callable[[str, int], ShardDevice | None] = open_device,
        flat: FlatLayout | None = None,
    ) -> None:
        self.job = job_from_toml(reply.job_toml, [("cluster.shard_device", device, "--device")] if device else [])
        self.plan = plan_from(reply.plan)
        self.index = index
        self._reply = reply
        self._store = store
        if not 0 <= index < len(self.plan.shards):
            last = len(self.plan.shards) - 1
            raise ConfigurationError(f"the job has shards 0..{last}; this process was started as {index}")
        self._device = open_device(self.job.cluster.shard_device, index)
        self._flat = flat
        before = updates_before(self.job, reply.steps_total)
        updates = before.schedule + _updates(self.job, reply.steps_total)
        self.optimizer = Optimizer(
            self.job.optimizer.resolved(updates),
            fused if self._device is None else self._device.kernels,
            before=before,
        )
        cluster = self.job.cluster
        self._tables = [replace(table, optimizer=table.optimizer.resolved(updates)) for table in tables_of(self.job)]
        rows_bytes = sum(table.push_bytes_max for table in self._tables)
        dense_bytes = ELEMENT_BYTES * self.plan.shard_elements(index)
        # Memory budget of pushes to all incarnations of the shard.
        self.push_memory = PushMemory(cluster.push_memory_bytes(dense_bytes + rows_bytes, self.job.depth_max))
        # The bits do not depend on the number of threads.
        fused.use_threads(threads_for(cluster.shard_threads, cluster.shards, reproducible=False))
        if self._device is not None:
            states = {self.plan.variables[p.variable].state for p in self.plan.shards[index]}
            cuda_storage.warm_up(self._device, self.optimizer, states)
        beside = ThreadPoolExecutor(1, "kernels")
        self._kernels = beside.submit(self._load_kernels)
        beside.shutdown(wait=False)

    def _load_kernels(self) -> None:
        """Compile or load the kernels of this job, which takes longer than the rest of a start."""
        fused.warm_up(rounds=self.job.consistency.policy.steps_of_update > 1)
        codec.warm_up(self.plan.variables.values())
        if self._device is None:
            self.optimizer.warm_up()
        if self._tables:
            fused.warm_up_rows()
            codec.warm_up_rows(self._tables)
        for table in self._tables:
            Optimizer(table.optimizer, by_row=True).warm_up()

    @property
    def round_steps(self) -> int | None:
        """N in `sync:N`, else None."""
        policy = self.job.consistency.policy
        return policy.bound if policy.kind == "sync" else None

    def build(self, incarnation: int, state: ShardState | None) -> Shard:
        """Return a shard with the state of a checkpoint, or with its initial values, ready to serve."""
        # The kernels load on another thread meanwhile, and while the caller claims and reads; no push waits for them.
        try:
            shard = self._build(incarnation, state)
        except MemoryError as error:
            if not self.plan.layouts[self.index]:
                raise
            raise Unavailable(self._without_memory(error)) from error
        self._kernels.result()
        return shard

    def _without_memory(self, error: MemoryError) -> str:
        layout, slots = self.plan.layouts[self.index], len(self.optimizer.slots)
        largest = max(layout, key=lambda placed: placed.elements).partition
        mebibytes = ELEMENT_BYTES * (1 + slots) * self.plan.shard_elements(self.index) / (1 << 20)
        return (
            f"no memory for {mebibytes:,.1f} MiB of weights and {slots} slots of the optimizer; the largest part is "
            f"rows [{largest.row_start}, {largest.row_stop}) of variable {largest.variable!r}: {error}"
        )

    def _build(self, incarnation: int, state: ShardState | None) -> Shard:
        job, plan, reply = self.job, self.plan, self._reply
        values = self._first_values() if state is None else stored_values(state)
        memory = weight_memory(offsets_of(plan.layouts[self.index]), shared=allows(job.cluster.transport, "shm"))
        storage = self._storage(values, memory)
        tables = None
        if self._tables:
            rate = job.optimizer.learning_rate
            before = updates_before(job, reply.steps_total)
            tables = EmbeddingTables(self._tables, job.job.seed, self.index, len(plan.shards), rate, before)
        if state is None and reply.initial_sha256 and self._store is not None:
            if tables is not None:
                tables.begin_with(iterate_initial_rows(self._store, reply.job_digest, tables.buckets))
            held = [placed.partition for placed in plan.layouts[self.index]]
            storage.restore_slots(first_slots(self._store, reply.job_digest, plan.variables, held))
        if state is not None:
            storage.restore_slots(state.slots)
            if tables is not None:
                tables.restore(state.rows, clock=state.version, files=state.table_files)
        updates = self._updates(storage, state, tables)
        if state is not None:
            updates.skipped = state.skipped.copy()
        storage.begin_at(updates.version)
        identity = Target(reply.run_id, reply.job_digest, plan.version, self.index, incarnation)
        return Shard(identity, reply.steps_total, storage, updates, tables=tables)

    def _first_values(self) -> InitialRows:
        """Return the source of initial values: the store for the variables that it has, the seed for the others."""
        drawn = drawn_from(self.job.job.seed)
        if not self._reply.initial_sha256:
            return drawn
        assert self._store is not None, "a job with first values of its own, and no store"
        plan = self.plan
        stored = first_values(self._store, self._reply.job_digest, plan.variables, plan.shards[self.index])

        def rows(variable: Variable, start: int, stop: int) -> Float32s:
            values = stored.get(Partition(variable.name, start, stop))
            return drawn(variable, start, stop) if values is None else values

        return rows

    def _storage(self, initial: InitialRows, memory: WeightMemory) -> Storage:
        if self._device is None:
            return Storage(self.plan, self.index, self.optimizer, initial, memory=memory)
        return CudaStorage(
            self.plan, self.index, self.optimizer, initial, device=self._device, memory=memory, flat=self._flat
        )

    def _updates(self, storage: Storage, state: ShardState | None, tables: EmbeddingTables | None) -> UpdatePolicy:
        parts = self.job.consistency.policy.parts
        if self.round_steps is None:
            applied = None if state is None else state.applied.copy()
            if parts > 1:
                return BatchUpdates(
                    storage, parts=parts, applied=applied, tables=tables, clip_norm=self.job.batch_clip_norm
                )
            return ImmediateUpdates(storage, applied=applied, tables=tables)
        return RoundUpdates(
            storage,
            round_steps=self.round_steps,
            steps_total=self._reply.steps_total,
            mean=self.job.consistency.reduce == "mean",
            round_=0 if state is None else state.round or 0,
            tables=tables,
        )


def stored_values(state: ShardState) -> InitialRows:
    """Return the source of a checkpoint's values, by the partitions of its plan."""
    return lambda variable, start, stop: state.variables[Partition(variable.name, start, stop)]


def updates_before(job: Job, steps_total: int) -> Before:
    """Return the number of updates before a job: of its initial optimizer state, else of the epochs before it."""
    done = job.job.updates_before
    if done is not None:
        return Before(done, done)
    steps_per_epoch = steps_total // job.job.epochs
    return Before(0, _updates(job, (job.job.first_epoch or 0) * steps_per_epoch))


def _updates(job: Job, steps: int) -> int:
    """Return the number of updates that `steps` steps make: the unit of learning-rate schedules."""
    return -(-steps // job.consistency.policy.steps_of_update)
