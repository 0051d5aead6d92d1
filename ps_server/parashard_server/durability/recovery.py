"""Recovery: the state that a shard's new incarnation starts from.

The newest checkpoint of its own plan that verifies; else the drained checkpoint that the plan starts from; else the
initial values. Reports skipped checkpoints. Knows no process and no gRPC; called at the start and by a rollback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import Catalogue, CheckpointId, parse_job_id
from parashard.checkpoints.manifest import JobManifest, ShardManifest
from parashard.checkpoints.retention import StoredCheckpoint, given_up
from parashard.checkpoints.state import ShardState, assemble, load, newest_verified
from parashard.errors import DamagedCheckpoint, NotStored, WrongRun
from parashard.figures import counted
from parashard.plan.embedding import bucket_ranges
from parashard.plan.partition import Plan
from parashard.store.claims import Rollback


class Restored(NamedTuple):
    """A state to start from (None: the initial values), the existing checkpoints, and a description."""

    state: ShardState | None
    manifest: ShardManifest | None  # of the shard's own checkpoint that the state is from
    known: list[StoredCheckpoint]
    text: str
    rollbacks: Sequence[Rollback] = ()
    passed_over: bool = False  # a newer checkpoint was skipped: it is damaged or unreadable at present
    damaged: Sequence[CheckpointId] = ()  # those that were skipped and are damaged, if an earlier one is sound


class Restorer:
    """Finds the state that an incarnation of shard `index` of a plan starts from.

    `reply` has the run, the job, and the drained checkpoint that the plan starts from; `rounds`: the job is `sync:N`.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        reply: pb.GetJobReply,
        plan: Plan,
        index: int,
        slots: tuple[str, ...],
        *,
        rounds: bool,
    ) -> None:
        self.catalogue = catalogue
        self._reply = reply
        self._plan = plan
        self._index = index
        self._slots = slots
        self._rounds = rounds
        self._source: JobManifest | None = None
        self.first_round: int | None = 0 if rounds else None
        """The round at which the plan's shards began; a shard can always roll back to it (sync mode)."""
        if reply.source:
            number = parse_job_id(reply.source)
            assert number is not None, reply.source
            self._source = catalogue.job_manifest(number)
            self.first_round = catalogue.part_manifest(self._source, 0).round

    def newest(self, rollbacks: Callable[[int], Sequence[Rollback]] = lambda after: ()) -> Restored:
        """Return the newest state that the shard can start from, without rounds discarded by rollbacks.

        `rollbacks` is `Claims.rollbacks`: the rollbacks by which the incarnations after one began.

        Raises WrongRun if the store's checkpoints are of another run or job; DamagedCheckpoint or StoreFailed if the
        drained checkpoint that the plan starts from is damaged, or on an error of the store: starting from the initial
        values would be wrong.
        """
        ids = self.catalogue.shard_checkpoints(self._plan.version, self._index) if self._rounds else []
        returned = rollbacks(min(id_.incarnation for id_ in ids)) if ids else ()
        state, manifest, skipped = newest_verified(
            self.catalogue,
            self._plan.version,
            self._index,
            lambda found: not given_up(StoredCheckpoint.of(found), returned),
        )
        bad = {id_ for id_, _ in skipped}
        known = [held for held in self._listed() if held.id not in bad]
        said = [f"skipped {id_}: {reason}" for id_, reason in skipped]
        if manifest is not None and state is not None:
            _check_run(manifest, self._reply)
            said.insert(0, f"restored {CheckpointId.of(manifest)} with {counted(len(state.applied), 'step')}")
            if manifest.log_position is not None:
                said.append("steps that only a log of pushes has are computed again: logs are no longer read")
            if skipped:  # its chain ends: the next checkpoint begins another one
                state = replace(state, table_files=())
        else:
            state = self._first()
            resharded = f"resharded {self._reply.source} with {counted(len(state.applied), 'step')}" if state else ""
            said.insert(0, resharded or "initial values")
        damaged = [id_ for id_, error in skipped if manifest and isinstance(error, DamagedCheckpoint)]
        return Restored(state, manifest, known, "; ".join(said), returned, bool(skipped), damaged)

    def at(self, round_: int, ids: list[CheckpointId]) -> ShardState | None:
        """Return the state at a round, from the first of its checkpoints that verifies; None: the initial values."""
        # Raises DamagedCheckpoint if none verifies, and the plan did not begin there.
        for id_ in ids:
            try:
                manifest = self.catalogue.manifest(id_)
                _check_run(manifest, self._reply)
                return load(self.catalogue.store, manifest)
            except (DamagedCheckpoint, NotStored):
                continue
        if round_ == self.first_round:
            return self._first()
        raise DamagedCheckpoint(f"no checkpoint of round {round_} verifies; tried {', '.join(map(str, ids)) or 'none'}")

    def _first(self) -> ShardState | None:
        if self._source is None:
            return None
        old_plan = self.catalogue.plan(self._source.plan_version).to_plan()
        partitions = self._plan.shards[self._index]
        buckets = bucket_ranges(len(self._plan.shards))[self._index]
        return assemble(self.catalogue.store, self._source, old_plan, partitions, self._slots, buckets)

    def _listed(self) -> list[StoredCheckpoint]:
        found = []
        for id_ in self.catalogue.shard_checkpoints(self._plan.version, self._index):
            try:
                found.append(StoredCheckpoint.of(self.catalogue.manifest(id_)))
            except (DamagedCheckpoint, NotStored):
                continue  # reported by the search for the newest
        return found


def _check_run(manifest: ShardManifest, reply: pb.GetJobReply) -> None:
    if (manifest.run_id, manifest.job_digest) != (reply.run_id, reply.job_digest):
        raise WrongRun(
            f"checkpoint {CheckpointId.of(manifest)} is of run {manifest.run_id} (job {manifest.job_digest[:12]}), "
            f"this is run {reply.run_id} (job {reply.job_digest[:12]})"
        )
