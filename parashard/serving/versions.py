"""Versions of shards: which state is served or held, and whether another one may take its place.

A version is a committed checkpoint, so that it outlives its process. It may take the place of another only if it is
later and has every step of it (`follows`). Pure. Called by the rest of `parashard.serving` and by `ps.subscribe`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from parashard.checkpoints.catalogue import CheckpointId
from parashard.checkpoints.manifest import ShardManifest, TableFile
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import Partition
from parashard.plan.variables import Float32s
from parashard.serving.rows import PublishedRows

MARKS_MAX = 256
"""So many earlier states of a table are known by the files that made them."""


@dataclass(frozen=True)
class ShardVersion:
    """A committed checkpoint of a shard.

    Parameters
    ----------
    id : CheckpointId
        Later versions have greater ids.
    pushes : int
        Pushes (in `sync:N`: rounds) applied.
    applied : tuple of (int, int)
        The steps in it, half-open intervals, ascending.
    written_at : float
        Seconds since 1970, by the clock of the shard.
    """

    id: CheckpointId
    pushes: int
    applied: tuple[tuple[int, int], ...]
    written_at: float

    @classmethod
    def of(cls, manifest: ShardManifest) -> ShardVersion:
        """Return the version that a manifest commits."""
        return cls(CheckpointId.of(manifest), manifest.version, manifest.applied, manifest.written_at)

    @property
    def steps(self) -> IntervalSet:
        """A new set of the steps in it."""
        return IntervalSet(self.applied)


@dataclass(frozen=True)
class PublishedTable:
    """A shard's rows of a table, and what is needed to tell a subscriber what it lacks.

    Parameters
    ----------
    rows : PublishedRows
    files : tuple of TableFile
        Those that made them.
    marks : mapping of str to int
        By `token_of` the files of an earlier state: the number of the first change with them.
    change : int
        Number of the newest change.
    """

    rows: PublishedRows
    files: tuple[TableFile, ...] = ()
    marks: Mapping[str, int] = field(default_factory=dict)
    change: int = 0

    @property
    def token(self) -> str:
        """What a subscriber shows that has these rows."""
        return token_of(self.files)

    def marked(self, rows: PublishedRows, files: tuple[TableFile, ...], change: int) -> PublishedTable:
        """Return the table after a change. Marks are of the first change with some files, so that none is left out."""
        marks = dict(self.marks)
        marks.setdefault(token_of(files), change)
        for token in list(marks)[:-MARKS_MAX]:
            del marks[token]
        return PublishedTable(rows, files, marks, change)


@dataclass(frozen=True)
class PublishedShard:
    """A shard as one of its versions has it; nothing of it ever changes.

    Parameters
    ----------
    version : ShardVersion
    variables : mapping of Partition to ndarray of float32
        Flat or shaped, row-major, read-only.
    tables : mapping of str to PublishedTable
    """

    version: ShardVersion
    variables: Mapping[Partition, Float32s]
    tables: Mapping[str, PublishedTable] = field(default_factory=dict)


def follows(later: ShardVersion, earlier: ShardVersion) -> bool:
    """Return whether a version of the same shard may take the place of another."""
    return later.id > earlier.id and has_all(later.steps, [earlier])


def has_all(steps: IntervalSet, versions: Iterable[ShardVersion]) -> bool:
    """Return whether steps have every step of some versions."""
    return not lacking(steps, versions)


def lacking(steps: IntervalSet, versions: Iterable[ShardVersion]) -> int:
    """Return how many steps of the version that has the most of them others lack."""
    return max((len(of.steps) - len(steps.intersection(of.steps)) for of in versions), default=0)


def token_of(files: Iterable[TableFile]) -> str:
    """Return a digest of the files that make a table, in their order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.incarnation} {file.number} {file.name} {file.sha256}\n".encode())
    return digest.hexdigest()[:32]
