"""Shard: the pure core of a parameter server process.

Applies or refuses pushes and answers pulls. No gRPC, no clock, no disk, no randomness. One caller at a time, under a
lock (`parashard_server.shard_host`), so nothing here locks. Every check comes before the first write: a request that
raises has changed nothing but counters, except that it may have committed a full round or swept evicted rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from parashard.errors import (
    MalformedFrame,
    NonFiniteGradient,
    ShapeMismatch,
    StaleIncarnation,
    StalePlan,
    TooEarly,
    WrongRun,
)
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import ELEMENT_BYTES
from parashard.plan.variables import Float32s
from parashard.protocol.messages import Ack, PullRun, Push, PushResult, Target, Weights
from parashard_server.core.update_policies import BatchUpdates, UpdatePolicy
from parashard_server.state.rows.embedding_tables import NO_TABLES, EmbeddingTables, Pushed, TablesCut, decoded
from parashard_server.state.storage import Snapshot, Storage

STALENESS_MAX = 4095
"""Greater values count as this one, so that the histogram is bounded."""
APPLY_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds of the histogram of apply times: a small SGD takes 0.1 ms, Adam on a gigabyte a second."""


@dataclass
class ShardCounters:
    """Counters since the shard's start; every one only grows."""

    applied_pushes: int = 0
    buffered_pushes: int = 0
    duplicate_pushes: int = 0
    skipped_steps: int = 0
    refused_pushes: int = 0
    failed_announcements: int = 0  # that the coordinator answered with an internal error
    push_bytes: int = 0
    push_float32_bytes: int = 0  # the same with every slice in float32
    pull_bytes: int = 0
    pull_unmoved_bytes: int = 0  # not sent, because it has not changed since the caller's version
    push_s: float = 0.0  # time inside the shard, measured by its service
    pull_s: float = 0.0
    unknown_staleness: int = 0
    step_lag_max: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    apply_s: float = 0.0  # time of the requests that updated the weights
    applies: list[int] = field(default_factory=lambda: [0] * (len(APPLY_BOUNDS_S) + 1))
    """Their histogram, by APPLY_BOUNDS_S; the last entry counts those above all bounds."""

    def saw_staleness(self, staleness: int | None) -> None:
        """Count one push's staleness; None is unknown."""
        if staleness is None:
            self.unknown_staleness += 1
        else:
            self.staleness[min(staleness, STALENESS_MAX)] += 1

    def applied_in(self, seconds: float) -> None:
        """Count a request that updated the weights."""
        self.apply_s += seconds
        self.applies[bisect_left(APPLY_BOUNDS_S, seconds)] += 1


NOTHING: Float32s = np.empty(0, np.float32)
"""The gradient of a push with `void`."""


class Cut(NamedTuple):
    """A shard's state at one moment: the steps in its weights, and those weights as soon as they are copied."""

    identity: Target
    applied: IntervalSet
    skipped: IntervalSet  # of the applied ones
    version: int
    round: int | None
    snapshot: Snapshot
    tables: TablesCut


class Shard:
    """One incarnation of a shard: requests must name `identity`; steps outside 0..steps_total-1 are refused."""

    def __init__(
        self,
        identity: Target,
        steps_total: int,
        storage: Storage,
        updates: UpdatePolicy,
        *,
        tables: EmbeddingTables | None = None,
    ) -> None:
        self.identity = identity
        self.steps_total = steps_total
        self.storage = storage
        self.updates = updates
        self.tables = tables
        self.record = ShardCounters()
        self._parts: dict[int, int | None] = {}  # held parts of batches -> the version that they were pulled at

    def push(self, push: Push) -> Ack:
        """Apply a push, or hold it for its batch or round; a repeated push changes nothing.

        The payload is borrowed for this call, and used in place if it is one piece of float32. Raises WrongRun,
        StalePlan, StaleIncarnation if it is not meant for this incarnation; UnknownVariable, ShapeMismatch,
        MalformedFrame, NonFiniteGradient if it can never be valid; StaleRound if it comes too late; FoldedStep if it is
        the empty push of a step whose gradient is in the round's sum: call `begin_round_again`, then `skip`.
        """
        try:
            if push.target != self.identity:
                self.check_target(push.target)
            if not 0 <= push.step < self.steps_total:
                raise MalformedFrame(f"step {push.step} is not one of this job's 0..{self.steps_total - 1}")
            self.record.push_bytes += push.payload.nbytes
            if self.updates.holds(push.step) and not (push.skipped and self.updates.replaceable(push.step)):
                self.record.push_float32_bytes += push.payload.nbytes
                self.record.duplicate_pushes += 1
                return Ack(PushResult.DUPLICATE, self.updates.version, None)
            rate, norm = push.learning_rate, push.norm
            if norm is not None and not 0.0 <= norm < math.inf:
                raise MalformedFrame(
                    f"step {push.step}: the norm of a gradient is finite and at least 0, found {norm!r}"
                )
            if rate is not None and not 0.0 < rate < math.inf:
                raise MalformedFrame(
                    f"step {push.step}: a learning rate must be finite and more than 0, found {rate!r}"
                )
            self.updates.admit(push.step, rate)
            slices_bytes, rows = self._checked(push)
            return self._take(push, slices_bytes, rows)
        except Exception:
            self.record.refused_pushes += 1
            raise

    def pull(self, run: PullRun) -> Weights:
        """Return views of the changed parts of a run of the weights, and rows of tables; valid until the next call.

        Raises WrongRun, StalePlan, StaleIncarnation if the pull is not meant for this incarnation; StaleRound or
        TooEarly if the shard is not at the round or version; MalformedFrame if the run is not within the vector, cuts
        an element, or names a known version above the shard's, or keys are not ascending; UnknownVariable for an
        unknown table or another shard's key.
        """
        if run.target != self.identity:
            self.check_target(run.target)
        begin, end = run.offset_bytes, run.offset_bytes + run.length_bytes
        if end > self.storage.weights.nbytes or begin % ELEMENT_BYTES or end % ELEMENT_BYTES:
            raise MalformedFrame(
                f"a pull of bytes [{begin}, {end}) from a shard of {self.storage.weights.nbytes} bytes of float32"
            )
        if run.keys:
            self._tables_for("a pull").check_keys(run.keys)
        self.updates.reach(run.round)
        version = self.updates.version
        if run.least_version > version:
            raise TooEarly(f"a pull needs weights of {run.least_version} updates; this shard has {version}")
        if run.known_version is not None and run.known_version > version:
            raise MalformedFrame(f"a pull knows version {run.known_version}; this shard is at {version}")
        runs = self.storage.changed_runs(begin, end, run.known_version)
        moved_bytes = sum(run.values.nbytes for run in runs)
        rows = self._tables_for("a pull").pull(run.keys, version) if run.keys else {}
        self.record.pull_bytes += moved_bytes + sum(found.values.nbytes for found in rows.values())
        self.record.pull_unmoved_bytes += end - begin - moved_bytes
        return Weights(version, runs, rows)

    def begin_round_again(self, incarnation: int) -> None:
        """Continue as another incarnation with the same weights, discarding the current round's gradients."""
        self.identity = self.identity._replace(incarnation=incarnation)
        self.updates.begin_again()

    def skip(self, step: int, learning_rate: float | None = None) -> None:
        """Take the empty push of a skipped step, as if it arrived now."""
        self.updates.take(step, None, learning_rate)
        self._note_skip(step)
        self.record.buffered_pushes += 1

    def cut(self) -> Cut:
        """Begin a checkpoint of the current weights, unaffected by later updates."""
        updates = self.updates
        return Cut(
            self.identity,
            updates.applied.copy(),
            updates.skipped.intersection(updates.applied),
            updates.version,
            updates.round,
            self.storage.snapshot(),
            NO_TABLES if self.tables is None else self.tables.cut(updates.version),
        )

    def _take(self, push: Push, slices_bytes: int, rows: Pushed) -> Ack:
        gradient: Float32s | None = NOTHING if push.void else None  # None: it is empty
        if push.payload.on_device is not None:
            gradient = push.payload.on_device  # the model has checked that it is finite, with its loss (P6)
        elif push.slices:
            gradient = self.storage.decode_gradient(push.slices, push.payload.whole()[:slices_bytes])
            if not self.storage.is_finite(gradient):
                raise NonFiniteGradient(f"step {push.step}: the gradient has a value that is not finite")
        staleness = None if push.pulled_version is None else self.updates.version - push.pulled_version
        if staleness is not None and staleness < 0:
            raise MalformedFrame(
                f"step {push.step}: pulled at version {push.pulled_version}, this shard is at {self.updates.version}"
            )
        lag = push.step - self.updates.applied.lowest_missing()
        # From here on the weights may have changed: an error is a broken invariant and ends the process.
        result = self.updates.take(push.step, gradient, push.learning_rate, rows, push.norm)
        if isinstance(self.updates, BatchUpdates):
            self._count_staleness_of_batches(self.updates, push)
        else:
            self.record.saw_staleness(staleness)
        self.record.step_lag_max = max(self.record.step_lag_max, lag)
        if push.skipped:
            self._note_skip(push.step)
        if result is PushResult.APPLIED:
            self.record.applied_pushes += 1
        else:
            self.record.buffered_pushes += 1
        return Ack(result, self.updates.version, staleness)

    def _count_staleness_of_batches(self, updates: BatchUpdates, push: Push) -> None:
        """Count the staleness of those parts whose batch is applied."""
        self._parts[push.step] = push.pulled_version
        for step in [step for step in self._parts if step in updates.applied]:
            pulled_version = self._parts.pop(step)
            self.record.saw_staleness(None if pulled_version is None else updates.batch_of(step) - pulled_version)

    def _note_skip(self, step: int) -> None:
        self.updates.skipped.add(step)
        self.record.skipped_steps += 1

    def check_target(self, target: Target) -> None:
        """Refuse a request that is not meant for this incarnation of this shard."""
        mine = self.identity
        if (target.run_id, target.job_digest, target.shard) != (mine.run_id, mine.job_digest, mine.shard):
            raise WrongRun(
                f"the request is for shard {target.shard} of run {target.run_id or '(none)'} "
                f"(job {target.job_digest[:12]}); this is shard {mine.shard} of run {mine.run_id} "
                f"(job {mine.job_digest[:12]})"
            )
        if target.plan_version != mine.plan_version:
            raise StalePlan(f"the request names plan {target.plan_version}; this shard has plan {mine.plan_version}")
        if target.incarnation != mine.incarnation:
            raise StaleIncarnation(
                f"the request names incarnation {target.incarnation} of shard {mine.shard}; this is "
                f"incarnation {mine.incarnation}"
            )

    def _checked(self, push: Push) -> tuple[int, Pushed]:
        """Check and count a push's slices; return their size in bytes, and views of its row gradients."""
        if push.void and (push.slices or push.rows or push.skipped or self.updates.round is not None):
            raise MalformedFrame(f"step {push.step}: a push that moves nothing has no slices, and no place in a round")
        size_bytes, elements = self.storage.check_slices(push.slices)
        needed_bytes = size_bytes + sum(piece.size_bytes for piece in push.rows)
        if needed_bytes != push.payload.nbytes:
            raise ShapeMismatch(
                f"step {push.step}: the slices need {needed_bytes} bytes, the push has {push.payload.nbytes}"
            )
        rows = self._checked_rows(push, size_bytes) if push.rows else {}
        self.record.push_float32_bytes += elements * ELEMENT_BYTES + sum(piece.float32_bytes for piece in push.rows)
        return size_bytes, rows

    def _checked_rows(self, push: Push, begin_bytes: int) -> Pushed:
        """Check a push's rows, whose payload begins at a byte, and return views of their gradients."""
        if push.skipped:
            raise MalformedFrame(f"step {push.step}: gradients of rows, and an empty push has no rows")
        tables = self._tables_for(f"step {push.step}: gradients")
        tables.check_slices(push.rows)
        pushed = decoded(push.rows, push.payload.whole()[begin_bytes:])
        checked = tables.checked(pushed, self.updates.waiting_rows, now=self.updates.version)
        tables.count_bytes(push.rows)
        return checked

    def _tables_for(self, what: str) -> EmbeddingTables:
        if self.tables is None:
            raise MalformedFrame(f"{what} of rows, and this job has no tables")
        return self.tables
