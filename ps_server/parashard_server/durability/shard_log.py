"""ShardLog: the write-ahead log of one shard over its incarnations in this process; a job may have none.

Owns the present incarnation's log and its successor's, what is replayed at the start, and what of it goes with old
checkpoints. Knows neither the lock nor checkpoints. Called by the shard's lifecycle, its checkpointer and its requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from parashard._proto import shard_pb2
from parashard.checkpoints.retention import Held
from parashard.display.figures import counted
from parashard.errors import ConfigurationError, StaleIncarnation, StaleRound
from parashard.job.tables import CheckpointOptions
from parashard.process import failpoints
from parashard.process.logs import log
from parashard.process.trouble import Trouble
from parashard.store.base import Store
from parashard_server.core.shard import Shard
from parashard_server.durability.write_ahead_log.log import WriteAheadLog, open_log
from parashard_server.durability.write_ahead_log.records import EXTRA_BYTES, LogIdentity
from parashard_server.durability.write_ahead_log.replay import Replay, replay
from parashard_server.durability.write_ahead_log.row_parts import TABLE_BYTES


class ShardLog:
    """A shard's log, if it has one.

    Parameters
    ----------
    store : Store
        Where the log lies, if the store is on this disk.
    options : CheckpointOptions
        Whether there is a log.
    plan_version, index : int
        Whose log it is.
    opened, replayed : callable
        `open_log` and `replay`; a test's log in memory comes in here.

    Raises
    ------
    ConfigurationError
        If there is to be a log and the store is not on a local disk.
    """

    def __init__(
        self,
        store: Store,
        options: CheckpointOptions,
        plan_version: int,
        index: int,
        *,
        opened: Callable[..., WriteAheadLog] = open_log,
        replayed: Callable[..., Replay] = replay,
    ) -> None:
        self._options = options
        self._opened = opened
        self._replayed = replayed
        self._folder: Path | None = None
        self._trouble = Trouble()
        self._given_up = False  # it was told, in the present trouble
        self.current: WriteAheadLog | None = None
        """The present incarnation's; None: there is no log."""
        if options.durability == "log":
            self._folder = store.local_path(f"log/p{plan_version:04d}/s{index:04d}")
            if self._folder is None:
                raise ConfigurationError(f'checkpoint.durability = "log" needs a local disk; the store is {store.url}')

    @property
    def position(self) -> int:
        """Position of the next record; 0 without a log."""
        return 0 if self.current is None else self.current.position

    @property
    def error(self) -> str:
        """Why a killed shard would lose pushes in spite of its log, which a checkpoint mends; empty without a log."""
        return "" if self.current is None else self.current.error

    def wait_durable(self, position: int, timeout_s: float) -> None:
        """Wait until everything before a position is as durable as the job asks for."""
        log_ = self.current
        if log_ is not None and position:
            failpoints.hit("shard.log.appended")
            if position > log_.position:
                raise StaleIncarnation("this shard has returned to an earlier round; what it acknowledged is given up")
            log_.wait_durable(position - 1, timeout_s)
            failpoints.hit("shard.log.durable")

    def begin(self, shard: Shard, position: int) -> str:
        """Push again what the log has from a position on, and go on with it; return what happened, for people."""
        if self._folder is None:
            return ""
        record_bytes_max = shard.storage.weights.nbytes + EXTRA_BYTES
        if shard.tables is not None:
            record_bytes_max += shard.tables.push_bytes_max + len(shard.tables.by_name) * TABLE_BYTES
        records = self._replayed(self._folder, _identity(shard), position, record_bytes_max)
        replayed, stopped = 0, ""
        for record in records:
            try:
                replayed += shard.replay(
                    record.position,
                    record.step,
                    record.gradient,
                    record.staleness,
                    skipped=record.skipped,
                    learning_rate=record.learning_rate,
                    rows=record.rows,
                    norm=record.norm,
                )
            except StaleRound as error:
                stopped, position = str(error), record.position
                break
        ended = records.ended if not stopped else None
        self._open(self._folder, shard, position if ended is None else ended.position)
        text = f"; replayed {counted(replayed, 'step')} of the log"
        if ended is None or ended.reason in ("damage", "gap"):
            why = stopped if ended is None else f"{ended.reason} at {ended.place}"
            log.warning("log-not-replayed", why=why)
            text += f", the rest is computed again ({why})"
        return text

    def take_over(self, shard: Shard, position: int) -> None:
        """Go on with the log in a new incarnation; under the shard's lock, so that no push falls in between.

        From `position` on, the first record that the incarnation's weights lack, what earlier incarnations wrote does
        not count.
        """
        if self._folder is not None:
            self.close()
            self._open(self._folder, shard, position)

    def roll(self) -> None:
        """Begin a new segment, so that the older ones can go with the checkpoints that need them."""
        if self.current is not None:
            self.current.roll()

    def collect(self, kept: list[Held]) -> None:
        """Delete the segments that no checkpoint which is kept needs."""
        if self.current is not None and kept:
            self.current.covered(max(held.log_position or 0 for held in kept))
            self.current.delete_below(min(held.log_position or 0 for held in kept))

    def give_up_below(self, position: int | None) -> None:
        """Give up a log that has failed up to a position, for a checkpoint that is to have all of it.

        Until that is stored, a killed shard has more steps recomputed than it would have had; with a log that fills the
        disk there would never be a checkpoint again, nor a log.
        """
        if self.current is not None and self.current.error and position is not None:
            if not self._given_up:
                log.warning("push-log-given-up", below=position, reason=self.current.error)
            self._given_up = True
            self.current.give_up(position)

    def tell(self) -> None:
        """Log one line when the log begins to fail, one when it is whole again; not under the shard's lock."""
        error, now_s = self.error, time.monotonic()
        if error and self._trouble.begins(now_s):
            log.warning("push-log-failed", reason=error)
        elif not error and self._trouble.ends(now_s):
            self._given_up = False
            log.info("push-log-whole-again")

    def describe(self, reply: shard_pb2.InspectReply) -> None:
        """Add what the log has counted to a shard's record."""
        if self.current is not None:
            reply.log_records, reply.log_syncs, reply.log_error = (
                self.current.position,
                self.current.fsyncs,
                self.current.error,
            )

    def close(self) -> None:
        """Close the log."""
        if self.current is not None:
            self.current.close()

    def _open(self, folder: Path, shard: Shard, first_position: int) -> None:
        self.current = self._opened(
            folder, _identity(shard), shard.identity.incarnation, first_position, fsync=self._options.log_fsync
        )
        shard.journal = self.current


def _identity(shard: Shard) -> LogIdentity:
    mine = shard.identity
    return LogIdentity(mine.run_id, mine.job_digest, mine.plan_version, mine.shard)
