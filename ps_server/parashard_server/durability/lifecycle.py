"""ShardLifecycle: the incarnations of one shard in this process, each with its claim and its state.

The first one restores the newest checkpoint. A rollback begins the next one at an earlier round. Knows the store; knows
no gRPC. Called by `parashard_server.__main__`, the service and the requests.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from parashard.errors import DamagedCheckpoint, NotReady, StaleIncarnation, StoreFailed, Superseded
from parashard.process import failpoints
from parashard.process.durable import retry_while_disk_fails
from parashard.process.logs import log
from parashard.store.claims import Claims, Return
from parashard_server.build import ShardBuilder
from parashard_server.core.shard import Shard
from parashard_server.durability.checkpoint_writer import Stored, stored_as
from parashard_server.durability.checkpointer import Checkpointer
from parashard_server.durability.recovery import Restorer
from parashard_server.durability.saved_checkpoints import SavedCheckpoints
from parashard_server.serving.admission_lock import AdmissionLock
from parashard_server.serving.shard_host import ShardHost


class FirstIncarnation(NamedTuple):
    """A shard that is restored, and the checkpoints that were found.

    Parameters
    ----------
    host : ShardHost
        Serves it from now on.
    saved : SavedCheckpoints
        The checkpoints that were found.
    restored : Stored, optional
        The checkpoint of its own that it was restored from.
    """

    host: ShardHost
    saved: SavedCheckpoints
    restored: Stored | None


def begin_first_incarnation(
    builder: ShardBuilder, restorer: Restorer, claims: Claims, cancelled: threading.Event | None = None
) -> FirstIncarnation:
    """Claim an incarnation, restore its state, and return it.

    Parameters
    ----------
    builder : ShardBuilder
        Makes the shard.
    restorer : Restorer
        Finds what it begins from.
    claims : Claims
        Where this process claims its incarnations.
    cancelled : Event, optional
        Ends the wait for a disk that is full.
    """
    cancelled = cancelled or threading.Event()
    incarnation = retry_while_disk_fails(claims.next, "claims", cancelled)
    failpoints.hit("shard.boot.claimed")
    restored = restorer.newest(claims.returns)
    returns = list(restored.returns)
    if restored.passed_over and restorer.first_round is not None:
        # What was passed over may be readable again one day, when all have gone another way from here.
        round_ = restorer.first_round if restored.state is None else restored.state.round or 0
        incarnation = retry_while_disk_fails(lambda: _claim_return(claims, returns, round_), "claims", cancelled)
    shard = builder.build(incarnation, restored.state)
    failpoints.hit("shard.boot.restored")
    log.info("restored", what=restored.text, steps=len(shard.updates.applied))
    host = ShardHost(shard, AdmissionLock(builder.job.cluster.queue_pushes), restored.text)
    found = None if restored.manifest is None else stored_as(restored.manifest)
    options = builder.job.checkpoint
    saved = SavedCheckpoints(restorer.catalogue, options, claims, restored.known, returns, restored.damaged)
    return FirstIncarnation(host, saved, found)


class ShardLifecycle:
    """Begins the later incarnations of a shard.

    Parameters
    ----------
    host : ShardHost
        Serves them, with the first one until now.
    builder : ShardBuilder
        Makes shards.
    restorer : Restorer
        Finds what they begin from.
    claims : Claims
        Where this process claims its incarnations.
    checkpointer : Checkpointer
        Has the rounds that are saved, and records rollbacks.
    """

    def __init__(
        self,
        host: ShardHost,
        builder: ShardBuilder,
        restorer: Restorer,
        claims: Claims,
        checkpointer: Checkpointer,
    ) -> None:
        self._host = host
        self._builder = builder
        self._restorer = restorer
        self.claims = claims
        self._checkpointer = checkpointer
        self._returning = threading.Lock()
        self.first_incarnation = host.shard.identity.incarnation
        """Of this process; later ones are returns to a round."""

    def returnable(self) -> list[int]:
        """Return the rounds that the shard can return to, ascending (sync mode)."""
        return self.saved_rounds()[0]

    def saved_rounds(self) -> tuple[list[int], list[int]]:
        """Return these rounds, and the first one of each chain of checkpoints, ascending."""
        first = self._restorer.first_round
        saved, chains = self._checkpointer.saved.rounds_and_chains()
        return ([], []) if first is None else (sorted({first, *saved}), chains)

    def roll_back(self, round_: int, incarnation: int) -> int:
        """Begin another incarnation at an earlier round; return its incarnation.

        Raises
        ------
        StaleIncarnation
            If another incarnation began meanwhile.
        Superseded
            If another process has claimed the shard since: this one must end.
        DamagedCheckpoint
            If the shard cannot return there after all; it does not say any more that it can.
        """
        with self._returning:
            earlier = self._host.shard
            if earlier.identity.incarnation != incarnation:
                raise StaleIncarnation(f"this is incarnation {earlier.identity.incarnation} already, not {incarnation}")
            ids = self._checkpointer.saved.at_round(round_)
            try:
                state = self._restorer.at(round_, ids)
            except DamagedCheckpoint:
                for id_ in ids:
                    self._checkpointer.saved.forget(id_)
                raise
            new = _claim_return(self.claims, self._checkpointer.saved.returns, round_)
            failpoints.hit("shard.rollback.claimed")
            shard = self._builder.build(new, state)
            shard.record = earlier.record  # of the process, whose counters only grow
            self._host.replace(shard, f"returned to round {round_}", taking_over=self._checkpointer.returned)
            log.info("returned", round=round_, incarnation=new)
            return new

    def begin_round_again(self, incarnation: int, step: int, learning_rate: float | None = None) -> None:
        """Begin another incarnation in the present round, without the gradient of a step that is given up.

        Raises NotReady if no incarnation can be claimed now; the incarnation goes on as it was.
        """
        with self._returning:
            if self._host.shard.identity.incarnation != incarnation:
                return  # another request has done it
            try:
                new = self.claims.next()
            except (StoreFailed, Superseded) as error:
                raise NotReady(f"step {step} is to be skipped, and its round cannot begin again now: {error}") from None

            def begin(shard: Shard) -> None:
                shard.begin_round_again(new)
                shard.skip(step, learning_rate)

            round_ = self._host.shard.updates.round
            self._host.go_on(begin, f"began round {round_} again: step {step} is skipped")
            log.info("round-begins-again", round=round_, step=step, incarnation=new)


def _claim_return(claims: Claims, returns: list[Return], round_: int) -> int:
    """Claim an incarnation that begins at a round: what earlier ones made of later rounds is given up."""
    incarnation = claims.next(returning_to=round_)
    returns.append(Return(incarnation, round_))
    return incarnation
