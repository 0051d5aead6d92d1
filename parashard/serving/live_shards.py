"""Follow the live weights and rows of a job's running shards, by polling.

`LiveShard` reads the changes since the last look, until there are none left. If they are not known, as with another
incarnation, it first reads the buckets whose digests differ. A reading counts once all of it is of one moment, except
weights that are read in parts (`ShardVersion.parts_from`). `ShardWatcher` publishes the last reading of each shard, all
of one plan; steps that a later incarnation lacks disappear again.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from parashard._proto import shard_pb2 as pb
from parashard._proto import shard_pb2_grpc
from parashard.checkpoints.catalogue import CheckpointId
from parashard.client.proto_conversion import plan_from, view_from
from parashard.client.pulled_rows import TableSet
from parashard.errors import MalformedFrame, NotReady, ParashardError, StalePlan, WrongRun
from parashard.plan.embedding import BUCKET_BITS, BUCKETS, EmbeddingTable, Keys, bucket_ranges
from parashard.plan.partition import ELEMENT_BYTES, Partition, Plan
from parashard.plan.row_rules import evicted
from parashard.plan.variables import Float32s
from parashard.process.logs import log
from parashard.protocol import rpc
from parashard.protocol.coordinator_client import CoordinatorClient
from parashard.security.credentials import Credentials
from parashard.serving.checkpoint_watcher import Published, Sight
from parashard.serving.published_rows import NO_KEYS, Block, BucketDigests, PublishedRows, RowChange
from parashard.serving.versions import PublishedShard, PublishedTable, ShardVersion, digest_of
from parashard.transports.base import ShardAddress

WEIGHTS_BYTES = 3 << 20
"""Part of the weights in one answer, if they are read in parts."""
ANSWERS_MAX = 1 << 16
"""Most answers of one look; beyond that the shard is reported to change faster than it is read."""
PENDING_BYTES = 64 << 20
"""Changes are applied to the tables once they exceed this; one look may have many times as much."""
LOSSES_MAX = 3
"""How often in one look the shard may have dropped changes before they were read."""

Ask = Callable[[pb.ReadRequest], pb.ReadReply]


@dataclass
class LiveShard:
    """One shard, as it was last read."""

    plan: Plan
    shard: int  # its number in the plan
    run_id: str
    tables: Mapping[str, EmbeddingTable]  # the job's
    name: str  # of this reader: tokens that subscribers show begin with it
    published: PublishedShard | None = None  # until it was read once
    incarnation: int = 0  # that of `published`
    differing_buckets: int = 0  # how many the last comparison found
    _position: int = 0  # of the next change to read; 0: unknown
    _known: int | None = None  # version of the weights
    _flat: Float32s = field(default_factory=lambda: np.empty(0, np.float32))
    _change: int = 0

    def look(self, ask: Ask, incarnation: int, now_s: float) -> bool:
        """Read the shard's present state; return whether its version is new. An error leaves `published` unchanged."""
        reading = _Reading(self, ask, incarnation)
        reading.read()
        self._position, self._known, self._flat = reading.position, reading.known, reading.flat
        before = self.published
        same = incarnation == self.incarnation
        unchanged = not reading.moved
        unchanged &= all(reading.tables[name] is table.rows for name, table in self.held_tables().items())
        if before is not None and same and unchanged and reading.version == before.version.pushes:
            return False
        number = self._change = self._change + 1
        tables = {
            name: before_.marked(reading.tables[name], (), number, f"{self.name} {number}")
            if reading.tables[name] is not before_.rows or before is None
            else before_
            for name, before_ in self.held_tables().items()
        }
        id_ = CheckpointId(self.plan.version, self.shard, incarnation, reading.version)
        version = ShardVersion(id_, reading.version, reading.applied, now_s, reading.parts_from)
        variables, digests = {}, {}
        for placed in self.plan.layouts[self.shard]:
            values = variables[placed.partition] = self._flat[placed.offset : placed.stop]
            stayed = before is not None and placed.partition not in reading.moved
            digests[placed.partition] = before.digests[placed.partition] if before and stayed else digest_of(values)
        self.published, self.incarnation = PublishedShard(version, variables, tables, digests), incarnation
        return True

    def held_tables(self) -> Mapping[str, PublishedTable]:
        """Return the tables as they were last read."""
        if self.published is not None:
            return self.published.tables
        return {name: PublishedTable(PublishedRows.empty(table.row_elements)) for name, table in self.tables.items()}


class _Reading:
    """One look at a shard; its attributes are the results."""

    def __init__(self, held: LiveShard, ask: Ask, incarnation: int) -> None:
        self._held, self._ask, self._incarnation = held, ask, incarnation
        same = incarnation == held.incarnation
        self._change = held._change + 1
        self.position = held._position if same else 0
        self.known = held._known if same else None
        self.flat = held._flat
        self.tables = {name: table.rows for name, table in held.held_tables().items()}
        self.moved: set[Partition] = set()
        self.version = self.parts_from = 0
        self.applied: tuple[tuple[int, int], ...] = ()
        self._answers = 0

    def read(self) -> None:
        if not self.position:
            self._begin(self._changes(0).position)
        reply = self._changes_to_the_end()
        if not reply.has_weights:
            self.known = self._parts()
            reply = self._changes_to_the_end(weights=False)
            self.parts_from = self.known if self.known != reply.version else 0
        else:
            self.known = reply.version
        self.version = reply.version
        self.applied = tuple((interval.start, interval.stop) for interval in reply.applied)
        for name, table in self._held.tables.items():
            change = self.tables[name].evicted(table.rules, self.version)
            self.tables[name] = self.tables[name].with_change(change, self._change)

    def _begin(self, position: int) -> None:
        """Bring all rows up to the shard's state at a position or later, by comparing buckets."""
        self.position = position
        self._held.differing_buckets = 0
        for name in self._held.tables:
            self._compare(name)

    def _changes_to_the_end(self, *, weights: bool = True) -> pb.ReadReply:
        """Read changes until there are no more; return the last answer, of one moment with all of them."""
        pending: dict[str, list[RowChange]] = {name: [] for name in self._held.tables}
        losses = pending_bytes = 0
        while True:
            reply = self._changes(self.position, weights=weights)
            if reply.lost:
                losses += 1
                if losses > LOSSES_MAX:
                    raise NotReady("it changes faster than it is read")
                pending = {name: [] for name in pending}
                self._begin(reply.position)
                continue
            pending_bytes += reply.ByteSize()
            for rows in reply.rows:
                if rows.table not in pending:
                    raise MalformedFrame(f"rows of table {rows.table!r}, which is none of the job's")
                pending[rows.table].append(_rows_of(rows, self._held.tables[rows.table].row_elements))
            self.position = reply.position
            if reply.complete or pending_bytes > PENDING_BYTES:
                self._put(pending)
                pending_bytes = 0
            if reply.complete:
                break
        if reply.has_weights:
            self._take(reply, 0, self.flat_bytes)
        return reply

    def _put(self, pending: dict[str, list[RowChange]]) -> None:
        """Apply changes to the tables, and drop them."""
        for name, parts in pending.items():
            if parts:
                self.tables[name] = self.tables[name].with_change(_merged(parts), self._change)
                parts.clear()

    def _parts(self) -> int:
        """Read changed weights in parts; return the lowest version of a part."""
        known, versions = self.known, []
        for begin in range(0, self.flat_bytes, WEIGHTS_BYTES):
            end = min(self.flat_bytes, begin + WEIGHTS_BYTES)
            asked = pb.ReadWeights(offset_bytes=begin, length_bytes=end - begin, known_version=known)
            reply = self._read(pb.ReadRequest(weights=asked))
            if not reply.has_weights:
                raise MalformedFrame(f"shard {self._held.shard}: no weights where some were asked for")
            self._take(reply, begin, end)
            versions.append(reply.version)
        return min(versions, default=0)

    def _take(self, reply: pb.ReadReply, begin: int, end: int) -> None:
        """Store runs of weights, which must lie within bytes [begin, end)."""
        runs = list(zip(reply.run_offsets, reply.run_lengths, strict=False))
        fits = len(reply.run_offsets) == len(reply.run_lengths)
        fits &= sum(length for _, length in runs) == len(reply.weights)
        if not fits or any(o < begin or o + n > end or o % ELEMENT_BYTES or n % ELEMENT_BYTES for o, n in runs):
            raise MalformedFrame(f"shard {self._held.shard}: runs of weights that do not fit")
        if not runs and len(self.flat) * ELEMENT_BYTES == self.flat_bytes:
            return
        if self.flat is self._held._flat:
            whole = np.zeros(self.flat_bytes // ELEMENT_BYTES, np.float32)
            whole[: len(self.flat)] = self.flat
            self.flat = whole
        at = 0
        for offset, length in runs:
            first, stop = offset // ELEMENT_BYTES, (offset + length) // ELEMENT_BYTES
            self.flat[first:stop] = np.frombuffer(reply.weights, "<f4", stop - first, at)
            at += length
            for placed in self._held.plan.layouts[self._held.shard]:
                if placed.offset < stop and first < placed.stop:
                    self.moved.add(placed.partition)

    def _compare(self, name: str) -> None:
        """Read the buckets of a table whose digests differ from those of the held rows."""
        first, end = bucket_ranges(len(self._held.plan.shards))[self._held.shard]
        table, own = self._held.tables[name], self.tables[name].all_rows()
        differing: list[int] = []
        while first < end:
            reply = self._buckets(name, first, end, digests=True)
            stop = first + len(reply.digests)
            if not first < stop <= end:
                raise MalformedFrame(f"{len(reply.digests)} digests of buckets [{first}, {end})")
            some = own.taken(slice(*_places(own.keys, first, stop)))
            some = some.taken(~evicted(table.rules, reply.version, some.last_use, some.values))
            mine = BucketDigests(first, stop)
            mine.add(some.keys, some.last_use, some.values)
            pairs = zip(mine.digests(), reply.digests, strict=True)
            differing += [first + place for place, (held, due) in enumerate(pairs) if held != due]
            first = stop
        self._held.differing_buckets += len(differing)
        if not differing:
            return
        keep = np.ones(len(own.keys), np.bool_)
        read = [RowChange(NO_KEYS, own.values[:0], own.last_use[:0], NO_KEYS)]
        for begin, stop in _runs(differing):
            keep[slice(*_places(own.keys, begin, stop))] = False
            read += self._rows_of_buckets(name, begin, stop)
        self.tables[name] = self.tables[name].replaced(_whole(own.taken(keep), read), self._change)

    def _rows_of_buckets(self, name: str, first: int, stop: int) -> Iterator[RowChange]:
        key = 0
        while True:
            reply = self._buckets(name, first, stop, from_key=key)
            for rows in reply.rows:
                yield _rows_of(rows, self._held.tables[name].row_elements)
            if not reply.more:
                return
            if reply.next_key <= key:
                raise MalformedFrame(f"shard {self._held.shard}: rows of buckets that do not come to an end")
            key = reply.next_key

    def _changes(self, position: int, *, weights: bool = True) -> pb.ReadReply:
        asked = pb.ReadChanges(position=position, weights=weights, known_version=self.known)
        return self._read(pb.ReadRequest(changes=asked))

    def _buckets(self, table: str, first: int, stop: int, *, digests: bool = False, from_key: int = 0) -> pb.ReadReply:
        asked = pb.ReadBuckets(
            table=table, position=self.position, first=first, stop=stop, digests=digests, from_key=from_key
        )
        return self._read(pb.ReadRequest(buckets=asked))

    def _read(self, request: pb.ReadRequest) -> pb.ReadReply:
        self._answers += 1
        if self._answers > ANSWERS_MAX:
            raise NotReady("it changes faster than it is read")
        request.run_id, request.shard = self._held.run_id, self._held.shard
        request.plan_version, request.incarnation = self._held.plan.version, self._incarnation
        return self._ask(request)

    @property
    def flat_bytes(self) -> int:
        """Length of the shard's weights."""
        return ELEMENT_BYTES * self._held.plan.shard_elements(self._held.shard)


def _rows_of(message: pb.ReadRows, row_elements: int) -> RowChange:
    keys, gone = (
        np.frombuffer(content, "<u8").astype(np.uint64, copy=False) for content in (message.keys, message.gone)
    )
    last_use = np.frombuffer(message.last_use, "<u4").astype(np.uint32, copy=False)
    values = np.frombuffer(message.values, "<f4").astype(np.float32, copy=False)
    if len(last_use) != len(keys) or len(values) != len(keys) * row_elements:
        raise MalformedFrame(f"table {message.table!r}: {len(keys)} keys, {len(last_use)} times, {len(values)} numbers")
    if not (keys[1:] > keys[:-1]).all():
        raise MalformedFrame(f"table {message.table!r}: rows that are not in the order of keys")
    return RowChange(keys, values.reshape(len(keys), row_elements), last_use, gone)


def _merged(parts: Sequence[RowChange]) -> RowChange:
    """Merge changes that were read one after another: for each key the last one counts."""
    keys = np.concatenate([one for part in parts for one in (part.keys, part.gone)])
    lengths = [length for part in parts for length in (len(part.keys), len(part.gone))]
    there = np.repeat(np.arange(len(lengths)) % 2 == 0, lengths)
    last = len(keys) - 1 - np.unique(keys[::-1], return_index=True)[1]
    place = np.cumsum(there) - 1  # of a row among all rows
    rows, gone = last[there[last]], last[~there[last]]
    values, last_use = (np.concatenate(list(arrays)) for arrays in zip(*(part[1:3] for part in parts), strict=True))
    return RowChange(keys[rows], values[place[rows]], last_use[place[rows]], keys[gone])


def _whole(kept: Block, read: Sequence[RowChange]) -> PublishedRows:
    """Return a table of kept rows and of newly read ones."""
    keys = np.concatenate([kept.keys, *(rows.keys for rows in read)])
    values = np.concatenate([kept.values, *(rows.values for rows in read)])
    last_use = np.concatenate([kept.last_use, *(rows.last_use for rows in read)])
    order = np.argsort(keys, kind="stable")
    change = RowChange(keys[order], values[order], last_use[order], NO_KEYS)
    return PublishedRows.empty(values.shape[1]).with_change(change, 0)


def _places(keys: Keys, first: int, stop: int) -> tuple[int, int]:
    """Return the places of the keys of buckets [first, stop) among ascending ones."""
    shift = 64 - BUCKET_BITS
    begin = int(np.searchsorted(keys, np.uint64(first << shift)))
    return begin, len(keys) if stop == BUCKETS else int(np.searchsorted(keys, np.uint64(stop << shift)))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield half-open runs of ascending numbers."""
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield found[0], found[-1] + 1


class LiveSource:
    """The coordinator and the shards of a running job, over gRPC."""

    def __init__(self, coordinator: CoordinatorClient, credentials: Credentials | None = None) -> None:
        self._coordinator = coordinator
        self._credentials = credentials
        self._channels: dict[str, Any] = {}

    def job(self) -> tuple[str, Plan]:
        """Return the run and its plan; raises the call's errors."""
        reply = self._coordinator.get_job()
        return reply.run_id, plan_from(reply.plan)

    def view(self, run_id: str) -> Sequence[ShardAddress]:
        """Return the shards' addresses, in their order; raises the call's errors."""
        found = view_from(self._coordinator.get_view(run_id)).shards
        for left in self._channels.keys() - {place.address for place in found}:
            self._channels.pop(left).close()
        return found

    def ask(self, address: str) -> Ask:
        """Return a function that asks the shard at an address."""
        if address not in self._channels:
            self._channels[address] = rpc.connect(address, self._credentials)
        stub = shard_pb2_grpc.ShardStub(self._channels[address])  # type: ignore[no-untyped-call]

        def ask(request: pb.ReadRequest) -> pb.ReadReply:
            with rpc.our_errors(address):
                reply: pb.ReadReply = stub.Read(request, timeout=rpc.DATA_DEADLINE_S)
                return reply

        return ask


class ShardWatcher:
    """Follows the shards of a running job."""

    fresh: ClassVar[bool] = True

    def __init__(self, source: LiveSource, tables: TableSet, clock: Callable[[], float] = time.time) -> None:
        self._source = source
        self._tables: Mapping[str, EmbeddingTable] = tables.by_name
        self._clock = clock
        self._name = secrets.token_hex(8)
        self._plan: Plan | None = None
        self._shards: list[LiveShard] = []
        self._places: Sequence[ShardAddress] = ()
        self._read_at: dict[int, float] = {}
        self.published: Published | None = None
        self.sight = Sight(problem="no look at the shards yet")
        self.run_id = ""
        self.resyncs = 0

    def look(self) -> bool:
        """Read the present state of every shard; return whether a newer one is published."""
        if self._plan is None:
            self._begin(*self._source.job())
        problem = self._find()
        changed = False
        for place, shard in zip(self._places, self._shards, strict=False):
            try:
                changed |= self._read(shard, place)
            except (StalePlan, WrongRun) as error:
                self._plan, problem = None, str(error)  # resumed on another number of shards: ask for the job again
                break
            except ParashardError as error:
                problem = problem or f"shard {shard.shard}: {error}"
        read = [shard.published for shard in self._shards if shard.published is not None]
        if changed and len(read) == len(self._shards):
            self.published = Published(self._shards[0].plan, tuple(read))
        whole = self.published is not None and len(self._read_at) == len(self._shards)
        looked_at = min(self._read_at.values()) if whole else 0.0
        self.sight = Sight(tuple(one.version.id for one in read), None, problem, looked_at)
        return changed and len(read) == len(self._shards)

    def _begin(self, run_id: str, plan: Plan) -> None:
        if self.run_id and run_id != self.run_id:
            raise WrongRun(f"run {run_id} is where run {self.run_id} was: start the server again to serve it")
        if not self._shards or self._shards[0].plan.version != plan.version:
            shards = range(len(plan.shards))
            self._shards = [LiveShard(plan, shard, run_id, self._tables, self._name) for shard in shards]
            self._read_at = {}
        self._plan, self.run_id = plan, run_id

    def _find(self) -> str:
        """Ask for the shards' addresses; return why they are not known (the last ones stay), or ""."""
        try:
            places = self._source.view(self.run_id)
        except ParashardError as error:
            return f"coordinator: {error}"
        if len(places) != len(self._shards):
            return f"the coordinator tells of {len(places)} shards, the plan has {len(self._shards)}"
        self._places = places
        return ""

    def _read(self, shard: LiveShard, place: ShardAddress) -> bool:
        before = shard.incarnation
        changed = shard.look(self._source.ask(place.address), place.incarnation, self._clock())
        self._read_at[shard.shard] = self._clock()
        if changed and before and place.incarnation != before:
            self.resyncs += 1
            log.info(
                "resync",
                shard=shard.shard,
                incarnation=place.incarnation,
                before=before,
                differing_buckets=shard.differing_buckets,
            )
        return changed
