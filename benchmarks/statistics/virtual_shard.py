"""VirtualShard: the product's shard behind function calls, with cuts in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Generic, TypeVar

from parashard._proto import coordinator_pb2 as pb
from parashard.api.in_process.state import BegunRun
from parashard.checkpoints.state import ShardState
from parashard.client.proto_conversion import plan_message
from parashard.client.pulled_rows import TableSet
from parashard.client.shard_client import ShardClient
from parashard.job.embeddings import tables_of
from parashard.job.load import as_toml
from parashard.plan.embedding import Keys
from parashard.plan.variables import Float32s
from parashard.protocol.messages import Ack, Buffers, Fetched, PullRun, Push, Weights
from parashard.transports import memory
from parashard.transports.base import Greeting, Pending, ReadRows, ShardAddress, View, no_rows
from parashard_coordinator.core.calls import Announcement
from parashard_coordinator.core.job_record import DueCheckpoint
from parashard_coordinator.core.membership import ShardRegistration
from parashard_server.build import ShardBuilder

_Answer = TypeVar("_Answer")


class VirtualShard:
    """The one shard of a simulated job.

    Parameters
    ----------
    run : BegunRun
        The run whose initial variables it holds.
    """

    def __init__(self, run: BegunRun) -> None:
        resolved, store = run.resolved, run.records.store
        plan, _ = run.records.open_plan(resolved.plan)
        reply = pb.GetJobReply(
            run_id=run.run_id,
            job_digest=resolved.digest,
            job_toml=as_toml(resolved.job),
            plan=plan_message(plan),
            initial_sha256=resolved.initial_sha256,
            steps_total=resolved.steps.total,
            data_fingerprint=resolved.spec.fingerprint,
            checkpoint_url=store.url,
        )
        self._run, self._plan = run, plan
        self._tables = TableSet(tables_of(resolved.job), resolved.job.job.seed)
        self._builder = ShardBuilder(reply, 0, store)
        self._incarnation = 1
        self._counted: Counter[int] = Counter()
        self.shard = self._builder.build(1, None)
        self._kept: ShardState | None = None
        self._reader = self.client("lab")

    def client(self, worker: str) -> ShardClient:
        """Return a client of a worker."""
        client = ShardClient(
            self._run.run_id,
            self._run.resolved.digest,
            self._plan,
            worker,
            retry_budget_s=0.0,
            connect=self._connected,
            tables=self._tables,
            sends_norms=self._run.resolved.job.batch_clip_norm is not None,
        )
        self.use(client)
        return client

    def use(self, client: ShardClient) -> None:
        """Have a client use the current incarnation."""
        client.use(View(self._incarnation, (ShardAddress("lab", self._incarnation),)))

    @property
    def version(self) -> int:
        """Number of updates of the weights."""
        return self.shard.updates.version

    @property
    def next_rate(self) -> float:
        """The learning rate of the next update."""
        spec = self._builder.optimizer.spec
        return float(spec.learning_rate * spec.schedule.factor(self.version + 1))

    @property
    def staleness(self) -> Counter[int]:
        """Pushes by staleness, of all incarnations."""
        return self._counted + Counter(self.shard.record.staleness)

    def values(self, keys: Mapping[str, Keys]) -> Mapping[str, Float32s]:
        """Return copies of the present variables, and of rows of tables."""
        pulled = self._reader.pull(round_=self.shard.updates.round, keys=keys)
        return {**pulled.variables, **pulled.rows}

    def commit(self) -> None:
        """Apply a full round."""
        if self.shard.updates.round is not None:
            self.shard.updates.reach(self.shard.updates.round + 1)

    def finish(self, due: DueCheckpoint) -> None:
        """Make the weights those of the job's end."""
        if due.round is not None and due.round != self.shard.updates.round:
            self.shard.updates.reach(due.round)

    def announcement(self) -> Announcement:
        """Return the shard's announcement to the coordinator."""
        updates = self.shard.updates
        where = ShardRegistration(self._incarnation, "lab", "")
        returnable = frozenset({0 if self._kept is None else self._kept.round or 0, updates.round or 0})
        return Announcement(where, updates.applied.copy(), updates.held, updates.skipped.copy(), returnable)

    def cut(self) -> None:
        """Keep a copy of the present state."""
        shard = self.shard
        storage, updates = shard.storage, shard.updates
        assert shard.tables is None, "cuts have no tables"
        shaped = {
            placed.partition: (slice(placed.offset, placed.stop), self._plan.variables[placed.partition.variable].shape)
            for placed in storage.layout
        }
        self._kept = ShardState(
            updates.applied.copy(),
            updates.version,
            updates.round,
            {p: storage.weights[run].reshape(shape).copy() for p, (run, shape) in shaped.items()},
            {
                name: {p: slot[run].reshape(shape).copy() for p, (run, shape) in shaped.items()}
                for name, slot in storage.slots.items()
            },
            updates.skipped.intersection(updates.applied),
        )

    def restore(self) -> None:
        """Begin a new incarnation with the state of the last cut."""
        self._counted = self.staleness
        self._incarnation += 1
        self.shard = self._builder.build(self._incarnation, self._kept)
        self.use(self._reader)

    def _connected(self, where: ShardAddress, greeting: Greeting) -> _Calls:
        return _Calls(self)


class _Done(Generic[_Answer]):
    """A request that the thread that waits for its answer makes itself."""

    def __init__(self, call: Callable[[], _Answer]) -> None:
        self.result = call

    def start(self) -> None:
        """Do nothing: the waiting thread makes the request."""

    def cancel(self) -> None:
        """Nothing is under way."""


class _Calls:
    """A transport to the shard."""

    def __init__(self, holder: VirtualShard) -> None:
        self._holder = holder

    def push(self, push: Push, deadline_s: float) -> Pending[Ack]:
        """Push by a call."""
        return _Done(partial(self._holder.shard.push, push))

    def pull(self, run: PullRun, into: Buffers, deadline_s: float, read: ReadRows = no_rows) -> Pending[Fetched]:
        """Copy by a call."""

        def copied() -> Fetched:
            weights: Weights = self._holder.shard.pull(run)
            for moved in weights.runs:
                memory.scatter(moved.values, into, moved.offset_bytes - run.offset_bytes)
            read(weights.rows)
            return Fetched(weights.version)

        return _Done(copied)

    def close(self) -> None:
        """Nothing is open."""
