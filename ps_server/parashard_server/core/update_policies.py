"""Update policies of a shard: apply each push at once, the parts of a batch together, or a round's pushes by its name.

Pure. One class for each, chosen when the shard is built, so that `Shard.push` never asks which consistency a job has.
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
"""Of a push that has nothing for tables."""


class FoldedStep(ParashardError):
    """A step that is given up has been added to its round's sum: the round must begin again."""


class UpdatePolicy:
    """The seam between a shard and the arithmetic of its job's consistency: here what all have without rounds."""

    round: int | None = None  # that the weights start, in sync mode

    def __init__(
        self, storage: Storage, *, applied: IntervalSet | None = None, tables: EmbeddingTables | None = None
    ) -> None:
        self._storage = storage
        self._tables = tables
        self.applied = IntervalSet() if applied is None else applied  # in the weights, if these are a checkpoint's
        self.skipped = IntervalSet()  # those of `held` given up with an empty push; the shard adds to it

    @property
    def held(self) -> IntervalSet:
        """Steps that have been acknowledged: in the weights, or held for a batch or a round."""
        return self.applied

    @property
    def version(self) -> int:
        """How often the weights have moved."""
        raise NotImplementedError

    @property
    def buffered_steps(self) -> int:
        """Steps that are held and not yet in the weights."""
        return 0

    @property
    def waiting_rows(self) -> Iterable[Pushed]:
        """What held steps have pushed for tables that has not moved them yet."""
        return ()

    def holds(self, step: int) -> bool:
        """Tell whether a step is in the weights or held."""
        return step in self.applied

    def replaceable(self, step: int) -> bool:
        """Tell whether the empty push of a step given up replaces what is held of it."""
        # Without rounds it never does: a gradient that is held moves the weights, and one shard may have it, another
        # the empty push. Raises FoldedStep if its gradient is in the round's sum; StaleRound if it is in the weights,
        # and all shards must have the same.
        return False

    def begin_again(self) -> None:
        """Forget every step that is held and not in the weights."""

    def admit(self, step: int, learning_rate: float | None = None) -> None:
        """Make ready for a step that is not held, or raise StaleRound; weights may move to the round before it.

        `learning_rate` is the step's, in place of the job's; all steps of a round have the same (P37). Without rounds
        any step comes, in any order: leases bound how many batches are under way.
        """

    def reach(self, round_: int | None) -> None:
        """Make the weights those that a round starts from, or raise StaleRound."""
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
        # None: the push was empty. One of no elements moves nothing: its step is recorded. `rows` are the gradients of
        # rows of tables, checked and borrowed likewise; an empty push has none, and touches no table (P27). `norm` is
        # that of the step's gradient on all shards, where these clip that of its batch.
        raise NotImplementedError


class ImmediateUpdates(UpdatePolicy):
    """`async`, `ssp` and batches of one part: a push moves the weights as it arrives."""

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
    """`auto`: the gradients of a batch's parts are added up, and move the weights once the last one has come.

    A worker has weighed each part by its share of the batch, so that the sum is the batch's gradient. Several batches
    may be under way; they move the weights in their order, so that a gradient is at most as many updates old as there
    are others under way. Of a batch that has not moved the weights, a shard that is restored has nothing: the parts are
    leased again. Batch b is the steps [b P, b P + P), P being `parts`; `clip_norm` bounds the norm of its gradient.
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
        self._free: list[Float32s] = []  # memory of sums

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
        """Return the number of a step's batch: the version of the weights that it moves."""
        return step // self._parts

    def begin_again(self) -> None:
        """Forget every part of a batch that is not whole."""
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
        """Add a part to its batch, and apply each whole batch whose turn has come."""
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
        """Move the weights by a whole batch."""
        number = self.version
        scale, rate, rows = 1.0, batch.learning_rate, batch.rows()
        if self._clip_norm is not None and number in self._norms:
            scale = self._norms.pop(number).scale(self._squared(batch.gradient(), rows), self._clip_norm)
        if batch.moves:
            self._storage.apply(batch.gradient(), t=number + 1, scale=scale, pushes=batch.pushes, learning_rate=rate)
        if self._tables is not None and rows:
            self._tables.apply(rows, t=number + 1, scale=scale, learning_rate=rate)
        self.applied.add_range(batch.first, batch.stop)
        self._free.append(self._batches.pop(number).memory)

    def _squared(self, gradient: Float32s, rows: Pushed) -> float:
        """Return the squared norm of a gradient on this shard, with its rows, without state that has none."""
        squares = self._storage.squares(gradient) if gradient.size else []
        return sum((*squares, *(float(np.vdot(values, values)) for _, values in rows.values())))


class RoundUpdates(UpdatePolicy):
    """`sync:N`: gradients of a round are folded in step order and applied when the next round begins.

    Invariant: the weights are those that round `round` starts from; `_sum` has the gradients of its steps. A round that
    is full stays uncommitted until a request names the next one, which needs a lease that the coordinator grants only
    when every shard holds every step of the round. So no shard is ever a round ahead of one that lacks a step. All held
    steps of the round have one learning rate. A round's gradient is the mean over its own steps, or (not `mean`) the
    sum; the last round may be short. `round_` is not 0 where weights come from a checkpoint.
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
        """A gradient that waits for its turn is; one that is in the sum cannot be taken out of it again."""
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
        """Return to the start of the present round, whose weights are still here."""
        self._sum = self._sum_of(self._sum.memory)
        self.skipped = self.skipped.intersection(self.applied)

    def admit(self, step: int, learning_rate: float | None = None) -> None:
        """Refuse a step of any round but the one that its request may reach, or with another rate than its round's."""
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
        """Return an empty sum of the present round."""
        first, stop = (min(self._steps_total, (self.round + later) * self._round_steps) for later in (0, 1))
        return StepSum(first, stop, self._storage, memory)
