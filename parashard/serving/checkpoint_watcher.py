"""CheckpointWatcher: the newest committed state of each shard that a run's store has, read again and again.

Owns which checkpoint is published: one that is later than the published one of its shard and has every step of it, so
that nothing published is ever taken back; of another plan, once every shard has such a one. Knows a store, and neither
threads nor the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from parashard.checkpoints.catalogue import Catalogue, CheckpointId, by_age
from parashard.checkpoints.manifest import JobManifest, ShardManifest
from parashard.checkpoints.retention import Held, given_up
from parashard.errors import DamagedCheckpoint, NotStored, StoreFailed
from parashard.plan.partition import Plan
from parashard.plan.variables import Variable
from parashard.serving.loading import load_version
from parashard.serving.versions import PublishedShard, ShardVersion, follows, has_all, lacking
from parashard.store import Store
from parashard.store.claims import Claims

TRIES_MAX = 3
"""Of one look at a shard's checkpoints, whose files retention may delete meanwhile."""


@dataclass(frozen=True)
class Published:
    """What is served at a moment: a version of each shard of a plan; nothing of it ever changes.

    Parameters
    ----------
    plan : Plan
    shards : tuple of PublishedShard
        In the order of the plan.
    """

    plan: Plan
    shards: tuple[PublishedShard, ...]

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
    """What the last look at the store found.

    Parameters
    ----------
    newest : tuple of CheckpointId
        The newest committed checkpoint of each shard of the newest plan that has any.
    final_steps : int or None
        Steps of the job, if it is done.
    problem : str
        Why the newest is not published; empty: it is.
    looked_at : float or None
        Of live weights: seconds since 1970 when the newest were the shards' own; None: versions are committed.
    """

    newest: tuple[CheckpointId, ...] = ()
    final_steps: int | None = None
    problem: str = "no look at the store yet"
    looked_at: float | None = None


class Watcher(Protocol):
    """Finds the newest version to serve: `CheckpointWatcher`, or `ShardWatcher`, which is `fresh`."""

    published: Published | None
    sight: Sight

    @property
    def fresh(self) -> bool:
        """Whether weights are read out of running shards, so that a later life may lack steps of them."""

    @property
    def run_id(self) -> str:
        """The run; empty until it is known."""

    @property
    def resyncs(self) -> int:
        """How often a running shard was found to be another incarnation."""

    def look(self) -> bool:
        """Look once; return whether there is something newer to serve. Raises what is told as a problem."""


@dataclass
class CheckpointWatcher:
    """Watches the checkpoints of a run.

    Parameters
    ----------
    store : Store
        The run's.
    row_elements : mapping of str to int
        By table the elements of a row: the job's tables.

    Attributes
    ----------
    published : Published or None
        None until every shard has a checkpoint.
    sight : Sight
    run_id : str
        The run whose store it is; empty until it is known.
    """

    fresh: ClassVar[bool] = False
    resyncs: ClassVar[int] = 0

    store: Store
    row_elements: Mapping[str, int]
    published: Published | None = None
    sight: Sight = field(default_factory=Sight)
    run_id: str = ""
    _jobs: tuple[Sequence[int], JobManifest | None] = ((), None)

    def look(self) -> bool:
        """Look at the store once; return whether there is something newer. What is published stays if that fails."""
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
        """Return the newest state of a shard that may be published; the present one if there is none."""
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
        """Return the manifests of what may be published of a shard, of later checkpoints; the newest first."""
        found = [manifest for manifest in map(self._manifest, ids) if manifest is not None]
        if any(manifest.round is not None for manifest in found):
            claims = Claims(self._catalogue.store, f"shard-{shard}", "serve")
            returns = claims.returns(min(id_.incarnation for id_ in ids) - 1)
            found = [m for m in found if not given_up(Held.of(m), returns)]
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
