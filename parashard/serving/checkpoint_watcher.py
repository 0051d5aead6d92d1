"""CheckpointWatcher: follow the newest committed state of each shard in a run's store, by polling.

Decides which checkpoint is published: one that is later than the published one of its shard and has all of its steps,
so that published steps never disappear; of another plan, once every shard has such a checkpoint. Of a table it reads
only the files after those of the version before, if the list begins with these; else it reads all files, and compares.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from parashard.checkpoints.catalogue import Catalogue, CheckpointId, by_age, place_of
from parashard.checkpoints.manifest import JobManifest, ShardManifest, TableFile
from parashard.checkpoints.retention import StoredCheckpoint, given_up
from parashard.checkpoints.row_files import read_change
from parashard.checkpoints.tensors import iterate_tensors, variable_tensor
from parashard.errors import DamagedCheckpoint, NotStored, StoreFailed
from parashard.plan.embedding import floats_of, found_among
from parashard.plan.partition import Plan
from parashard.plan.row_rules import NO_RULES, RowRules
from parashard.plan.variables import Variable
from parashard.serving.published_rows import PublishedRows, RowChange
from parashard.serving.versions import (
    PublishedShard,
    PublishedTable,
    ShardVersion,
    digest_of,
    follows,
    has_all,
    lacking,
    token_of,
)
from parashard.store import Store
from parashard.store.claims import Claims

TRIES_MAX = 3
"""Tries in one look at a shard's checkpoints, whose files retention may delete meanwhile."""


@dataclass(frozen=True)
class Published:
    """The state that is served: a version of each shard of a plan; immutable."""

    plan: Plan
    shards: tuple[PublishedShard, ...]  # in the order of the plan

    @property
    def variables(self) -> Mapping[str, Variable]:
        """The job's variables by name."""
        return self.plan.variables

    @property
    def versions(self) -> tuple[ShardVersion, ...]:
        """The versions of the shards, in their order."""
        return tuple(shard.version for shard in self.shards)


@dataclass(frozen=True)
class Sight:
    """Results of the last look at the store or the shards."""

    newest: tuple[CheckpointId, ...] = ()  # of each shard of the newest plan that has any: its newest committed one
    final_steps: int | None = None  # steps of the job, if it is done
    problem: str = "no look at the store yet"  # why the newest is not published; empty: it is
    looked_at: float | None = None
    """For live weights: when they were last the newest, in seconds since 1970; None: versions are committed."""


@dataclass
class CheckpointWatcher:
    """Watches the checkpoints of a run."""

    fresh: ClassVar[bool] = False
    resyncs: ClassVar[int] = 0

    store: Store  # the run's
    row_elements: Mapping[str, int]  # by table
    published: Published | None = None  # until every shard has a checkpoint
    sight: Sight = field(default_factory=Sight)
    run_id: str = ""  # until it is known
    _jobs: tuple[Sequence[int], JobManifest | None] = ((), None)

    def look(self) -> bool:
        """Look at the store; return whether a newer version is published. An error leaves `published` unchanged."""
        catalogue = Catalogue(self.store)
        if not self.run_id:
            run = catalogue.run()
            self.run_id = run.run_id if run is not None else ""
        problem = ""
        held_plan = self.published.plan.version if self.published is not None else 0
        changed = False
        newest: tuple[CheckpointId, ...] = ()
        for version in reversed(catalogue.plans()):
            plan = self.published.plan if self.published and version == held_plan else catalogue.plan(version).to_plan()
            look = _Look(catalogue, plan, self.row_elements, self.published)
            shards = [look.shard(shard) for shard in range(len(plan.shards))]
            newest = newest or (tuple(look.newest) if len(look.newest) == len(plan.shards) else ())
            if all(shards):
                now = Published(plan, tuple(shard for shard in shards if shard is not None))
                changed = self.published is None or now.versions != self.published.versions
                self.published = now if changed else self.published
                problem = problem or look.problem
                break
            problem = problem or look.problem or f"plan {version}: not every shard has saved yet"
        if self.published is None and not problem:
            problem = "no plan is stored yet"
        self.sight = Sight(newest, self._final_steps(catalogue), problem)
        return changed

    def _final_steps(self, catalogue: Catalogue) -> int | None:
        numbers = catalogue.job_checkpoints()
        if numbers != self._jobs[0]:
            self._jobs = (numbers, catalogue.newest_job_manifest())
        newest = self._jobs[1]
        return newest.steps if newest is not None and newest.final else None


class _Look:
    """One look at the shards of a plan."""

    def __init__(
        self, catalogue: Catalogue, plan: Plan, row_elements: Mapping[str, int], held: Published | None
    ) -> None:
        self._catalogue = catalogue
        self._plan = plan
        self._row_elements = row_elements
        self._held = held
        self._same_plan = held is not None and held.plan.version == plan.version
        self.newest: list[CheckpointId] = []
        self.problem = ""

    def shard(self, shard: int) -> PublishedShard | None:
        """Return the newest state of a shard that may be published; the published one if there is none."""
        before = self._held.shards[shard] if self._held is not None and self._same_plan else None
        for _ in range(TRIES_MAX):
            ids = self._catalogue.shard_checkpoints(self._plan.version, shard, before.version.id if before else None)
            collected = False
            for manifest in self._candidates(ids, before, shard):
                try:
                    loaded = load_version(self._catalogue.store, manifest, self._row_elements, before)
                except DamagedCheckpoint as error:
                    if not self._catalogue.has(CheckpointId.of(manifest)):
                        collected = True  # while it was read: there is a newer one
                        break
                    self._blame(error)
                else:
                    self._note(ids, loaded)
                    return loaded
            if not collected:
                break
        self._note(ids, before)
        return before

    def _candidates(
        self, ids: Sequence[CheckpointId], before: PublishedShard | None, shard: int
    ) -> list[ShardManifest]:
        """Return the manifests of a shard's later checkpoints that may be published, the newest first."""
        found = [manifest for manifest in map(self._manifest, ids) if manifest is not None]
        if any(manifest.round is not None for manifest in found):
            claims = Claims(self._catalogue.store, f"shard-{shard}", "serve")
            rollbacks = claims.rollbacks(min(id_.incarnation for id_ in ids) - 1)
            found = [m for m in found if not given_up(StoredCheckpoint.of(m), rollbacks)]
        whole = [manifest for manifest in found if self._may_follow(manifest, before)]
        if found and not whole:
            newest = max(found, key=by_age)
            id_, lacks = CheckpointId.of(newest), lacking(newest.steps, self._held.versions if self._held else ())
            self._blame(f"{id_} lacks {lacks} steps of what is published: it is not served until a later one has them")
        return sorted(whole, key=by_age, reverse=True)

    def _may_follow(self, manifest: ShardManifest, before: PublishedShard | None) -> bool:
        version = ShardVersion.of(manifest)
        if before is not None:
            return follows(version, before.version)
        return self._held is None or has_all(version.steps, self._held.versions)

    def _manifest(self, id_: CheckpointId) -> ShardManifest | None:
        try:
            manifest = self._catalogue.manifest(id_)
        except NotStored:
            return None  # collected since it was listed
        except StoreFailed as error:
            self._blame(error)
            return None
        if manifest.held != self._plan.shards[id_.shard]:
            self._blame(f"{id_} has other partitions than plan {self._plan.version} says")
            return None
        return manifest

    def _note(self, ids: Sequence[CheckpointId], served: PublishedShard | None) -> None:
        newest = max([*ids, *([served.version.id] if served else [])], default=None)
        if newest is not None:
            self.newest.append(newest)

    def _blame(self, problem: object) -> None:
        self.problem = self.problem or str(problem)


def load_version(
    store: Store, manifest: ShardManifest, row_elements: Mapping[str, int], before: PublishedShard | None = None
) -> PublishedShard:
    """Return the verified content of a checkpoint."""
    folder = CheckpointId.of(manifest).folder
    named = dict(iterate_tensors(store, folder, manifest, "variables"))
    variables = {p: named[variable_tensor(p)] for p in manifest.held}
    tables = {}
    for name, elements in row_elements.items():
        files = tuple(file for file in manifest.table_files if file.table == name)
        earlier = (
            before.tables[name]
            if before is not None
            else PublishedTable(PublishedRows.empty(elements), token=token_of(()))
        )
        tables[name] = _continued(store, manifest, earlier, files, name)
    digests = {partition: digest_of(values) for partition, values in variables.items()}
    return PublishedShard(ShardVersion.of(manifest), variables, tables, digests)


def _continued(
    store: Store, manifest: ShardManifest, before: PublishedTable, files: tuple[TableFile, ...], name: str
) -> PublishedTable:
    rules = next((rule.rules for rule in manifest.table_rules if rule.table == name), NO_RULES)
    number = len(before.files)
    if files[:number] == before.files:
        table = _applied(store, manifest, before, files)
    else:
        fresh = PublishedTable(PublishedRows.empty(before.rows.row_elements))
        fresh = _applied(store, manifest, fresh, files)
        fresh = _without_ended(fresh, rules, manifest.version)
        table = before.marked(before.rows.replaced(fresh.rows, before.change + 1), files, before.change + 1)
    if not rules.ends_rows and table.rows.rows != dict(manifest.tables).get(name, 0):
        where = place_of(store, CheckpointId.of(manifest).folder)
        raise DamagedCheckpoint(
            f"{where}: the files make {table.rows.rows} rows of table {name!r}, the manifest says "
            f"{dict(manifest.tables).get(name, 0)}"
        )
    return _without_ended(table, rules, manifest.version)


def _applied(
    store: Store, manifest: ShardManifest, table: PublishedTable, files: tuple[TableFile, ...]
) -> PublishedTable:
    """Apply the files that a table does not have yet, as one change for each checkpoint that wrote some."""
    done = len(table.files)
    for layer in _layers(files[done:]):
        change = _change_of(store, manifest, layer, table.rows.row_elements)
        done += len(layer)
        number = table.change + 1
        table = table.marked(table.rows.with_change(change, number), files[:done], number)
    return table


def _without_ended(table: PublishedTable, rules: RowRules, now: int) -> PublishedTable:
    change = table.rows.evicted(rules, now)
    if not len(change.gone):
        return table
    number = table.change + 1
    return table.marked(table.rows.with_change(change, number), table.files, number)


def _change_of(store: Store, manifest: ShardManifest, layer: Sequence[TableFile], row_elements: int) -> RowChange:
    changes = []
    for file in layer:
        found = read_change(store, manifest, file)
        if len(found.rows.keys) and found.rows.values.shape[1] != row_elements:
            where = place_of(store, CheckpointId.of(manifest).folder)
            raise DamagedCheckpoint(
                f"{where}: rows of table {file.table!r} have {found.rows.values.shape[1]} elements, the job's have "
                f"{row_elements}"
            )
        values = found.rows.values.reshape(len(found.rows.keys), row_elements)
        changes.append(RowChange(found.rows.keys, floats_of(values), found.rows.last_use, found.gone))
    joined = RowChange(*(np.concatenate(parts) for parts in zip(*changes, strict=True)))
    order = np.argsort(joined.keys, kind="stable")
    keys = joined.keys[order]
    if bool((keys[1:] == keys[:-1]).any()):
        where = place_of(store, CheckpointId.of(manifest).folder)
        raise DamagedCheckpoint(f"{where}: files of table {layer[0].table!r} by one checkpoint have a key twice")
    gone = np.unique(joined.gone)
    gone = gone[~found_among(gone, keys)[1]]  # a row that was gone and was created again before the checkpoint is there
    return RowChange(keys, joined.values[order], joined.last_use[order], gone)


def _layers(files: Sequence[TableFile]) -> Iterator[list[TableFile]]:
    """Yield files by the checkpoint that wrote them, the oldest first."""
    for _, layer in itertools.groupby(files, key=lambda file: (file.incarnation, file.number)):
        yield list(layer)
