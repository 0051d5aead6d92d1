"""Parts of a shard that break a rule, each the smallest change of the real part that forgets it.

Used by `broken_rules` alone; the product has no switches.
"""

from __future__ import annotations

from parashard.errors import MalformedFrame, NonFiniteGradient
from parashard.plan.variables import Float32s
from parashard.protocol.messages import PullRun, PushResult, Target, Weights
from parashard_server.core.shard import Shard
from parashard_server.core.update_policies import NO_ROWS, BatchUpdates, ImmediateUpdates, RoundUpdates
from parashard_server.state.kernels import fused
from parashard_server.state.rows.embedding_tables import Pushed
from parashard_server.state.storage import Snapshot, Storage


class Forgetful(ImmediateUpdates):
    """P1 off: the shard forgets that it holds a step, and applies it again."""

    def holds(self, step: int) -> bool:
        return False


class LateSet(ImmediateUpdates):
    """P1 off, by a moment: a step enters the applied set in the critical section after that of the weights."""

    _moved: int | None = None

    def holds(self, step: int) -> bool:
        held = super().holds(step)
        self._enter()
        return held

    def reach(self, round_: int | None) -> None:
        super().reach(round_)
        self._enter()

    def take(
        self,
        step: int,
        gradient: Float32s | None,
        learning_rate: float | None = None,
        rows: Pushed = NO_ROWS,
        norm: float | None = None,
    ) -> PushResult:
        zeros, pushes = self._storage.zeros(), int(gradient is not None)
        self._storage.apply(
            zeros if gradient is None else gradient,
            t=len(self.applied) + 1,
            pushes=pushes,
            learning_rate=learning_rate,
        )
        self._moved = step
        return PushResult.APPLIED

    def _enter(self) -> None:
        if self._moved is not None:
            self.applied.add(self._moved)
            self._moved = None


class UncopiedStorage(Storage):
    """P1 off, in checkpoints: pushes that come beside one move the weights that it saves with an older set."""

    def snapshot(self) -> Snapshot:
        return Snapshot(self.layout, self.weights, self.slots)


class HospitableShard(Shard):
    """P2 off: a push of any run and job is taken."""

    def check_target(self, target: Target) -> None:
        mine = self.identity
        super().check_target(target._replace(run_id=mine.run_id, job_digest=mine.job_digest))


class EagerRounds(RoundUpdates):
    """P10 off: a full round is applied at once, wherever the other shards stand."""

    def take(
        self,
        step: int,
        gradient: Float32s | None,
        learning_rate: float | None = None,
        rows: Pushed = NO_ROWS,
        norm: float | None = None,
    ) -> PushResult:
        result = super().take(step, gradient, learning_rate, rows)
        if self._sum.full:
            self.commit()
        return result


class UnnamedRounds(RoundUpdates):
    """P11 off: a pull gets the weights of the moment, and a push of any round is taken.

    Pushes still commit the round before theirs (P10), and so does the pull of the final weights.
    """

    def reach(self, round_: int | None) -> None:
        if round_ is None:
            raise MalformedFrame("the request names no round; in this job every one must")
        if round_ * self._round_steps >= self._steps_total:
            super().reach(round_)

    def admit(self, step: int, learning_rate: float | None = None) -> None:
        if step // self._round_steps == self.round + 1 and self._sum.full:
            self.commit()


class UnwaitingShard(Shard):
    """P39 off: a pull is answered with whatever weights there are."""

    def pull(self, run: PullRun) -> Weights:
        return super().pull(run._replace(least_version=0))


class PartsAtOnce(BatchUpdates):
    """P39 off: a part counts as applied before its batch is whole."""

    def take(
        self,
        step: int,
        gradient: Float32s | None,
        learning_rate: float | None = None,
        rows: Pushed = NO_ROWS,
        norm: float | None = None,
    ) -> PushResult:
        result = super().take(step, gradient, learning_rate, rows)
        self.applied.add(step)
        return result


class KeepingRounds(RoundUpdates):
    """P24 off: what a shard holds of a step that is given up stays, though others get its empty push."""

    def replaceable(self, step: int) -> bool:
        return False


class ArrivalOrder(RoundUpdates):
    """P13 off: gradients of a round are added as they arrive."""

    _arrived: Float32s | None = None

    def take(
        self,
        step: int,
        gradient: Float32s | None,
        learning_rate: float | None = None,
        rows: Pushed = NO_ROWS,
        norm: float | None = None,
    ) -> PushResult:
        if gradient is not None:
            self._arrived = gradient.copy() if self._arrived is None else self._arrived + gradient
        return super().take(step, gradient, learning_rate, rows)

    def commit(self) -> None:
        if self._arrived is not None:
            self._sum.memory[:] = self._arrived
        self._arrived = None
        super().commit()

    def begin_again(self) -> None:
        self._arrived = None
        super().begin_again()


class HastyStorage(Storage):
    """P14 off: a partition is written before the values of the next one are checked."""

    is_finite = staticmethod(lambda gradient: True)  # values are checked as they are written

    def _kind(self, index: int) -> int:
        """Return what no other partition has: each is written alone."""
        return index

    def apply(
        self,
        gradient: Float32s,
        *,
        t: int,
        scale: float = 1.0,
        pushes: int = 1,
        learning_rate: float | None = None,
    ) -> None:
        groups = self._update_groups
        try:
            for one in groups:
                if not fused.is_finite(gradient[one.run]):
                    raise NonFiniteGradient(f"variable {one.variable.name} has a value that is not finite")
                self._update_groups = [one]
                super().apply(gradient, t=t, scale=scale, pushes=pushes, learning_rate=learning_rate)
        finally:
            self._update_groups = groups
            self.begin_at(t)  # every partition has moved: pulls are not to be blamed


class CountingEmptyPushes(RoundUpdates):
    """P15 off: an empty push counts in the average of a state without a gradient, as one of zeros."""

    def commit(self) -> None:
        if self._sum.pushes:
            self._sum.pushes = self._sum.count
        super().commit()


class KeptCount(RoundUpdates):
    """P15 off: a round that begins again goes on counting the pushes that its average is of."""

    def begin_again(self) -> None:
        pushes = self._sum.pushes
        super().begin_again()
        self._sum.pushes = pushes
