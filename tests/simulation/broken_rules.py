"""The protocol with one rule switched off: parts of a shard that break it, to show that the oracles can see.

Each is the smallest change of the real part that forgets the rule. Used here alone; the product has no switches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sim_shard import REAL, Parts

from parashard.errors import MalformedFrame, NonFiniteGradient
from parashard.messages import PushChunk, PushResult
from parashard.variables import Float32s
from ps_server.assembly import Assemblies, Assembly
from ps_server.ingest import Immediate, Rounds
from ps_server.kernels import fused
from ps_server.shard import Shard
from ps_server.storage import Storage


class Forgetful(Immediate):
    """P1 off: the shard forgets that it holds a step, and applies it again."""

    def holds(self, step: int) -> bool:
        return False


class LateSet(Immediate):
    """P1 off, by a moment: a step enters the applied set in the critical section after that of the weights."""

    _moved: int | None = None

    def holds(self, step: int) -> bool:
        held = super().holds(step)
        self._enter()
        return held

    def reach(self, round_: int | None) -> None:
        super().reach(round_)
        self._enter()

    def take(self, step: int, gradient: Float32s, staleness: int | None) -> PushResult:
        self._storage.apply(gradient, t=len(self.applied) + 1)
        self._moved = step
        return PushResult.APPLIED

    def _enter(self) -> None:
        if self._moved is not None:
            self.applied.add(self._moved)
            self._moved = None


class StepAssemblies(Assemblies):
    """P4 off: pushes are put together under their step alone, whichever attempt a chunk is of."""

    def add(self, chunk: PushChunk, now_s: float) -> Assembly | None:
        return super().add(replace(chunk, attempt=0), now_s)


class EagerRounds(Rounds):
    """P10 off: a full round is applied at once, wherever the other shards stand."""

    def take(self, step: int, gradient: Float32s, staleness: int | None) -> PushResult:
        result = super().take(step, gradient, staleness)
        if self._full():
            self.commit()
        return result


class UnnamedRounds(Rounds):
    """P11 off: a pull gets the weights of the moment, and a push of any round is taken.

    Pushes still commit the round before theirs (P10), and so does the pull of the final weights.
    """

    def reach(self, round_: int | None) -> None:
        if round_ is None:
            raise MalformedFrame("the request names no round; in this job every one must")
        if self._first(round_) == self._steps_total:
            super().reach(round_)

    def admit(self, step: int) -> None:
        if step // self._round_steps == self.round + 1 and self._full():
            self.commit()


class HastyShard(Shard):
    """P14 off, with `HastyStorage`: values are checked as they are written."""

    def _check_values(self, step: int, content: Float32s) -> None:
        """Leave it to the storage."""


class HastyStorage(Storage):
    """P14 off: a partition is written before the values of the next one are checked."""

    def apply(self, gradient: Float32s, *, t: int, scale: float = 1.0, damping: float = 1.0) -> None:
        layout = self.layout
        try:
            for placed in layout:
                if not fused.is_finite(gradient[placed.offset : placed.stop]):
                    raise NonFiniteGradient(f"partition {placed.partition} has a value that is not finite")
                self.layout = (placed,)
                super().apply(gradient, t=t, scale=scale, damping=damping)
        finally:
            self.layout = layout


@dataclass(frozen=True)
class BrokenRule:
    """A rule that is off, the job whose oracle is to see it, and seeds with which it soon does.

    `needs` names what must have happened in a run for the rule to matter. Other seeds: `python tests/simulation --off`.
    """

    parts: Parts
    oracle: str
    policy: str
    sees: str
    seeds: tuple[int, ...]
    needs: str


BROKEN_RULES: Mapping[str, BrokenRule] = {
    "P1-forgotten-step": BrokenRule(
        replace(REAL, immediate=Forgetful), "ledger", "async", "ledger", (6, 8, 9), "receipt: duplicate"
    ),
    "P1-set-after-weights": BrokenRule(
        replace(REAL, immediate=LateSet), "ledger", "async", "ledger", (6, 33, 46), "duplicated"
    ),
    "P4-one-assembly-a-step": BrokenRule(
        replace(REAL, assemblies=StepAssemblies), "torn", "async", "torn", (95, 129, 146), "crash between two chunks"
    ),
    "P10-apply-at-once": BrokenRule(
        replace(REAL, rounds=EagerRounds), "digest", "sync:4", "progress", (83, 97, 119), "crash"
    ),
    "P11-unnamed-rounds": BrokenRule(
        replace(REAL, rounds=UnnamedRounds), "digest", "sync:4", "digest", (3, 4, 5), "receipt: buffered"
    ),
    "P14-write-before-check": BrokenRule(
        replace(REAL, shard=HastyShard, storage=HastyStorage), "ledger", "async", "ledger", (9, 59, 64), "poison"
    ),
}
