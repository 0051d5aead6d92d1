"""SavedCheckpoints: the list of a shard's checkpoints in the store, and their deletion.

Owns the list, the known damage, and the deletion. Saves nothing, and knows neither the shard nor its lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.retention import (
    CommonRounds,
    StoredCheckpoint,
    chain_rounds,
    collect,
    given_up,
    in_order,
    superseded,
)
from parashard.errors import DamagedCheckpoint, StoreFailed, Superseded
from parashard.job.sections import CheckpointOptions
from parashard.process import failpoints
from parashard.process.logs import log
from parashard.store.claims import Claims, Rollback


class SavedCheckpoints:
    """The checkpoints of one shard and plan; once another process has claimed the shard, none is deleted any more."""

    def __init__(
        self,
        catalogue: Catalogue,
        options: CheckpointOptions,
        claims: Claims,
        known: list[StoredCheckpoint],
        rollbacks: list[Rollback],
        damaged: Sequence[CheckpointId] = (),
    ) -> None:
        self.common = CommonRounds()  # what all shards have saved, as last reported by the coordinator
        self.rollbacks = rollbacks  # rollbacks by which the shard's incarnations began; `ShardLifecycle` adds to it
        # Folder of one that may become part of a drained checkpoint: it is retained until there is another, or until a
        # rollback discards it. A discarded one is no such part: all parts are of one round, and had they all been
        # saved, the shards would have returned to it.
        self.drain_candidate = ""
        self._catalogue = catalogue
        self._options = options
        self._claims = claims
        self._known = known
        # Damaged ones newer than the restored one. They are deleted before the next is stored: else they would be
        # mistaken for the chain before it, in place of a sound one.
        self._skipped_damaged = list(damaged)
        self._damaged: list[CheckpointId] = []  # found since: deleted once another one is stored
        self._listing = threading.Lock()  # `_known` is replaced as a whole: a rollback may forget while one is added

    @property
    def last_number(self) -> int:
        """The greatest number of any of them."""
        return max((held.id.number for held in self._known), default=0)

    def rounds_and_chains(self) -> tuple[list[int], list[int]]:
        """Return the rounds that the shard can roll back to, and the first one of each chain, ascending."""
        good = self.by_age()  # one list, so that the two fit each other
        return sorted({held.round for held in good if held.round is not None}), chain_rounds(good)

    def by_age(self) -> list[StoredCheckpoint]:
        """Return those that are neither known to be damaged nor discarded by a rollback, the oldest first."""
        return in_order(self._known, self.rollbacks)

    def at_round(self, round_: int) -> list[CheckpointId]:
        """Return those of a round, the newest first."""
        return sorted((held.id for held in self.by_age() if held.round == round_), reverse=True)

    def add(self, held: StoredCheckpoint) -> None:
        """Add one that is stored."""
        with self._listing:
            self._known = [*self._known, held]

    def forget(self, id_: CheckpointId) -> None:
        """Drop a damaged one from the list."""
        with self._listing:
            self._known = [held for held in self._known if held.id != id_]

    def distrust(self, id_: CheckpointId, *, chain: bool = True) -> None:
        """Drop a damaged one, and those that share its files of rows; they are deleted once another one is stored."""
        since = next((held.rows_since for held in self._known if held.id == id_), None) if chain else None
        for damaged in {id_, *(held.id for held in self._known if since is not None and held.rows_since == since)}:
            self.forget(damaged)
            self._damaged.append(damaged)

    def delete_damaged(self) -> None:
        """Delete the damaged ones that the start skipped; a failure is retried with the next checkpoint."""
        # Raises Superseded if another process has claimed the shard.
        if not self._skipped_damaged:
            return
        try:
            self._claims.check()
            pinned = self._pinned()
            for id_ in [id_ for id_ in self._skipped_damaged if id_.folder not in pinned]:
                self._delete(id_)
            self._skipped_damaged = []
        except StoreFailed as error:
            log.warning("collection-failed", error=str(error))

    def collect(self, *, keep: int, rounds: bool, earlier_chain: bool = True) -> None:
        """Delete those that are damaged or superseded, if this process has the newest claim."""
        # Kept are the newest `keep`, and one of the chain before with `earlier_chain`. `rounds`: the job is `sync:N`;
        # else the shard decides alone, and ignores the coordinator's rounds.
        try:
            self._claims.check()
            pinned = self._pinned()
            old = [id_ for id_ in self._damaged if id_.folder not in pinned] + superseded(
                self._known,
                keep=keep,
                keep_every=self._options.keep_every,
                pinned=pinned,
                common=self.common if rounds else CommonRounds(),
                rollbacks=self.rollbacks,
                earlier_chain=earlier_chain,
            )
            for id_ in old:
                self.forget(id_)
                self._damaged = [damaged for damaged in self._damaged if damaged != id_]
                self._delete(id_)
        except (StoreFailed, Superseded) as error:
            log.warning("collection-failed", error=str(error))

    def _delete(self, id_: CheckpointId) -> None:
        failpoints.hit("shard.checkpoint.collecting")
        with suppress(DamagedCheckpoint):  # of a damaged manifest the files are unknown
            collect(self._catalogue, id_)

    def _pinned(self) -> set[str]:
        discarded = {held.id.folder for held in self._known if given_up(held, self.rollbacks)}
        return self._catalogue.pinned() | ({self.drain_candidate} - discarded)
