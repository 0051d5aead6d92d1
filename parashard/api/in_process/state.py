"""State: the shard of a run in this process, its records in the run's store, and their client.

`LocalClient` calls the shard's request handler, as a server does with a worker's requests. A push of encoded gradients
or of rows is prepared by `ShardClient`; others are taken as a `Task` has checked them. A pull returns read-only views
of the shard's weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import Catalogue, part_of
from parashard.checkpoints.retention import CommonRounds
from parashard.client.proto_conversion import plan_message
from parashard.client.pulled import Pulled, read_only
from parashard.client.pulled_rows import NO_TABLES, PulledRows, RowPart, TableSet
from parashard.client.shard_client import Pushed, ShardClient
from parashard.job.embeddings import tables_of
from parashard.job.load import as_toml
from parashard.job.schema import Job
from parashard.models.declaration import DeclaredJob
from parashard.plan.embedding import Keys
from parashard.plan.flat import FlatArrays, FlatLayout
from parashard.plan.partition import Plan
from parashard.plan.variables import Float32s
from parashard.protocol.messages import NO_KEYS, Ack, Buffers, Fetched, PullRun, Push, Weights
from parashard.store import Store
from parashard.store.claims import Claims, claim_incarnation
from parashard.transports.base import Deferred, Pending, ReadRows, ShardAddress, View, no_rows
from parashard_coordinator.core.calls import Announcement
from parashard_coordinator.core.membership import ShardRegistration
from parashard_coordinator.run.resolve import ResolvedJob, resolve
from parashard_coordinator.run.store import RunIdentity, RunStore
from parashard_coordinator.shards import ShardRecord, record_of
from parashard_server.build import ShardBuilder
from parashard_server.durability.checkpointer import Checkpointer
from parashard_server.durability.lifecycle import ShardLifecycle
from parashard_server.serving.grpc_service import inspection
from parashard_server.serving.request_handler import RequestHandler
from parashard_server.shard_host import AdmissionLock, ShardHost
from parashard_server.state.cuda_device import open_device

NO_ROWS = PulledRows(NO_TABLES)
TURN_S = 60.0  # longest wait of a request while a partition is copied for a checkpoint


class BegunRun(NamedTuple):
    """A run that was begun or resumed."""

    run_id: str
    resolved: ResolvedJob
    records: RunStore


def begin_or_resume(job: Job, declared: DeclaredJob, store: Store, *, resume: bool) -> BegunRun:
    """Begin a run in a store, or resume the one that it has; a job that does not match writes nothing."""
    unclaimed, drawn = RunStore(store, 0), os.urandom(8).hex()
    begun = unclaimed.find_run(drawn, resume=resume)
    kept = None if begun is None else unclaimed.catalogue.initial_manifest(begun.job_digest)
    resolved = resolve(job, declared, kept=kept)
    identity = RunIdentity(resolved.digest, resolved.identity, as_toml(job))
    run_id = unclaimed.check_run(drawn, identity, resume=resume)
    records = RunStore(store, claim_incarnation(store, "coordinator"))
    records.keep_initial(resolved.digest, resolved.initial, resolved.initial_rows, resolved.initial_slots)
    records.keep_preprocessing(resolved.spec.preprocessing)
    records.begin_run(run_id, identity)
    return BegunRun(run_id, resolved, records)


def computes_at_the_weights(job: Job, plan: Plan) -> bool:
    """Tell whether weights and gradients stay on one GPU, which needs a job without tables and encodings."""
    on_one_gpu = job.cluster.shard_device == job.cluster.device != "cpu"
    return on_one_gpu and not job.tables and all(v.encoding == "float32" for v in plan.variables.values())


class State:
    """The shard of a run, in this process; restored from the newest checkpoint, else with initial values."""

    def __init__(self, run: BegunRun) -> None:
        resolved, store = run.resolved, run.records.store
        job = resolved.job
        plan, source = run.records.open_plan(resolved.plan)
        reply = pb.GetJobReply(
            run_id=run.run_id,
            job_digest=resolved.digest,
            job_toml=as_toml(job),
            plan=plan_message(plan),
            initial_sha256=resolved.initial_sha256,
            steps_total=resolved.steps.total,
            data_fingerprint=resolved.spec.fingerprint,
            checkpoint_url=store.url,
            source=source,
        )
        self.plan = plan
        self._run = run
        self._tables = TableSet(tables_of(job), job.job.seed)
        flat = FlatLayout.of(resolved.plan.variables) if computes_at_the_weights(job, plan) else None
        builder = ShardBuilder(reply, 0, store, open_device=partial(open_device, own_stream=flat is None), flat=flat)
        claims = Claims(store, "shard-0", os.urandom(8).hex())
        self._lifecycle = ShardLifecycle(builder, reply, Catalogue(store), claims)
        self._host, self._checkpointer = self._lifecycle.host, self._lifecycle.checkpointer
        self._broken = False
        self._host.lock = AdmissionLock(job.cluster.queue_pushes, self._note_broken)
        self._plane = RequestHandler(self._host, self._lifecycle)
        self.client = LocalClient(
            run.run_id,
            resolved.digest,
            plan,
            "fit",
            retry_budget_s=0.0,
            connect=lambda where, greeting: _Calls(self._plane),
            tables=self._tables,
        )
        self.client.hold(self._plane, self._host, self._checkpointer)
        self._checkpointer.start()

    def save_soon(self, round_: int) -> None:
        """Save the variables at the start of a later round, in the background."""
        self._checkpointer.name_ahead(round_)

    def save(self) -> None:
        """Save the variables of the current round now."""
        if not self._broken:
            self._checkpointer.take()

    def finish(self, steps: int, round_: int) -> str:
        """Save the final checkpoint, after `steps` steps, and return its name."""
        part = part_of(self._checkpointer.take(round_))
        run = self._run
        return run.records.add_job_manifest(run.run_id, run.resolved.digest, self.plan, steps, [part], final=True)

    @property
    def saved_steps(self) -> int:
        """Number of steps in the weights, which after `save` are saved."""
        return len(self._host.shard.updates.applied)

    def announcement(self) -> Announcement:
        """Return the shard's announcement to a coordinator."""
        shard = self._host.shard
        updates = shard.updates
        where = ShardRegistration(shard.identity.incarnation, "this process", "")
        returnable = frozenset(self._lifecycle.returnable())
        restored = self._host.restored
        return Announcement(where, updates.applied.copy(), updates.held, updates.skipped.copy(), returnable, restored)

    def record(self) -> ShardRecord:
        """Return the shard's counters, as reported to a coordinator."""
        reply = inspection(self._host.shard)
        saved = self._checkpointer.record
        reply.checkpoints, reply.failed_checkpoints = saved.stored, saved.failed
        reply.checkpoint_error, reply.checkpoint_bytes = saved.error, saved.bytes
        reply.checkpoint_s, reply.checkpoint_stall_s = saved.seconds, saved.stall_s
        return record_of(0, reply)

    def close(self) -> None:
        """Finish a checkpoint in progress, and release all resources."""
        self._checkpointer.stop()
        self.client.close()

    def _note_broken(self, error: BaseException) -> None:
        """Stop saving, since the weights may be partly updated; the caller gets the error itself."""
        self._broken = True
        self._checkpointer.pending = None


class LocalClient(ShardClient):
    """A client of the shard in this process: it pulls read-only views, which change when the next round is pulled.

    On a GPU they are the live weights, and gradients are pushed from GPU memory.
    """

    def hold(self, plane: RequestHandler, host: ShardHost, checkpointer: Checkpointer) -> None:
        """Use this shard."""
        shard = host.shard
        self._plane, self._host, self._checkpointer = plane, host, checkpointer
        self._round: int | None = None  # the last one pulled
        self.use(View(1, (ShardAddress("fit", shard.identity.incarnation),)))
        self._variables = self._on_host() if shard.storage.resident is None else shard.storage.resident
        variables = self._plan.variables
        self._encodes = any(variable.encoding != "float32" for variable in variables.values())
        self._whole = tuple(piece for _, piece in self._slices[0] if not variables[piece.partition.variable].frozen)
        self._trained = frozenset(piece.partition.variable for piece in self._whole)
        self._push_bytes = sum(piece.size_bytes for piece in self._whole)

    def pull(
        self,
        *,
        step: int | None = None,
        round_: int | None = None,
        keys: Mapping[str, Keys] = NO_KEYS,
        least_version: int = 0,
    ) -> Pulled:
        """Return the variables at the start of a round, and copies of the rows of `keys`."""
        shard = self._host.shard
        if step is None or round_ != self._round:  # once a round, and for each evaluation
            self._round = None if step is None else round_
            self._reach(round_, 0 if self._variables is shard.storage.resident else shard.storage.weights.nbytes)
            self._checkpointer.saved.common = CommonRounds(round_ or 0)  # the only shard, so all shards have the round
        rows = NO_ROWS
        if keys:
            rows = PulledRows(self._tables, keys)
            for (part,) in rows.request_batches(1):
                run = PullRun(shard.identity, round_, None, 0, 0, None, "", rows.keys_of(part))
                self._plane.pull(run, TURN_S, partial(_fill, rows, part))
        return _Views(self._variables, rows, shard.identity.incarnation)

    def push(
        self,
        step: int,
        gradients: Mapping[str, Float32s],
        pulled: Pulled | None,
        *,
        skipped: bool = False,
        learning_rate: float | None = None,
        void: bool = False,
        keys: Mapping[str, Keys] = NO_KEYS,
        norm: float | None = None,
    ) -> Pushed:
        """Push a step's gradients, as a `Task` returns them; those on a GPU in the layout of the weights stay there."""
        if self._encodes or keys or (pulled is not None and pulled.keys):
            return super().push(
                step, gradients, pulled, skipped=skipped, learning_rate=learning_rate, void=void, keys=keys, norm=norm
            )
        shard, slices = self._host.shard, self._whole
        if shard.storage.resident is not None and isinstance(gradients, FlatArrays):
            assert gradients.layout == shard.storage.resident.layout, "gradients lie as the weights do"
            payload = Buffers.of_device(gradients.run, self._push_bytes)
        else:
            if not gradients.keys() >= self._trained:
                slices = tuple(piece for piece in slices if piece.partition.variable in gradients)
            given = (gradients[piece.partition.variable] for piece in slices)
            payload = Buffers([np.ascontiguousarray(gradient, np.float32).data for gradient in given])
        push = Push(
            shard.identity, self._worker, step, slices, skipped, None, payload, learning_rate=learning_rate, void=void
        )
        return Pushed((self._plane.push(push, TURN_S),), (push.target.incarnation,))

    def on_host(self, variables: Mapping[str, Float32s]) -> Mapping[str, Float32s]:
        """Return the variables pulled last in host memory; valid until the next pull."""
        shard = self._host.shard
        if variables is not shard.storage.resident:
            return variables
        self._reach(shard.updates.round, shard.storage.weights.nbytes)
        return self._on_host()

    def _reach(self, round_: int | None, length_bytes: int) -> None:
        """Advance the weights to a round, and copy `length_bytes` of them to host memory."""
        run = PullRun(self._host.shard.identity, round_, None, 0, length_bytes, None, "")
        self._plane.pull(run, TURN_S, lambda _: None)

    def _on_host(self) -> dict[str, Float32s]:
        storage = self._host.shard.storage
        return read_only(
            {
                (name := placed.partition.variable): storage.weights[placed.offset : placed.stop].reshape(
                    self._plan.variables[name].shape
                )
                for placed in storage.layout
            }
        )


class _Views(Pulled):
    """Views of the variables at the start of a round, and rows."""

    def __init__(self, variables: Mapping[str, Float32s], rows: PulledRows, incarnation: int) -> None:
        self.variables = variables
        self.rows, self.keys = rows.values, rows.keys
        self.versions = (None,)  # type: ignore[assignment]  # rounds have no staleness to report
        self.incarnations = (incarnation,)
        self.waited_s = 0.0

    def release(self) -> None:
        """Do nothing: the arrays belong to the shard."""


def _fill(rows: PulledRows, part: RowPart, weights: Weights) -> None:
    rows.fill(part, weights.rows)


class _Calls:
    """A transport to the shard in this process."""

    def __init__(self, plane: RequestHandler) -> None:
        self._plane = plane

    def push(self, push: Push, deadline_s: float) -> Pending[Ack]:
        """Push by a function call."""
        return Deferred(lambda: self._plane.push(push, TURN_S))

    def pull(self, run: PullRun, into: Buffers, deadline_s: float, read: ReadRows = no_rows) -> Pending[Fetched]:
        """Not used: `LocalClient.pull` returns views."""
        raise AssertionError(run)

    def close(self) -> None:
        """Do nothing: there is no connection."""
