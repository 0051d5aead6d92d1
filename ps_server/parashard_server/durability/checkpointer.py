"""Checkpointer: saves a shard's state concurrently with pushes, and deletes superseded checkpoints.

Owns the sequence: cut (under the shard's lock), copy (a partition at a time), files and manifest
(`parashard_server.durability.checkpoint_writer`), collection (`saved_checkpoints` beside it). Knows no schedule
(`parashard_server.durability.schedule`), no format (`parashard.checkpoints`) and no gRPC. A failing store costs
checkpoints, which is counted and reported, but no pushes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.encoding import encode
from parashard.checkpoints.manifest import ShardManifest, TableFile
from parashard.checkpoints.retention import StoredCheckpoint
from parashard.checkpoints.verify import damage_in_shard
from parashard.errors import QueueFull, StoreFailed, Superseded, Unavailable
from parashard.job.sections import CheckpointOptions
from parashard.process import failpoints
from parashard.process.backoff import Debounce
from parashard.process.durable import disk_is_full
from parashard.process.logs import log
from parashard.store.claims import Claims
from parashard_server.core.shard import Cut, Shard
from parashard_server.durability.checkpoint_writer import write_cut
from parashard_server.durability.saved_checkpoints import SavedCheckpoints
from parashard_server.durability.schedule import CheckpointSchedule
from parashard_server.shard_host import ShardHost

LOOK_S = 0.2


@dataclass
class CheckpointRecord:
    """Counters and times of the checkpointer."""

    stored: int = 0
    failed: int = 0
    error: str = ""
    bytes: int = 0
    seconds: float = 0.0
    stall_s: float = 0.0  # longest wait of pushes for a copy
    interval_s: float = 0.0  # configured interval; 0: not by time
    stored_at_s: float = field(default_factory=time.time)  # Unix time of the last one; before the first, of the start


class Checkpointer:
    """Saves the served shard; after each request it checks whether a checkpoint is due.

    Once another process has claimed the shard, nothing is saved or deleted any more. `last` is the checkpoint that the
    shard was restored from: it is not saved again while the weights have not moved, and it may become part of a drained
    one. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        host: ShardHost,
        catalogue: Catalogue,
        schedule: CheckpointSchedule,
        options: CheckpointOptions,
        saved: SavedCheckpoints,
        *,
        claims: Claims,
        last: ShardManifest | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record = CheckpointRecord(interval_s=options.every_s)
        self.saved = saved
        self._host = host
        self._catalogue = catalogue
        self._schedule = schedule
        self._options = options
        self._claims = claims
        self._clock = clock
        self._saving = threading.Lock()  # one checkpoint at a time, from cut to manifest
        self.pending: Cut | None = None
        """A cut that is not stored yet."""
        self._wake = threading.Event()
        self._debounce = Debounce()
        self._found_full = False  # the last checkpoint found the disk full
        self._last = last
        self._last_incarnation = host.shard.identity.incarnation  # of the state in `_last`
        self.saved.drain_candidate = CheckpointId.of(last).folder if last else ""
        self._number = self.saved.last_number
        self._copies_forced = host.shard.storage.copies_forced  # as of the last request
        self._stopping = False
        host.after_request = self.cut_if_due
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)

    def start(self) -> None:
        """Start to save by the schedule."""
        self._thread.start()

    def stop(self) -> None:
        """Stop saving by the schedule; finish a checkpoint in progress first."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def cut_if_due(self, shard: Shard, seconds: float = 0.0) -> None:
        """Cut if a checkpoint is due and none is in progress; under the shard's lock, after each request."""
        # `seconds` is the request's duration: other pushes waited that long, if it had to copy partitions.
        copies = shard.storage.copies_forced
        if copies > self._copies_forced:
            self.record.stall_s = max(self.record.stall_s, seconds)
        self._copies_forced = copies
        steps, round_ = shard.updates.applied.size, shard.updates.round
        if self.pending is None and self._schedule.due(steps, round_, self._clock()):
            self.pending = self._cut(shard)
            self._wake.set()

    def name_ahead(self, round_: int) -> None:
        """Save a round when it is reached."""

        def name(shard: Shard) -> None:
            self._schedule.name_ahead(round_)
            self.cut_if_due(shard)

        self._host.run_exclusive(name)

    def take(self, round_: int | None = None, *, damaged: str = "") -> ShardManifest:
        """Save the present state now, or in sync mode the start of a round that is full or reached."""
        # A stored checkpoint of this state is returned again, unless its folder is `damaged`. Raises StaleRound if the
        # shard is not at that round, StoreFailed if the store failed; nothing is acknowledged then.
        with self._saving:
            self._save_waiting()  # it is older, and ids must rise with time
            if self._last is not None and CheckpointId.of(self._last).folder == damaged:
                self.saved.distrust(CheckpointId.of(self._last))
                self._last = None

            def reach(shard: Shard) -> Cut | None:
                if damaged and shard.tables is not None:
                    shard.tables.begin_chain()
                if round_ is not None:
                    shard.updates.reach(round_)
                last = self._last
                unmoved = last is not None and last.steps == shard.updates.applied
                if unmoved and self._last_incarnation == shard.identity.incarnation:
                    return None  # equal steps do not imply equal weights after a rollback
                return self._cut(shard)

            cut = self._host.run_exclusive(reach)
            stored = self._last if cut is None else self._save(cut)
            assert stored is not None
            self.saved.drain_candidate = CheckpointId.of(stored).folder
            return stored

    def returned(self, shard: Shard) -> None:
        """Record a rollback: a new incarnation of an earlier round is served; under the shard's lock."""
        self.pending = None  # a cut of a discarded state
        self._copies_forced = shard.storage.copies_forced
        self._schedule.returned(shard.updates.round)

    def save_pending(self) -> None:
        """Save the pending cut, if any; errors are counted and reported."""
        with self._saving:
            self._save_waiting()

    def _save_waiting(self) -> None:
        cut = self.pending
        if cut is None:
            return
        try:
            self._save(cut)
        except (StoreFailed, QueueFull, Unavailable):  # counted and reported
            self._schedule.failed(self._clock())
        except Superseded:  # counted and reported; the process ends
            pass
        if self.pending is cut:  # else the shard has rolled back meanwhile
            self.pending = None

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(LOOK_S)
            self._wake.clear()
            with suppress(QueueFull):  # a busy shard checks after its requests
                self._host.run_exclusive(self.cut_if_due)
            self.save_pending()

    def _cut(self, shard: Shard) -> Cut:
        self._schedule.cut(len(shard.updates.applied), shard.updates.round, self._clock())
        return shard.cut()

    def _save(self, cut: Cut) -> ShardManifest:
        started_s = time.monotonic()
        try:
            failpoints.hit("shard.checkpoint.cut")
            self._copy(cut)
            self.saved.delete_damaged()
            if self._found_full:
                self._free_space(cut)
            stored = self._store(cut)
        except (StoreFailed, QueueFull, Superseded, Unavailable) as error:
            self._end_rows(cut, None)
            self._found_full = disk_is_full(error)
            self.record.failed += 1
            if self._debounce.begins(self._clock()):
                log.warning("checkpoint-failed", error=str(error))
            self.record.error = str(error)
            raise
        self._found_full = False
        self._schedule.stored()
        if self._debounce.ends(self._clock()):
            log.info("checkpoints-saved-again", failed=self.record.failed)
        self.record.stored += 1
        self.record.stored_at_s = time.time()
        self.record.error = ""
        self.record.seconds = time.monotonic() - started_s
        self._last, self._last_incarnation = stored, cut.identity.incarnation
        log.info("checkpoint", id=str(CheckpointId.of(stored)), steps=len(cut.applied), s=round(self.record.seconds, 3))
        self.saved.collect(keep=self._options.keep, rounds=cut.round is not None)
        return stored

    def _free_space(self, cut: Cut) -> None:
        """Delete checkpoints that the newest one supersedes before the next is written to a full disk."""
        # The newest is verified first: a damaged one supersedes nothing.
        while good := self.saved.by_age():
            newest = good[-1].id
            damage = list(damage_in_shard(self._catalogue, newest))
            if not damage:
                self.saved.collect(keep=1, rounds=cut.round is not None, earlier_chain=False)
                return
            log.warning("checkpoint-damaged", id=str(newest), what=damage[0])
            self.saved.distrust(newest, chain=False)

    def _copy(self, cut: Cut) -> None:
        if cut.snapshot.is_kept:
            cut.snapshot.save(*cut.snapshot.missing)
            return

        def copy_one(shard: Shard) -> bool:
            started_s = time.monotonic()
            more = cut.snapshot.save_next()
            self._held(time.monotonic() - started_s)
            return more

        while self._host.run_exclusive(copy_one):
            pass

    def _held(self, seconds: float) -> None:
        """Count how long a copy kept pushes waiting."""
        self.record.stall_s = max(self.record.stall_s, seconds)

    def _store(self, cut: Cut) -> ShardManifest:
        mine = cut.identity
        self._number += 1
        id_ = CheckpointId(mine.plan_version, mine.shard, mine.incarnation, self._number)
        manifest = write_cut(self._catalogue.store, id_, cut, self._host, self._claims, self._held)
        self._end_rows(cut, manifest.table_files)
        failpoints.hit("shard.checkpoint.manifest")
        self.record.bytes = manifest.size_bytes + len(encode(manifest))
        self.saved.add(StoredCheckpoint.of(manifest))
        if cut.round is not None:
            self._host.changed.set()  # report the round to the coordinator at once: all shards may roll back to it
        return manifest

    def _end_rows(self, cut: Cut, files: Sequence[TableFile] | None) -> None:
        """End the tables' save; if the shard's lock is not free in time, the next cut ends it."""
        owner = cut.tables.owner
        if owner is not None:
            with suppress(QueueFull):
                self._host.run_exclusive(lambda _: owner.end_save(cut.tables, files))
