"""Update policies of a shard: apply each push at once, or fold a round's pushes in step order.

Pure. One class for each, chosen when the shard is built, so that `Shard.push` never asks which consistency a job has.
Both keep the applied set beside the weights: every method leaves the two in agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from parashard.errors import MalformedFrame, ParashardError, StaleRound
from parashard.plan.intervals import IntervalSet
from parashard.plan.variables import Float32s
from parashard.protocol.messages import PushResult
from parashard_server.state.kernels import fused
from parashard_server.state.rows.tables import Pushed, Tables, copied, summed
from parashard_server.state.storage import Storage

_ZERO = np.float32(0)
NO_ROWS: Pushed = {}
"""Of a push that has nothing for tables."""


class FoldedStep(ParashardError):
    """A step that is given up has been added to its round's sum: the round must begin again."""


class UpdatePolicy(Protocol):
    """The seam between a shard and the arithmetic of its job's consistency."""

    applied: IntervalSet
    """Steps whose gradients are in the weights."""
    skipped: IntervalSet
    """Steps of `held` whose push was empty because the step was given up; the shard adds to it."""

    @property
    def round(self) -> int | None:
        """The round that the weights start, in sync mode; None where there are no rounds."""

    @property
    def held(self) -> IntervalSet:
        """Steps that have been acknowledged: in the weights, or held for the current round."""

    @property
    def version(self) -> int:
        """How often the weights have moved."""

    @property
    def buffered_steps(self) -> int:
        """Steps that are held and not yet in the weights."""

    def holds(self, step: int) -> bool:
        """Tell whether a step is in the weights or held."""

    def replaceable(self, step: int) -> bool:
        """Tell whether the empty push of a step given up replaces what is held of it.

        Raises
        ------
        FoldedStep
            If its gradient is in the round's sum.
        StaleRound
            If its gradient is in the weights, and all shards must have the same.
        """

    def begin_again(self) -> None:
        """Forget every step that is held and not in the weights."""

    def admit(self, step: int, learning_rate: float | None = None) -> None:
        """Make ready for a step that is not held, or raise StaleRound; weights may move to the round before it.

        `learning_rate` is the step's, in place of the job's; all steps of a round have the same (P37).
        """

    def reach(self, round_: int | None) -> None:
        """Make the weights those that a round starts from, or raise StaleRound."""

    @property
    def waiting_rows(self) -> Iterable[Pushed]:
        """What held steps have pushed for tables that has not moved them yet."""

    def take(
        self,
        step: int,
        gradient: Float32s | None,
        staleness: int | None,
        learning_rate: float | None = None,
        rows: Pushed = NO_ROWS,
    ) -> PushResult:
        """Take an admitted step's gradient, in the shard's layout; finite, and borrowed for this call only.

        None: the push was empty. One of no elements moves nothing: its step is recorded. `rows` are the gradients of
        rows of tables, checked and borrowed likewise; an empty push has none, and touches no table (P27).
        """


class ImmediateUpdates:
    """`async` and `ssp`: a push moves the weights as it arrives.

    Parameters
    ----------
    storage : Storage
        What moves.
    damping : callable, optional
        From a push's staleness to what multiplies the learning rate; unknown staleness counts as 0.
    applied : IntervalSet, optional
        The steps in the storage's weights, where these come from a checkpoint.
    tables : Tables, optional
        What moves beside it; None: the job has no tables.
    """

    round = None

    def __init__(
        self,
        storage: Storage,
        *,
        damping: Callable[[int], float] | None = None,
        applied: IntervalSet | None = None,
        tables: Tables | None = None,
    ) -> None:
        self._storage = storage
        self._tables = tables
        self._damping = damping
        self.applied = IntervalSet() if applied is None else applied
        self.skipped = IntervalSet()

    @property
    def held(self) -> IntervalSet:
        return self.applied

    @property
    def version(self) -> int:
        return len(self.applied)

    @property
    def buffered_steps(self) -> int:
        return 0

    def holds(self, step: int) -> bool:
        return step in self.applied

    def replaceable(self, step: int) -> bool:
        """What is held is in the weights."""
        return False

    def begin_again(self) -> None:
        """Nothing waits outside the weights."""

    def admit(self, step: int, learning_rate: float | None = None) -> None:
        """Admit any step, in any order."""

    def reach(self, round_: int | None) -> None:
        """Refuse a request that names a round: this job has none."""
        if round_ is not None:
            raise MalformedFrame(f"the request names round {round_}; this job's consistency has no rounds")

    @property
    def waiting_rows(self) -> Iterable[Pushed]:
        return ()

    def take(
        self,
        step: int,
        gradient: Float32s | None,
        staleness: int | None,
        learning_rate: float | None = None,
        rows: Pushed = NO_ROWS,
    ) -> PushResult:
        """Apply the gradient and record the step."""
        damping = self._damping(staleness or 0) if self._damping else 1.0
        if gradient is None or gradient.size:
            self._storage.apply(
                self._storage.zeros() if gradient is None else gradient,
                t=len(self.applied) + 1,
                damping=damping,
                pushes=int(gradient is not None),
                learning_rate=learning_rate,
            )
        if self._tables is not None and rows:
            self._tables.apply(rows, t=len(self.applied) + 1, damping=damping, learning_rate=learning_rate)
        self.applied.add(step)
        return PushResult.APPLIED


class RoundUpdates:
    """`sync:N`: gradients of a round are folded in step order and applied when the next round begins.

    Invariant: the weights are those that round `round` starts from; `_sum` is the sum of the gradients of its steps
    before `_next_fold`, added in step order, and anything while there is none (`_pushes`); `_early` has those that
    arrived before their turn. A round that is full stays uncommitted until a request names the next one, which needs a
    lease that the coordinator grants only when every shard holds every step of the round. So no shard is ever a round
    ahead of one that lacks a step. `_learning_rate` is that of all held steps of the round; None while none is held,
    and for the job's.

    Parameters
    ----------
    storage : Storage
        What moves.
    round_steps : int
        N.
    steps_total : int
        S; the last round may be short.
    mean : bool
        True: a round's gradient is the mean over its own steps; False: the sum.
    round_ : int
        The round that the storage's weights start; not 0 where they come from a checkpoint.
    tables : Tables, optional
        What moves beside it; None: the job has no tables.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        round_steps: int,
        steps_total: int,
        mean: bool,
        round_: int = 0,
        tables: Tables | None = None,
    ) -> None:
        self._storage = storage
        self._tables = tables
        self._rows: dict[int, Pushed] = {}  # of the held steps of the round; their sum is made when it ends
        self._round_steps = round_steps
        self._steps_total = steps_total
        self._mean = mean
        self.round = round_
        self._next_fold = self._first(round_)
        self.applied = IntervalSet([(0, self._next_fold)])
        self.skipped = IntervalSet()
        self._sum: Float32s = np.empty(storage.elements, np.float32)
        self._pushes = 0  # in the sum; an empty one is none
        self._early: dict[int, Float32s | None] = {}
        self._learning_rate: float | None = None

    @property
    def held(self) -> IntervalSet:
        held = IntervalSet([(0, self._next_fold)])
        for step in self._early:
            held.add(step)
        return held

    @property
    def version(self) -> int:
        return self.round

    @property
    def buffered_steps(self) -> int:
        return self._next_fold - self._first(self.round) + len(self._early)

    def holds(self, step: int) -> bool:
        return step < self._next_fold or step in self._early

    def replaceable(self, step: int) -> bool:
        """A gradient that waits for its turn is; one that is in the sum cannot be taken out of it again."""
        if step in self.skipped or not self.holds(step):
            return False
        if step in self.applied:
            raise StaleRound(
                f"step {step} is in the weights of round {self.round} with its gradient, and cannot be skipped"
            )
        if step not in self._early:
            raise FoldedStep(f"step {step} is in the sum of round {self.round}")
        return True

    def begin_again(self) -> None:
        """Return to the start of the present round, whose weights are still here."""
        self._next_fold = self._first(self.round)
        self._pushes = 0
        self._early.clear()
        self._rows.clear()
        self._learning_rate = None
        self.skipped = self.skipped.intersection(self.applied)

    def admit(self, step: int, learning_rate: float | None = None) -> None:
        """Refuse a step of any round but the one that its request may reach, or with another rate than its round's."""
        self.reach(step // self._round_steps)
        if self.buffered_steps and learning_rate != self._learning_rate:
            raise StaleRound(
                f"step {step} has the learning rate {learning_rate}; the held steps of round {self.round} have "
                f"{self._learning_rate}"
            )

    def reach(self, round_: int | None) -> None:
        """Commit the current round if the request names the next one; refuse any other but the current."""
        if round_ is None:
            raise MalformedFrame("the request names no round; in this job every one must")
        if round_ == self.round + 1 and self._full():
            self.commit()
        if round_ != self.round:
            raise StaleRound(f"the request is for round {round_}; this shard is at round {self.round}")

    @property
    def waiting_rows(self) -> Iterable[Pushed]:
        return self._rows.values()

    def take(
        self,
        step: int,
        gradient: Float32s | None,
        staleness: int | None,
        learning_rate: float | None = None,
        rows: Pushed = NO_ROWS,
    ) -> PushResult:
        """Fold the gradient if its turn has come, else keep it; at most N are kept."""
        self._learning_rate = learning_rate
        self._rows.pop(step, None)  # of a gradient that the empty push of a step given up replaces
        if rows:
            self._rows[step] = copied(rows)
        if step != self._next_fold:
            self._early[step] = None if gradient is None else gradient.copy()
            return PushResult.BUFFERED
        self._fold(gradient)
        while self._next_fold in self._early:
            self._fold(self._early.pop(self._next_fold))
        return PushResult.BUFFERED

    def _fold(self, gradient: Float32s | None) -> None:
        if gradient is not None:
            if self._pushes:
                fused.accumulate(self._sum, gradient)
            else:
                np.add(gradient, _ZERO, out=self._sum)  # as if added to zeros: -0.0 becomes 0.0
            self._pushes += 1
        self._next_fold += 1

    def commit(self) -> None:
        """Apply the full round to the weights."""
        first, stop = self._first(self.round), self._first(self.round + 1)
        scale = 1.0 / (stop - first) if self._mean else 1.0
        if not self._pushes:
            self._sum[:] = 0.0
        self._storage.apply(
            self._sum, t=self.round + 1, scale=scale, pushes=self._pushes, learning_rate=self._learning_rate
        )  # t counts rounds
        if self._tables is not None and self._rows:
            rows = summed([self._rows[step] for step in sorted(self._rows)])
            self._tables.apply(rows, t=self.round + 1, scale=scale, learning_rate=self._learning_rate)
            self._rows.clear()
        self.applied.add_range(first, stop)
        self.round += 1
        self._pushes = 0
        self._learning_rate = None

    def _full(self) -> bool:
        return self._next_fold == self._first(self.round + 1) > self._first(self.round)

    def _first(self, round_: int) -> int:
        return min(self._steps_total, round_ * self._round_steps)
