"""Versions of shards: the state that is served or held, and whether another version may replace it.

A version is a committed checkpoint, which outlives its process. It may replace another only if it is later and has all
of its steps (`follows`). A live version (`fresh`) is a shard's state after a number of pushes, which is its number; a
later incarnation replaces it although it may lack steps. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parashard.checkpoints.catalogue import CheckpointId
from parashard.checkpoints.manifest import ShardManifest, TableFile
from parashard.client.pulled_rows import TableSet
from parashard.errors import UnknownVariable, shortened
from parashard.plan.embedding import Keys, bucket_ranges, buckets_of
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import Partition
from parashard.plan.variables import Float32s, Variable
from parashard.serving.published_rows import PublishedRows

MARKS_MAX = 1024
"""Most earlier states of a table that are known by their tokens."""
PUSHES_MAX = 1 << 64


@dataclass(frozen=True)
class ShardVersion:
    """A committed checkpoint of a shard, or its live state after a number of pushes."""

    id: CheckpointId  # later versions have greater ids; a live one's number is that of the pushes
    pushes: int  # applied; in `sync:N` rounds
    applied: tuple[tuple[int, int], ...]  # the steps in it, half-open intervals, ascending
    written_at: float  # seconds since 1970, by the clock of the shard; of a live one by the server's, when it was read
    parts_from: int = 0  # 0: all is of one moment; else the weights, read in parts, have at least this many pushes

    @classmethod
    def of(cls, manifest: ShardManifest) -> ShardVersion:
        """Return the version that a manifest commits."""
        return cls(CheckpointId.of(manifest), manifest.version, manifest.applied, manifest.written_at)

    @property
    def steps(self) -> IntervalSet:
        """A new set of the steps in it."""
        return IntervalSet(self.applied)

    @property
    def age(self) -> tuple[CheckpointId, int]:
        """Greater for later versions; with equal ids, for newer weights."""
        return age_of(self.id, self.parts_from)


@dataclass(frozen=True)
class PublishedTable:
    """A shard's rows of a table, with the marks from which a subscriber's difference is computed."""

    rows: PublishedRows
    files: tuple[TableFile, ...] = ()  # that the rows were read from; none for live rows
    marks: Mapping[str, int] = field(default_factory=dict)  # token of an earlier state -> first change with it
    change: int = 0  # number of the newest
    token: str = ""  # by which subscribers name these rows; for committed ones `token_of` the files

    def marked(self, rows: PublishedRows, files: tuple[TableFile, ...], change: int, token: str = "") -> PublishedTable:
        """Return the table after a change. A token's mark is its first change, so that no change is left out."""
        token = token or token_of(files)
        marks = dict(self.marks)
        marks.setdefault(token, change)
        for older in list(marks)[:-MARKS_MAX]:
            del marks[older]
        return PublishedTable(rows, files, marks, change, token)


@dataclass(frozen=True)
class PublishedShard:
    """A shard's state in one version; immutable."""

    version: ShardVersion
    variables: Mapping[Partition, Float32s]  # flat or shaped, row-major, read-only
    tables: Mapping[str, PublishedTable] = field(default_factory=dict)
    digests: Mapping[Partition, str] = field(default_factory=dict)  # `digest_of` each partition's values


def age_of(id_: CheckpointId, parts_from: int) -> tuple[CheckpointId, int]:
    """Return a key that is greater for later versions; see `ShardVersion.age`."""
    return id_, parts_from or PUSHES_MAX


def follows(later: ShardVersion, earlier: ShardVersion, *, fresh: bool = False) -> bool:
    """Return whether a version of the same shard may replace another; a live one may lack steps."""
    return later.age > earlier.age and (fresh or has_all(later.steps, [earlier]))


def has_all(steps: IntervalSet, versions: Iterable[ShardVersion]) -> bool:
    """Return whether a set of steps contains all steps of some versions."""
    return not lacking(steps, versions)


def lacking(steps: IntervalSet, versions: Iterable[ShardVersion]) -> int:
    """Return how many steps of a version `steps` lacks, for the version where these are the most."""
    return max((len(of.steps) - len(steps.intersection(of.steps)) for of in versions), default=0)


def digest_of(values: Float32s) -> str:
    """Return a digest of the bits of numbers."""
    return hashlib.blake2b(np.ascontiguousarray(values, "<f4").data, digest_size=16).hexdigest()


def token_of(files: Iterable[TableFile]) -> str:
    """Return a digest of the files that make a table, in their order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.incarnation} {file.number} {file.name} {file.sha256}\n".encode())
    return digest.hexdigest()[:32]


class Behind(NamedTuple):
    """How far served or held versions are behind the run.

    Parameters
    ----------
    versions : int
        Committed checkpoints later than the held one, for the shard that has the most of them.
    seconds : float
        Since the oldest version that is held was committed; 0.0 if the job is done and all of it is held. For
        live weights: since it was read, or was last known to be the newest.
    """

    versions: int
    seconds: float


def behind(
    held: Sequence[ShardVersion],
    newest: Sequence[CheckpointId],
    final_steps: int | None,
    now_s: float,
    looked_at: float | None = None,
) -> Behind:
    """Return how far versions are behind the newest checkpoints."""
    own = {version.id.shard: version.id for version in held}
    versions = 0
    for id_ in newest:
        mine = own.get(id_.shard)
        same_plan = mine is not None and mine.plan_version == id_.plan_version
        if mine is None or mine < id_:
            versions = max(versions, id_.number - (mine.number if mine is not None and same_plan else 0), 1)
    if final_steps is not None and not versions:
        whole = IntervalSet([(0, final_steps)]) if final_steps else IntervalSet()
        if all(version.steps == whole for version in held):
            return Behind(0, 0.0)
    oldest = min((version.written_at for version in held), default=now_s)
    if looked_at is not None and not versions:
        oldest = max(oldest, looked_at)
    return Behind(versions, max(0.0, now_s - oldest))


class LookedUp(NamedTuple):
    """Rows in the order of the keys.

    Parameters
    ----------
    rows : ndarray of float32, shape (keys, row_elements)
        A key without a row has its initial values, as a worker sees them.
    present : ndarray of bool, shape (keys,)
        Whether a key has a row.
    versions : tuple of CheckpointId
        The version of each shard that the rows come from, in the shards' order.
    """

    rows: Float32s
    present: NDArray[np.bool_]
    versions: tuple[CheckpointId, ...]


def look_up(tables: TableSet, shards: Sequence[PublishedShard], table: str, keys: Keys) -> LookedUp:
    """Return rows of mixed keys, in any order and with repetitions."""
    tables.check([table])
    rows = np.empty((len(keys), tables.by_name[table].row_elements), np.float32)
    present = np.zeros(len(keys), np.bool_)
    stops = np.array([stop for _, stop in bucket_ranges(len(shards))])
    owners = np.searchsorted(stops, buckets_of(keys), side="right")
    for shard, held in enumerate(shards):
        mine = np.flatnonzero(owners == shard)
        rows[mine], present[mine] = held.tables[table].rows.look_up(keys[mine])
    absent = ~present
    if absent.any():
        rows[absent] = tables.first_rows(table, keys[absent])
    return LookedUp(rows, present, tuple(held.version.id for held in shards))


def variable_of(variables: Mapping[str, Variable], shards: Sequence[PublishedShard], name: str) -> Float32s:
    """Return a variable with its shape, a new array."""
    check_variable(variables, name)
    variable = variables[name]
    return elements_of(variable, shards, 0, variable.elements).reshape(variable.shape)


def check_variable(variables: Mapping[str, Variable], name: str) -> None:
    """Raise UnknownVariable unless the job has such a variable."""
    if name not in variables:
        known = ", ".join(sorted(variables)) or "none"
        raise UnknownVariable(f"variable {shortened(name)!r} is none of the job's: {known}")


def elements_of(variable: Variable, shards: Sequence[PublishedShard], first: int, stop: int) -> Float32s:
    """Return the elements [first, stop) of a variable in row-major order, a new array; reads no others."""
    found = np.empty(stop - first, np.float32)
    for held in shards:
        for partition, values in held.variables.items():
            if partition.variable == variable.name:
                offset = partition.row_start * variable.row_elements
                begin, end = max(first, offset), min(stop, partition.row_stop * variable.row_elements)
                if begin < end:
                    found[begin - first : end - first] = values.reshape(-1)[begin - offset : end - offset]
    return found
