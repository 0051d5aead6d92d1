"""ShardLifecycle: the incarnations of one shard in this process, each with its claim and its state.

The first one restores the newest checkpoint. A rollback begins the next one at an earlier round. Knows the store; knows
no gRPC.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import Catalogue
from parashard.checkpoints.manifest import ShardManifest
from parashard.errors import DamagedCheckpoint, NotReady, StaleIncarnation, StoreFailed, Superseded
from parashard.process import failpoints
from parashard.process.durable import retry_while_disk_fails
from parashard.process.logs import log
from parashard.store.claims import Claims, Rollback
from parashard_server.build import ShardBuilder
from parashard_server.core.shard import Shard
from parashard_server.durability.checkpointer import Checkpointer
from parashard_server.durability.recovery import Restorer
from parashard_server.durability.saved_checkpoints import SavedCheckpoints
from parashard_server.durability.schedule import CheckpointSchedule
from parashard_server.shard_host import AdmissionLock, ShardHost


class ShardLifecycle:
    """Claims and restores the first incarnation, and begins the later ones."""

    def __init__(
        self,
        builder: ShardBuilder,
        reply: pb.GetJobReply,
        catalogue: Catalogue,
        claims: Claims,
        *,
        cancelled: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.claims = claims
        self._builder = builder
        slots, rounds = builder.optimizer.slots, builder.round_steps is not None
        self._restorer = Restorer(catalogue, reply, builder.plan, builder.index, slots, rounds=rounds)
        self._returning = threading.Lock()
        # `cancelled` ends the wait for a disk that is full. The host serves the present incarnation.
        self.host, saved, last = self._begin(cancelled or threading.Event())
        self.first_incarnation = self.host.shard.identity.incarnation  # of this process; later ones are rollbacks
        options = builder.job.checkpoint
        schedule = CheckpointSchedule(
            every_s=options.every_s,
            every_steps=options.every_steps,
            round_steps=builder.round_steps,
            steps=len(self.host.shard.updates.applied),
            now_s=clock(),
        )
        self.checkpointer = Checkpointer(  # not started yet
            self.host, catalogue, schedule, options, saved, claims=claims, last=last, clock=clock
        )

    def _begin(self, cancelled: threading.Event) -> tuple[ShardHost, SavedCheckpoints, ShardManifest | None]:
        """Claim an incarnation and restore its state; return it, and the checkpoints that were found."""
        builder, restorer, claims = self._builder, self._restorer, self.claims
        incarnation = retry_while_disk_fails(claims.next, "claims", cancelled)
        failpoints.hit("shard.boot.claimed")
        restored = restorer.newest(claims.rollbacks)
        rollbacks = list(restored.rollbacks)
        if restored.passed_over and restorer.first_round is not None:
            # The skipped checkpoint may become readable again, when all shards have recomputed its rounds.
            round_ = restorer.first_round if restored.state is None else restored.state.round or 0
            incarnation = retry_while_disk_fails(
                lambda: _claim_rollback(claims, rollbacks, round_), "claims", cancelled
            )
        shard = builder.build(incarnation, restored.state)
        failpoints.hit("shard.boot.restored")
        log.info("restored", what=restored.text, steps=len(shard.updates.applied))
        host = ShardHost(shard, AdmissionLock(builder.job.cluster.queue_pushes), restored.text)
        options = builder.job.checkpoint
        saved = SavedCheckpoints(restorer.catalogue, options, claims, restored.known, rollbacks, restored.damaged)
        return host, saved, restored.manifest

    def returnable(self) -> list[int]:
        """Return the rounds that the shard can return to, ascending (sync mode)."""
        return self.saved_rounds()[0]

    def saved_rounds(self) -> tuple[list[int], list[int]]:
        """Return these rounds, and the first one of each chain of checkpoints, ascending."""
        first = self._restorer.first_round
        saved, chains = self.checkpointer.saved.rounds_and_chains()
        return ([], []) if first is None else (sorted({first, *saved}), chains)

    def roll_back(self, round_: int, incarnation: int) -> int:
        """Begin another incarnation at an earlier round; return its incarnation."""
        # Raises StaleIncarnation if another incarnation began meanwhile; Superseded if another process has claimed the
        # shard since: this one must end; DamagedCheckpoint if the shard cannot return there after all: it then stops
        # reporting that round.
        with self._returning:
            earlier = self.host.shard
            if earlier.identity.incarnation != incarnation:
                raise StaleIncarnation(f"this is incarnation {earlier.identity.incarnation} already, not {incarnation}")
            ids = self.checkpointer.saved.at_round(round_)
            try:
                state = self._restorer.at(round_, ids)
            except DamagedCheckpoint:
                for id_ in ids:
                    self.checkpointer.saved.forget(id_)
                raise
            new = _claim_rollback(self.claims, self.checkpointer.saved.rollbacks, round_)
            failpoints.hit("shard.rollback.claimed")
            shard = self._builder.build(new, state)
            shard.record = earlier.record  # of the process, whose counters only grow
            self.host.replace(shard, f"returned to round {round_}", taking_over=self.checkpointer.returned)
            log.info("returned", round=round_, incarnation=new)
            return new

    def begin_round_again(self, incarnation: int, step: int, learning_rate: float | None = None) -> None:
        """Begin another incarnation in the current round, without the gradient of a skipped step."""
        # Raises NotReady if no incarnation can be claimed now; the present one then continues unchanged.
        with self._returning:
            if self.host.shard.identity.incarnation != incarnation:
                return  # another request has done it
            try:
                new = self.claims.next()
            except (StoreFailed, Superseded) as error:
                raise NotReady(f"step {step} is to be skipped, and its round cannot begin again now: {error}") from None

            def begin(shard: Shard) -> None:
                shard.begin_round_again(new)
                shard.skip(step, learning_rate)

            round_ = self.host.shard.updates.round
            text = f"began round {round_} again: step {step} is skipped"
            self.host.replace(self.host.shard, text, taking_over=begin)
            log.info("round-begins-again", round=round_, step=step, incarnation=new)


def _claim_rollback(claims: Claims, rollbacks: list[Rollback], round_: int) -> int:
    """Claim an incarnation that begins at a round: later rounds of earlier incarnations are discarded."""
    incarnation = claims.next(returning_to=round_)
    rollbacks.append(Rollback(incarnation, round_))
    return incarnation
