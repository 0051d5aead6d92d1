"""ShardLifecycle: the incarnations of one shard in this process, each with its claim, its state and its log.

The first one restores the newest checkpoint and replays the write-ahead log over it (P18). A rollback begins the next
one at an earlier round (P12). Knows the store and the disk; knows no gRPC. Called by `parashard_server.__main__` and
the service.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from parashard._proto import shard_pb2
from parashard.checkpoints.retention import Held
from parashard.errors import (
    ConfigurationError,
    DamagedCheckpoint,
    NotReady,
    StaleIncarnation,
    StaleRound,
    StoreFailed,
    Superseded,
)
from parashard.job.tables import CheckpointOptions
from parashard.process import failpoints
from parashard.process.full_disk import retry_while_disk_fails
from parashard.process.logs import structlog
from parashard.process.trouble import Trouble
from parashard.store.base import Store
from parashard.store.claims import Claims, Return
from parashard_server.build import ShardBuilder
from parashard_server.core.shard import Shard
from parashard_server.durability.checkpoint_writer import Stored, stored_as
from parashard_server.durability.checkpointer import Checkpointer
from parashard_server.durability.recovery import Restored, Restorer
from parashard_server.durability.write_ahead_log.log import WriteAheadLog, open_log
from parashard_server.durability.write_ahead_log.records import HEAD_BYTES, LogIdentity
from parashard_server.durability.write_ahead_log.replay import Replay, replay
from parashard_server.serving.admission_lock import AdmissionLock
from parashard_server.serving.served import Served

log = structlog.get_logger("shard")


class ShardLifecycle:
    """Begins lives of a shard.

    Parameters
    ----------
    builder : ShardBuilder
        Makes shards.
    restorer : Restorer
        Finds what they begin from.
    store : Store
        Where the log lies, if the store is on this disk.
    options : CheckpointOptions
        Whether there is a log.
    claims : Claims
        Where this process claims its incarnations.
    opened, replayed : callable
        `open_log` and `replay`; a test's log in memory comes in here.
    giving_up : Event, optional
        Ends the first life's wait for a disk that is full.

    Raises
    ------
    ConfigurationError
        If there is to be a log and the store is not on a local disk.
    """

    def __init__(
        self,
        builder: ShardBuilder,
        restorer: Restorer,
        store: Store,
        options: CheckpointOptions,
        claims: Claims,
        *,
        opened: Callable[..., WriteAheadLog] = open_log,
        replayed: Callable[..., Replay] = replay,
        giving_up: threading.Event | None = None,
    ) -> None:
        self._builder = builder
        self._restorer = restorer
        self._options = options
        self.claims = claims
        self._opened = opened
        self._replayed = replayed
        self._giving_up = giving_up or threading.Event()
        self.log: WriteAheadLog | None = None
        self._log_folder: Path | None = None
        self._log_trouble = Trouble()
        self._log_given_up = False  # it was told, in the present trouble
        self._returning = threading.Lock()
        self.first_incarnation = 0
        """Of this process; later ones are returns to a round."""
        self._served: Served
        self._checkpointer: Checkpointer
        self.known: list[Held] = []
        self.returns: list[Return] = []
        """With what returns to earlier rounds the shard's incarnations began, as far back as its checkpoints go."""
        self.restored: Stored | None = None
        """The checkpoint that the first life was restored from."""
        if options.durability == "log":
            self._log_folder = store.local_path(f"log/p{builder.plan.version:04d}/s{builder.index:04d}")
            if self._log_folder is None:
                raise ConfigurationError(f'checkpoint.durability = "log" needs a local disk; the store is {store.url}')

    def first(self) -> Served:
        """Claim an incarnation, restore, replay, and return what is served from now on."""
        incarnation = retry_while_disk_fails(self.claims.next, "claims", self._giving_up)  # P3
        failpoints.hit("shard.boot.claimed")
        restored = self._restorer.newest(self.claims.returns)
        self.known, self.returns = restored.known, list(restored.returns)
        if restored.passed_over and self._restorer.first_round is not None:
            # What was passed over may be readable again one day, when all have gone another way from here.
            round_ = self._restorer.first_round if restored.state is None else restored.state.round or 0
            incarnation = retry_while_disk_fails(lambda: self._claim_return(round_), "claims", self._giving_up)
        self.first_incarnation = incarnation
        if restored.manifest is not None:
            self.restored = stored_as(restored.manifest)
        shard = self._builder.build(incarnation, restored.state)
        text = restored.text
        if self._log_folder is not None:
            text += self._replay(shard, restored, self._log_folder)
        failpoints.hit("shard.boot.restored")
        log.info("restored", what=text, steps=len(shard.updates.applied))
        self._served = Served(shard, AdmissionLock(self._builder.job.cluster.queue_pushes), text)
        return self._served

    def follow(self, checkpointer: Checkpointer) -> None:
        """Use this checkpointer's knowledge of rounds, and tell it of returns."""
        self._checkpointer = checkpointer
        checkpointer.returns = self.returns

    def returnable(self) -> list[int]:
        """Return the rounds that the shard can return to, ascending (sync mode)."""
        first = self._restorer.first_round
        return [] if first is None else sorted({first, *self._checkpointer.rounds})

    def roll_back(self, round_: int, incarnation: int) -> int:
        """Begin another life at an earlier round; return its incarnation.

        Raises
        ------
        StaleIncarnation
            If another life began meanwhile.
        Superseded
            If another process has claimed the shard since: this one must end (P23).
        DamagedCheckpoint
            If the shard cannot return there after all; it does not say any more that it can.
        """
        with self._returning:
            earlier = self._served.shard
            if earlier.identity.incarnation != incarnation:
                raise StaleIncarnation(f"this is incarnation {earlier.identity.incarnation} already, not {incarnation}")
            ids = self._checkpointer.at_round(round_)
            try:
                state = self._restorer.at(round_, ids)
            except DamagedCheckpoint:
                for id_ in ids:
                    self._checkpointer.forget(id_)
                raise
            new = self._claim_return(round_)
            failpoints.hit("shard.rollback.claimed")
            shard = self._builder.build(new, state)
            shard.record = earlier.record  # of the process, whose counters only grow
            position = 0 if state is None else state.log_position or 0

            def take_over(shard: Shard) -> None:
                self._checkpointer.returned(shard)
                self._take_log_over(shard, position)

            self._served.replace(shard, f"returned to round {round_}", taking_over=take_over)
            log.info("returned", round=round_, incarnation=new)
            return new

    def begin_round_again(self, incarnation: int, step: int) -> None:
        """Begin another life in the present round, whose gradient of a step that is given up cannot be kept (P24).

        Raises
        ------
        NotReady
            If no incarnation can be claimed now; the life goes on as it was.
        """
        with self._returning:
            if self._served.shard.identity.incarnation != incarnation:
                return  # another request has done it
            try:
                new = self.claims.next()  # P3
            except (StoreFailed, Superseded) as error:
                raise NotReady(f"step {step} is to be skipped, and its round cannot begin again now: {error}") from None

            def begin(shard: Shard) -> None:
                position = shard.replay_from() or 0
                shard.begin_round_again(new)
                self._take_log_over(shard, position)
                shard.skip(step)

            round_ = self._served.shard.updates.round
            self._served.go_on(begin, f"began round {round_} again: step {step} is skipped")
            log.info("round-begins-again", round=round_, step=step, incarnation=new)

    # --- the log ---

    @property
    def log_position(self) -> int:
        """Position of the next record; 0 without a log."""
        return 0 if self.log is None else self.log.position

    def wait_durable(self, position: int, timeout_s: float) -> None:
        """Wait until everything before a position is as durable as the job asks for."""
        log_ = self.log
        if log_ is not None and position:
            failpoints.hit("shard.log.appended")
            if position > log_.position:
                raise StaleIncarnation("this shard has returned to an earlier round; what it acknowledged is given up")
            log_.wait_durable(position - 1, timeout_s)
            failpoints.hit("shard.log.durable")

    def rolled(self) -> None:
        """Begin a new segment, so that the older ones can go with the checkpoints that need them."""
        if self.log is not None:
            self.log.roll()

    def collected(self, kept: list[Held]) -> None:
        """Delete the segments that no checkpoint which is kept needs."""
        if self.log is not None and kept:
            self.log.covered(max(held.log_position or 0 for held in kept))
            self.log.delete_below(min(held.log_position or 0 for held in kept))

    @property
    def log_error(self) -> str:
        """Why a killed shard would lose pushes in spite of its log, which a checkpoint mends; empty without a log."""
        return "" if self.log is None else self.log.error

    def tell_of_log(self) -> None:
        """Log one line when the log begins to fail, one when it is whole again; not under the shard's lock (P21)."""
        error, now_s = self.log_error, time.monotonic()
        if error and self._log_trouble.begins(now_s):
            log.warning("push-log-failed", reason=error)
        elif not error and self._log_trouble.ends(now_s):
            self._log_given_up = False
            log.info("push-log-whole-again")

    def make_room(self, position: int | None) -> None:
        """Give up a log that has failed up to a position, for a checkpoint that is to have all of it (P21).

        Until that is stored, a killed shard has more steps recomputed than it would have had; with a log that fills the
        disk there would never be a checkpoint again, nor a log.
        """
        if self.log is not None and self.log.error and position is not None:
            if not self._log_given_up:
                log.warning("push-log-given-up", below=position, reason=self.log.error)
            self._log_given_up = True
            self.log.give_up(position)

    def describe_log(self, reply: shard_pb2.InspectReply) -> None:
        """Add what the log has counted to a shard's record."""
        if self.log is not None:
            reply.log_records, reply.log_syncs, reply.log_error = (
                self.log.position,
                self.log.fsyncs,
                self.log.error,
            )

    def close(self) -> None:
        """Close the log."""
        if self.log is not None:
            self.log.close()

    def _replay(self, shard: Shard, restored: Restored, folder: Path) -> str:
        """Push again what the log has and the checkpoint has not; return what happened, for people."""
        position = restored.state.log_position if restored.state is not None else 0
        records = self._replayed(
            folder, self._log_identity(shard), position or 0, shard.storage.weights.nbytes + HEAD_BYTES
        )
        replayed, stopped = 0, ""
        for record in records:
            try:
                replayed += shard.replay(
                    record.position, record.step, record.gradient, record.staleness, skipped=record.skipped
                )
            except StaleRound as error:
                stopped, position = str(error), record.position
                break
        ended = records.ended if not stopped else None
        self._open_log(shard, position or 0 if ended is None else ended.position)
        text = f"; replayed {replayed} pushes of the log"
        if ended is None or ended.reason in ("damage", "gap"):
            why = stopped if ended is None else f"{ended.reason} at {ended.place}"
            log.warning("log-not-replayed", why=why)
            text += f", the rest is computed again ({why})"
        return text

    def _claim_return(self, round_: int) -> int:
        """Claim an incarnation that begins at a round: what earlier ones made of later rounds is given up (P12)."""
        incarnation = self.claims.next(returning_to=round_)  # P3
        self.returns.append(Return(incarnation, round_))
        return incarnation

    def _take_log_over(self, shard: Shard, position: int) -> None:
        """Go on with the log in a new life; under the shard's lock, so that no push falls in between.

        From `position` on, the first record that the life's weights lack, what earlier lives wrote does not count.
        """
        if self.log is not None:
            self.log.close()
            self._open_log(shard, position)

    def _open_log(self, shard: Shard, first_position: int) -> None:
        assert self._log_folder is not None
        self.log = self._opened(
            self._log_folder,
            self._log_identity(shard),
            shard.identity.incarnation,
            first_position,
            fsync=self._options.log_fsync,
        )
        shard.journal = self.log

    def _log_identity(self, shard: Shard) -> LogIdentity:
        mine = shard.identity
        return LogIdentity(mine.run_id, mine.job_digest, mine.plan_version, mine.shard)
