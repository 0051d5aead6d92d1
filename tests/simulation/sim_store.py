"""What outlives a process: a run's store in memory, and its shards' logs of pushes as lists (P18).

The store is that of the tests; a log keeps the promises of `parashard_server.durability.write_ahead_log` without bytes.
Knows no process: the disk of a shard that crashes is told to lose what it had not acknowledged, or to damage a record.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from sim_world import World

from parashard.errors import AlreadyStored, StoreFailed
from parashard.plan.variables import Float32s
from parashard_server.core.update_policies import NO_ROWS
from parashard_server.durability.write_ahead_log.records import LogIdentity, LogRecord
from parashard_server.durability.write_ahead_log.replay import LogEnd
from parashard_server.state.rows.tables import Pushed, copied
from support.store_fakes import MemoryStore

SLOW_S = (0.05, 1.0)


class SimulatedStore(MemoryStore):
    """A store whose calls fail, take long, or have their effect and lose their reply, as the world's faults say.

    It has a local folder for logs, which is only a name. `sound` is the same store without faults.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.sound = MemoryStore(contents=self.contents)
        self._world = world

    def local_path(self, name: str) -> Path | None:
        return Path(name)

    def create(self, name: str, content: bytes | memoryview) -> None:
        super().create(name, content)
        if self._world.strikes("store_reply_lost"):
            if self._world.rng.random() < 0.5:  # a client library asked again by itself, and met its own object
                raise AlreadyStored(f"{self.url}/{name}: is there already")
            raise StoreFailed(f"{self.url}/{name}: the reply was lost")

    def replace(self, name: str, content: bytes | memoryview) -> None:
        super().replace(name, content)
        self._lose_reply(name)

    def delete(self, name: str) -> None:
        super().delete(name)
        self._lose_reply(name)

    def _lose_reply(self, name: str) -> None:
        if self._world.strikes("store_reply_lost"):
            raise StoreFailed(f"{self.url}/{name}: the reply was lost")

    def _called(self, operation: str, name: str, carry_out: Callable[[], object] = lambda: None) -> None:
        world = self._world
        if world.acting is not None and world.strikes("store_slow"):
            slow_until_s = world.now_s + world.rng.uniform(*SLOW_S)
            world.acting.paused_until_s = max(world.acting.paused_until_s, slow_until_s)
        if world.strikes("store_fails"):
            raise StoreFailed(f"{self.url}/{name}: {operation} failed")


@dataclass
class Segment:
    """The records of one incarnation."""

    first_position: int
    records: list[LogRecord] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)  # positions whose bytes are not what was written


class MemoryLog:
    """One incarnation's log, as `parashard_server.durability.write_ahead_log.log.WriteAheadLog`."""

    failed = error = ""
    fsyncs = 0

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.position = self.durable = segment.first_position

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
        """Write a record; it is durable once `make_durable` has been called."""
        kept = None if gradient is None else gradient.copy()
        record = LogRecord(self.position, step, kept, skipped, staleness, learning_rate, copied(rows), norm)
        self._segment.records.append(record)
        self.position += 1
        return self.position - 1

    def wait_durable(self, position: int, timeout_s: float) -> None:
        """Nothing: the process waits in virtual time, before its receipt leaves."""

    def make_durable(self, position: int) -> None:
        """Everything before a position is on the disk."""
        self.durable = max(self.durable, position)

    def lose_tail(self, rng: random.Random) -> bool:
        """Drop some of the records that are not durable; return whether there were any."""
        if self.durable == self.position:
            return False
        self.position = rng.randrange(self.durable, self.position)
        del self._segment.records[self.position - self._segment.first_position :]
        return True

    def damage(self, rng: random.Random) -> bool:
        """Change a record on the disk; return whether there was one."""
        if not self._segment.records:
            return False
        at = rng.randrange(len(self._segment.records))
        record = self._segment.records[at]
        noise = np.full(1, 0.5, np.float32) if record.gradient is None else record.gradient + np.float32(0.5)
        self._segment.records[at] = record._replace(gradient=noise)
        self._segment.damaged.add(record.position)
        return True

    def roll(self) -> None:
        """A list needs no second one."""

    def covered(self, position: int) -> None:
        """Nothing: it never fails."""

    def delete_below(self, position: int) -> None:
        """Drop nothing: that a log reaches back far enough is for the log's own tests."""

    def close(self) -> None:
        """Nothing."""


class MemoryReplay:
    """One reading of a log, as `parashard_server.durability.write_ahead_log.replay.Replay`."""

    checks = True

    def __init__(self, segments: list[Segment], from_position: int) -> None:
        self._segments = segments
        self._next = from_position
        self.ended: LogEnd

    def __iter__(self) -> Iterator[LogRecord]:
        """Yield every record in order, up to the first that is damaged."""
        self.ended = LogEnd(self._next, "end", "")
        for i, segment in enumerate(self._segments):
            stop = min((later.first_position for later in self._segments[i + 1 :]), default=1 << 62)
            for record in segment.records:
                if not self._next <= record.position < stop:
                    continue
                if record.position in segment.damaged and self.checks:
                    self.ended = LogEnd(self._next, "damage", f"record {self._next}")
                    return
                self._next = record.position + 1
                self.ended = LogEnd(self._next, "end", "")
                if record.gradient is None:
                    yield record
                else:
                    yield record._replace(gradient=record.gradient.copy())


class Logs:
    """The logs on all disks, by folder."""

    replaying: type[MemoryReplay] = MemoryReplay

    def __init__(self) -> None:
        self._segments: dict[Path, list[Segment]] = {}

    def opened(
        self, folder: Path, identity: LogIdentity, incarnation: int, first_position: int, *, fsync: bool
    ) -> MemoryLog:
        """Begin an incarnation's segment."""
        segment = Segment(first_position)
        self._segments.setdefault(folder, []).append(segment)
        return MemoryLog(segment)

    def replayed(self, folder: Path, identity: LogIdentity, position: int, record_bytes_max: int) -> MemoryReplay:
        """Read what earlier incarnations have written."""
        return self.replaying(self._segments.setdefault(folder, []), position)
