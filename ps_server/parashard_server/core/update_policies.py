"""Update policies of a shard: apply each push at once, or together all parts of a batch or all pushes of a round.

Pure. One class for each, chosen when the shard is built, so that `Shard.push` does not depend on the job's consistency.
All keep the applied set beside the weights: every method leaves the two in agreement.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from parashard.errors import MalformedFrame, ParashardError, StaleRound
from parashard.plan.intervals import IntervalSet
from parashard.plan.variables import Float32s
from parashard.protocol.messages import PushResult
from parashard_server.core.step_sum import PartNorms, StepSum
from parashard_server.state.rows.embedding_tables import EmbeddingTables, Pushed
from parashard_server.state.storage import Storage

NO_ROWS: Pushed = {}
"""A push without row gradients."""


class FoldedStep(ParashardError):
    """The gradient of a step to skip is already in its round's sum: the round must begin again."""


class UpdatePolicy:
    """Interface of a shard to the arithmetic of its job's consistency; the defaults are for jobs without rounds."""

    round: int | None = None  # in sync mode the round that starts from the weights

    def __init__(
        self, storage: Storage, *, applied: IntervalSet | None = None, tables: EmbeddingTables | None = None
    ) -> None:
        self._storage = storage
        self._tables = tables
        self.applied = IntervalSet() if applied is None else applied  # steps in the weights
        self.skipped = IntervalSet()  # steps of `held` skipped with an empty push; the shard adds to it

    @property
    def held(self) -> IntervalSet:
        """Steps that have been acknowledged: in the weights, or held for a batch or a round."""
        return self.applied

    @property
    def version(self) -> int:
        """Number of updates of the weights."""
        raise NotImplementedError

    @property
    def buffered_steps(self) -> int:
        """Number of steps that are held and not yet in the weights."""
        return 0

    @property
    def waiting_rows(self) -> Iterable[Pushed]:
        """Row gradients of held steps that are not applied yet."""
        return ()

    def holds(self, step: int) -> bool:
        """Tell whether a step is in the weights or held."""
        return step in self.applied

    def replaceable(self, step: int) -> bool:
        """Tell whether the empty push of a skipped step replaces the step's held gradient."""
        # Never without rounds: a held gradient will be applied, and one shard may apply it, another the empty push.
        # Raises FoldedStep if the gradient is in the round's sum; StaleRound if it is in the weights: in a round all
        # shards must agree.
        return False

    def begin_again(self) -> None:
        """Discard every step that is held and not in the weights."""

    def admit(self, step: int, learning_rate: float | None = None) -> None:
        """Prepare for a step that is not held, or raise StaleRound; this may commit the round before the step's.

        `learning_rate` replaces the job's for this step; all steps of a round have the same (P37). Without rounds,
        steps arrive in any order; leases bound the number of batches in progress.
        """

    def reach(self, round_: int | None) -> None:
        """Bring the weights to the start of a round, or raise StaleRound."""
        if round_ is not None:
            raise MalformedFrame(f"the request names round {round_}; this job's consistency has no rounds")

    def take(
        self,
        step: int,
        gradient: Float32s | None,
        learning_rate: float | None = None,
        rows: Pushed = NO_ROWS,
        norm: float | None = None,
    ) -> PushResult:
        """Take an admitted step's gradient, in the shard's layout; finite, and borrowed for this call only."""
        # None: the push was empty. A gradient without elements only records its step. `rows` are the gradients of
        # tables' rows, checked and borrowed likewise; an empty push has none, and touches no table (P27). `norm` is the
        # norm of the step's gradient over all shards, given if shards clip the batch's gradient.
        raise NotImplementedError


class ImmediateUpdates(UpdatePolicy):
    """`async`, `ssp` and batches of one part: each push is applied on arrival."""

    @property
    def version(self) -> int:
        return self.applied.size

    def take(
        self,
        step: int,
        gradient: Float32s | None,
        learning_rate: float | None = None,
        rows: Pushed = NO_ROWS,
        norm: float | None = None,
    ) -> PushResult:
        """Apply the gradient and record the step."""
        if gradient is None or gradient.size:
            self._storage.apply(
                self._storage.zeros() if gradient is None else gradient,
                t=self.version + 1,
                pushes=int(gradient is not None),
                learning_rate=learning_rate,
            )
        if self._tables is not None and rows:
            self._tables.apply(rows, t=self.version + 1, learning_rate=learning_rate)
        self.applied.add_range(step, step + 1)
        return PushResult.APPLIED


class BatchUpdates(UpdatePolicy):
    """`auto`: the gradients of a batch's parts are summed, and applied once the last one has arrived.

    Workers weight each part by its share of the batch, so that the sum is the batch's gradient. Several batches may be
    in progress; they are applied in order, so that a gradient's staleness is at most the number of other batches in
    progress. A restored shard has no parts of batches that are not applied; these are leased again. Batch b is the
    steps [b P, b P + P), P being `parts`; `clip_norm` bounds the norm of its gradient.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        parts: int,
        applied: IntervalSet | None = None,
        tables: EmbeddingTables | None = None,
        clip_norm: float | None = None,
    ) -> None:
        super().__init__(storage, applied=applied, tables=tables)
        self._parts = parts
        self._clip_norm = clip_norm
        self._norms: dict[int, PartNorms] = {}  # by batch
        self._batches: dict[int, StepSum] = {}
        self._free: list[Float32s] = []  # memory for sums, to reuse

    @property
    def held(self) -> IntervalSet:
        held = self.applied.copy()
        for batch in self._batches.values():
            for start, stop in batch.held.intervals():
                held.add_range(start, stop)
        return held

    @property
    def version(self) -> int:
        return self.applied.size // self._parts

    @property
    def buffered_steps(self) -> int:
        return sum(batch.count for batch in self._batches.values())

    def holds(self, step: int) -> bool:
        batch = self._batches.get(step // self._parts)
        return step in self.applied or (batch is not None and batch.holds(step))

    def batch_of(self, step: int) -> int:
        """Return the number of a step's batch: the version of the weights that it updates."""
        return step // self._parts

    def begin_again(self) -> None:
        """Discard every part of the batches that are not applied."""
        self._free += [batch.memory for batch in self._batches.values()]
        self._batches.clear()
        self._norms.clear()
        self.skipped = self.skipped.intersection(self.applied)

    @property
    def waiting_rows(self) -> Iterable[Pushed]:
        return [rows for batch in self._batches.values() for rows in batch.waiting_rows]

    def take(
        self,
        step: int,
        gradient: Float32s | None,
        learning_rate: float | None = None,
        rows: Pushed = NO_ROWS,
        norm: float | None = None,
    ) -> PushResult:
        """Add a part to its batch, and apply each complete batch whose turn has come."""
        number = step // self._parts
        batch = self._batches.get(number)
        if batch is None:
            memory = self._free.pop() if self._free else self._storage.new_sum()
            first, stop = number * self._parts, (number + 1) * self._parts
            batch = self._batches[number] = StepSum(first, stop, self._storage, memory)
        batch.take(step, gradient, learning_rate, rows)
        if self._clip_norm is not None and gradient is not None:
            self._norms.setdefault(number, PartNorms()).add(self._squared(gradient, rows), norm)
        while (turn := self._batches.get(self.version)) is not None and turn.full:
            self._apply(turn)
        return PushResult.APPLIED if step in self.applied else PushResult.BUFFERED

    def _apply(self, batch: StepSum) -> None:
        """Apply the next batch, which is complete."""
        number = self.version
        scale, rate, rows = 1.0, batch.learning_rate, batch.rows()
        if self._clip_norm is not None and number in self._norms:
            scale = self._norms.pop(number).scale(self._squared(batch.gradient(), rows), self._clip_norm)
        if batch.changes_weights:
            self._storage.apply(batch.gradient(), t=number + 1, scale=scale, pushes=batch.pushes, learning_rate=rate)
        if self._tables is not None and rows:
            self._tables.apply(rows, t=number + 1, scale=scale, learning_rate=rate)
        self.applied.add_range(batch.first, batch.stop)
        self._free.append(self._batches.pop(number).memory)

    def _squared(self, gradient: Float32s, rows: Pushed) -> float:
        """Return the squared norm of a gradient and its rows on this shard, excluding state without gradients."""
        squares = self._storage.squares(gradient) if gradient.size else []
        return sum((*squares, *(float(np.vdot(values, values)) for _, values in rows.values())))


class RoundUpdates(UpdatePolicy):
    """`sync:N`: gradients of a round are folded in step order and applied when the next round begins.

    Invariant: the weights are those that round `round` starts from; `_sum` has the gradients of its steps. A full round
    stays uncommitted until a request names the next one, which needs a lease that the coordinator grants only when
    every shard holds every step of the round. So no shard is ever a round ahead of one that lacks a step. All held
    steps of the round have one learning rate. A round's gradient is the mean over its own steps, or (not `mean`) the
    sum; the last round may be short. `round_` is above 0 if the weights come from a later round's checkpoint.
    """

    round: int

    def __init__(
        self,
        storage: Storage,
        *,
        round_steps: int,
        steps_total: int,
        mean: bool,
        round_: int = 0,
        tables: EmbeddingTables | None = None,
    ) -> None:
        super().__init__(storage, tables=tables)
        self._round_steps = round_steps
        self._steps_total = steps_total
        self._mean = mean
        self.round = round_
        self._sum = self._sum_of(storage.new_sum())
        self.applied = IntervalSet([(0, self._sum.first)])

    @property
    def held(self) -> IntervalSet:
        held = self._sum.held
        held.add_range(0, self._sum.first)
        return held

    @property
    def version(self) -> int:
        return self.round

    @property
    def buffered_steps(self) -> int:
        return self._sum.count

    def holds(self, step: int) -> bool:
        return step < self._sum.first or self._sum.holds(step)

    def replaceable(self, step: int) -> bool:
        """Tell whether a gradient still waits for its turn; once summed, it cannot be replaced."""
        if step in self.skipped or not self.holds(step):
            return False
        if step in self.applied:
            raise StaleRound(
                f"step {step} is in the weights of round {self.round} with its gradient, and cannot be skipped"
            )
        if not self._sum.waits(step):
            raise FoldedStep(f"step {step} is in the sum of round {self.round}")
        return True

    def begin_again(self) -> None:
        """Return to the start of the current round, whose weights are still here."""
        self._sum = self._sum_of(self._sum.memory)
        self.skipped = self.skipped.intersection(self.applied)

    def admit(self, step: int, learning_rate: float | None = None) -> None:
        """Bring the weights to the step's round; refuse a learning rate that differs from the round's held steps."""
        self.reach(step // self._round_steps)
        if self.buffered_steps and learning_rate != self._sum.learning_rate:
            raise StaleRound(
                f"step {step} has the learning rate {learning_rate}; the held steps of round {self.round} have "
                f"{self._sum.learning_rate}"
            )

    def reach(self, round_: int | None) -> None:
        """Commit the current round if the request names the next one; refuse any other but the current."""
        if round_ is None:
            raise MalformedFrame("the request names no round; in this job every one must")
        if round_ == self.round + 1 and self._sum.full:
            self.commit()
        if round_ != self.round:
            raise StaleRound(f"the request is for round {round_}; this shard is at round {self.round}")

    @property
    def waiting_rows(self) -> Iterable[Pushed]:
        return self._sum.waiting_rows

    def take(
        self,
        step: int,
        gradient: Float32s | None,
        learning_rate: float | None = None,
        rows: Pushed = NO_ROWS,
        norm: float | None = None,
    ) -> PushResult:
        """Add the gradient if its turn has come, else keep it; at most N are kept."""
        self._sum.take(step, gradient, learning_rate, rows)
        return PushResult.BUFFERED

    def commit(self) -> None:
        """Apply the full round to the weights."""
        done = self._sum
        scale = 1.0 / (done.stop - done.first) if self._mean else 1.0
        self._storage.apply(
            done.gradient(), t=self.round + 1, scale=scale, pushes=done.pushes, learning_rate=done.learning_rate
        )  # t counts rounds
        if self._tables is not None and (rows := done.rows()):
            self._tables.apply(rows, t=self.round + 1, scale=scale, learning_rate=done.learning_rate)
        self.applied.add_range(done.first, done.stop)
        self.round += 1
        self._sum = self._sum_of(done.memory)

    def _sum_of(self, memory: Float32s) -> StepSum:
        """Return an empty sum of the current round."""
        first, stop = (min(self._steps_total, (self.round + later) * self._round_steps) for later in (0, 1))
        return StepSum(first, stop, self._storage, memory)
