"""The write-ahead log of one incarnation of a shard: appends records and makes them durable by group commit.

Owns the segments that this incarnation writes. Knows neither shard nor checkpoint, and never stops training: when a
write or an fsync fails, the log sets `failed` and writes no more until a checkpoint begins a new segment; it is
complete again, and `error` is empty, once a stored checkpoint has all lost records. `append`, `roll` and `reopen` are
called under the shard's lock and print nothing: the caller reports `error`. Any thread calls `wait_durable`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from parashard.errors import NewerFormat, NotReady, QueueFull, StoreFailed, WrongRun
from parashard.plan.variables import Float32s
from parashard.process.logs import log
from parashard.store.durable import sync_folder, sync_upwards
from parashard_server.core.update_policies import NO_ROWS
from parashard_server.durability.write_ahead_log.records import (
    LogIdentity,
    decode_header,
    encode_head,
    encode_header,
    encode_payload,
)
from parashard_server.durability.write_ahead_log.segments import Segment, SegmentFile, find_segments, segment_name
from parashard_server.state.rows.tables import Pushed


class WriteAheadLog:
    """The log of one incarnation of a shard; see `open_log`.

    Invariant: `_durable` <= `_written` <= `position`. Records before `_durable` are on the disk, or were lost when the
    log failed. One thread at a time syncs (`_leading`), for all records written before it began.

    Attributes
    ----------
    position : int
        Of the next record. It also rises while the log has failed, so that a replay detects the gap.
    failed : str
        Why nothing is written; empty while the log works.
    lacking : str
        Why a replay would end early: pushes are missing, and no stored checkpoint has them; or empty.
    failures, bytes, fsyncs : int
        Monotonic counters of failures, written bytes and syncs.
    """

    def __init__(
        self,
        folder: Path,
        identity: LogIdentity,
        incarnation: int,
        first_position: int,
        *,
        fsync: bool,
        create: Callable[[Path], SegmentFile],
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._incarnation = incarnation
        self._fsync = fsync
        self._create = create
        self._changed = threading.Condition(threading.Lock())
        self._file: SegmentFile | None = None
        self._rolled: list[SegmentFile] = []  # closed for writing, and not yet durable
        self._number = 0
        self._begun = 0  # number of the present segment, or of the one that could not be created
        self._number_durable = 0  # number of the last segment whose name is durable
        self._seed = 0
        self._leading = False
        self._written = first_position
        self._durable = first_position
        self.position = first_position
        self.failed = ""
        self.lacking = ""
        self._whole_from = first_position  # records are complete from here on
        self.failures = 0
        self.bytes = 0
        self.fsyncs = 0

    @property
    def error(self) -> str:
        """Why a killed shard would lose acknowledged pushes; empty while it would not."""
        return self.failed or self.lacking

    def covered(self, position: int) -> None:
        """Record a stored checkpoint that includes every record before a position."""
        if not self.failed and position >= self._whole_from:
            self.lacking = ""

    def append(
        self,
        step: int,
        gradient: Float32s | None,
        *,
        staleness: int | None,
        skipped: bool,
        learning_rate: float | None = None,
        rows: Pushed = NO_ROWS,
        norm: float | None = None,
    ) -> int:
        """Write one applied push and return its position for `wait_durable`; an error of the disk is not raised.

        Parameters
        ----------
        gradient : ndarray of float32, shape (elements,), or None
            In the shard's layout, as it was applied; only read. None: zeros; no elements: the push moved nothing.
        staleness : int or None
            None where it is unknown.
        learning_rate : float, optional
            The step's own.
        rows : mapping of str to RowGradients
            What the push has for tables; only read.
        norm : float, optional
            Of the step's gradient on all shards, where these clip that of its batch.
        """
        position, self.position = self.position, self.position + 1
        if self._file is None or self.failed:
            return position
        payload = encode_payload(gradient, rows, learning_rate, norm)
        head = encode_head(
            self._seed,
            position=position,
            step=step,
            payload=payload,
            zero=gradient is None,
            skipped=skipped,
            staleness=staleness,
            rows=bool(rows),
            rated=learning_rate is not None,
            normed=norm is not None,
        )
        try:
            self._file.write(head, *payload)
        except OSError as error:
            with self._changed:
                self._fail("write", error)
        else:
            self.bytes += len(head) + sum(map(len, payload))
            self._written = self.position  # only now: another thread may be syncing concurrently
        return position

    def wait_durable(self, position: int, timeout_s: float) -> None:
        """Wait until the record at `position`, and all before it, are durable, or the log has failed.

        For a duplicate wait for `log.position - 1`, read under the shard's lock: its first push may not be synced yet.
        The first waiting thread syncs for all; its fsync is not bounded by the timeout.

        Raises
        ------
        QueueFull
            If another thread's fsync has not covered the record after `timeout_s`.
        NotReady
            If the log was closed before that.
        """
        assert position < self.position, f"record {position} has not been appended"
        if not self._fsync:
            return
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while position >= self._durable and not self.failed:
                left_s = deadline_s - time.monotonic()
                if self._file is None:
                    raise NotReady(f"{self._folder}: the push log is closed")
                if not self._leading:
                    self._commit()
                elif not self._changed.wait(left_s):
                    raise QueueFull(f"{self._folder}: the disk has not taken record {position} in {timeout_s:.1f} s")

    def roll(self) -> None:
        """Begin a new segment, at each checkpoint, so that older ones can be deleted."""
        self.reopen(self.position)

    def reopen(self, first_position: int) -> None:
        """Begin a new segment at a position >= the present one; on success a failed log works again."""
        assert first_position >= self.position, f"records {first_position} to {self.position - 1} would repeat"
        self._number += 1
        header = encode_header(self._identity, self._incarnation, self._number, first_position)
        path = self._folder / segment_name(self._incarnation, self._number, first_position)
        begun, problem = None, None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)  # durable with the first record: `_commit`
            begun = self._create(path)
            begun.write(header)
        except OSError as error:
            problem = error
            if begun is not None:  # created and not usable
                with suppress(OSError):
                    path.unlink()
        with self._changed:
            if self._file is not None:
                self._rolled.append(self._file)
            if self.failed or not self._fsync:
                self._close_rolled()
            self._file, self._seed, self._begun = begun, decode_header(header).seed, self._number
            self.position = self._written = first_position
            failed, self.failed = self.failed, ""
            if failed:
                self._durable = first_position
                self._whole_from = first_position
            if problem is not None:
                self._fail("create", problem)

    def delete_below(self, position: int) -> None:
        """Delete the segments that have no record from a position on, except the one being written.

        A superseded incarnation deletes nothing, and only files verified to be this shard's are deleted. An error
        is logged: the file stays until the next call.
        """
        self._delete(lambda segment: segment.stop is not None and segment.stop <= position)

    def give_up(self, position: int) -> None:
        """Delete as `delete_below`, and if the log has failed every segment, to free space for a checkpoint."""
        self.delete_below(position)
        with self._changed:
            if not self.failed:
                return
            self._close_rolled()
            if self._file is not None:
                self._file.close()  # an open file would keep its space on the disk
                self._file = None
            last = (self._incarnation, self._begun)
        self._delete(lambda segment: (segment.incarnation, segment.number) <= last)  # not a concurrent new one

    def _delete(self, is_wanted: Callable[[Segment], bool]) -> None:
        try:
            segments = find_segments(self._folder)
        except StoreFailed as error:
            log.warning("push-log-not-deleted", reason=str(error))
            return
        if any(segment.incarnation > self._incarnation for segment in segments):
            return
        for segment in filter(is_wanted, segments):
            try:
                segment.read_header(self._identity)
                segment.path.unlink()
            except (OSError, NewerFormat, StoreFailed, WrongRun) as error:
                log.warning("push-log-not-deleted", file=str(segment.path), reason=str(error))

    def close(self) -> None:
        """Close the files; waiting threads raise NotReady."""
        with self._changed:
            self._close_rolled()
            if self._file is not None:
                self._file.close()
                self._file = None
            self._changed.notify_all()

    def _commit(self) -> None:
        """Sync all written records. The lock is held at the call and at the return, not in between."""
        assert self._file is not None
        self._leading = True
        written, number = self._written, self._number
        files, self._rolled = self._rolled, []
        try:
            files.append(self._file.duplicate())  # a concurrent `roll` may close the original handle
            self._changed.release()
            try:
                for file in files:
                    file.sync()
                if not self._number_durable:
                    sync_upwards(self._folder)
                elif number != self._number_durable:
                    sync_folder(self._folder)
            finally:
                self._changed.acquire()
        except OSError as error:
            self._fail("fsync", error)
        else:
            self._durable = max(self._durable, written)
            self._number_durable = number
            self.fsyncs += len(files)
        finally:
            for file in files:
                file.close()
            self._leading = False
            self._changed.notify_all()

    def _fail(self, doing: str, error: OSError) -> None:
        if self.failed:
            return
        self.failed = self.lacking = f"{doing}: {error.strerror or error}"
        self.failures += 1
        self._changed.notify_all()

    def _close_rolled(self) -> None:
        for file in self._rolled:
            file.close()
        self._rolled = []


def open_log(
    folder: Path,
    identity: LogIdentity,
    incarnation: int,
    first_position: int,
    *,
    fsync: bool,
    create: Callable[[Path], SegmentFile] = SegmentFile.create,
) -> WriteAheadLog:
    """Return the log of a new incarnation, with its first segment; if that cannot be created the log has `failed`.

    Parameters
    ----------
    folder : Path
        On a local disk, of this shard alone; created if missing.
    incarnation : int
        Of this shard; segments of older ones are valid up to `first_position` from now on.
    first_position : int
        Where the replay of the older incarnations ended.
    fsync : bool
        True: durable records survive a crash of the machine. False: only of the process.
    create : callable
        Opens a segment's file for writing.
    """
    push_log = WriteAheadLog(folder, identity, incarnation, first_position, fsync=fsync, create=create)
    push_log.reopen(first_position)
    return push_log
