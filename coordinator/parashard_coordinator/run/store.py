"""RunStore: a run's records in its checkpoint store besides the shards' states, and their recovery by a coordinator.

Owns the run's record, its initial values, its plans, the manifests of drained checkpoints, the coordinator's own saved
state and, in an object store, the results. A fresh run writes the first three; a restarted coordinator and `--resume`
read them. Decides nothing about steps.

Two coordinators of a run may be running at the same time. A decision is written under a name or with a field that has
the coordinator's incarnation, and only then the claims are read: if a successor has claimed before that, the writer
ends and its decision was never visible; a successor that claims later reads it. A successor saves its own record before
it serves, and ignores decisions that an older coordinator makes after that.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from parashard.checkpoints.catalogue import (
    COORDINATORS,
    RUN_NAME,
    Catalogue,
    initial_folder,
    initial_name,
    job_name,
    parse_job_id,
    plan_name,
)
from parashard.checkpoints.encoding import MANIFEST_BYTES_MAX, decode, encode
from parashard.checkpoints.manifest import InitialManifest, JobManifest, PlanRecord, RunRecord, ShardPart
from parashard.checkpoints.row_files import StoredRows, iterate_job_rows, write_initial_rows
from parashard.checkpoints.state import initial_sha256, plan_of, whole_model, whole_variables
from parashard.checkpoints.tensors import slot_tensor, variable_tensor, write_tensors
from parashard.data.preprocessing import Preprocessing, as_json
from parashard.errors import AlreadyStored, ConfigurationError, DamagedCheckpoint, NotReady, NotStored, Superseded
from parashard.job.digest import changed_keys, differences, in_words
from parashard.plan.embedding import KeyedRows
from parashard.plan.partition import Partition, Plan
from parashard.plan.variables import NO_SLOTS, Float32s, Slots
from parashard.process import failpoints
from parashard.process.logs import log
from parashard.process.run_files import HISTORY_FILE, PREPROCESSING_FILE, REPORT_FILE, WEIGHTS_FILE
from parashard.store import Store
from parashard.store.claims import newest_claim
from parashard_coordinator.core.saved import Saved


class RunIdentity(NamedTuple):
    """The identity of a run's steps: the job's digest, and the mapping that it is computed from."""

    digest: str
    identity: Mapping[str, Any]
    job_toml: str


class SavedModel(NamedTuple):
    """The model in a drained checkpoint; rows of tables stay in the store."""

    variables: dict[str, Float32s]  # by name
    plan: Plan
    steps_applied: tuple[int, ...]  # number of steps in each shard's own manifest
    row_counts: Mapping[str, int]  # by table
    # Reads the rows in pieces.
    rows: Callable[[], Iterator[tuple[str, StoredRows]]]


class _Earlier(NamedTuple):
    """The newest record of an earlier coordinator, which invalidates later decisions of still older ones."""

    incarnation: int
    saved: Saved

    def precedes(self, decision: PlanRecord | JobManifest) -> bool:
        """Return whether its coordinator or a later one made a decision."""
        return decision.coordinator_incarnation >= self.incarnation


class RunStore:
    """The records of one run."""

    def __init__(self, store: Store, incarnation: int) -> None:
        self.store = store
        self.catalogue = Catalogue(store)
        self.incarnation = incarnation
        self._plan_version = 0  # of the plan in force, once it is opened

    def find_run(self, run_id: str, *, resume: bool) -> RunRecord | None:
        """Return the store's run if it is the expected one (`check_run`); None: it has none."""
        stored = self.catalogue.run()
        if stored is None:
            if resume:
                raise ConfigurationError(f"--resume: {self.store.url} has no run to take up")
        elif stored.run_id != run_id and not resume:
            raise ConfigurationError(
                f"{self.store.url} has run {stored.run_id} already: --resume takes it up; a new run needs another "
                "checkpoint.url"
            )
        return stored

    def check_run(self, run_id: str, mine: RunIdentity, *, resume: bool) -> str:
        """Return the id of the run in the store, or the one to begin; nothing is written, not even a claim."""
        stored = self.find_run(run_id, resume=resume)
        if stored is None:
            return run_id
        if stored.job_digest != mine.digest:
            changed = changed_keys(stored.identity, mine.identity)
            log.info("job-changed", keys=changed)  # all of them
            named = in_words(differences(stored.identity, mine.identity, "in the run", "now"))
            raise ConfigurationError(
                f"run {stored.run_id} cannot go on with a changed job: {named or 'is this another version?'}"
            )
        return stored.run_id

    def begin_run(self, run_id: str, mine: RunIdentity) -> None:
        """Write the run's record, unless there is one."""
        if self.catalogue.run() is None:
            record = RunRecord(
                run_id=run_id,
                job_digest=mine.digest,
                identity=dict(mine.identity),
                job_toml=mine.job_toml,
                created_at=time.time(),
            )
            with suppress(AlreadyStored):
                self.store.create(RUN_NAME, encode(record))
        stored = self.catalogue.run()
        assert stored is not None
        if (stored.run_id, stored.job_digest) != (run_id, mine.digest):
            raise NotReady(f"{self.store.url}: another coordinator has just begun run {stored.run_id}")

    def keep_initial(
        self,
        digest: str,
        arrays: Mapping[str, Float32s],
        rows: Mapping[str, KeyedRows] = MappingProxyType({}),
        slots: Slots = NO_SLOTS,
    ) -> None:
        """Store a job's initial state: values, rows, slots; before `begin_run`, so that every run has it."""
        # After a `StoreFailed` some of the files may exist; without a manifest they are ignored.
        assert arrays or not (rows or slots), "rows and slots are those of an earlier run, and so are the variables"
        if not arrays or self.catalogue.initial_manifest(digest) is not None:
            return
        shapes = {name: arrays[name].shape for name in sorted(arrays)}
        tensors = {variable_tensor(p): arrays[p.variable] for p in whole_variables(shapes)}
        kept = sorted((slot, name) for slot, of_slot in slots.items() for name in of_slot)
        state = {slot_tensor(slot, Partition(name, 0, shapes[name][0])): slots[slot][name] for slot, name in kept}
        folder = initial_folder(digest, self.incarnation)
        manifest = InitialManifest(
            job_digest=digest,
            incarnation=self.incarnation,
            sha256=initial_sha256(arrays, rows, slots),
            variables=tuple(shapes.items()),
            files=tuple(write_tensors(self.store, folder, tensors, "variables")),
            table_files=write_initial_rows(self.store, digest, self.incarnation, rows),
            slots=tuple(kept),
            slot_files=tuple(write_tensors(self.store, folder, state, "slots")),
        )
        with suppress(AlreadyStored):  # by a coordinator with the same values, since the job has the same digest
            self._create(initial_name(digest), encode(manifest))

    def keep_preprocessing(self, preprocessing: Preprocessing | None) -> None:
        """Store the encoding of inputs and the meaning of outputs, unless stored; they follow from the job's data."""
        if preprocessing is not None:
            with suppress(AlreadyStored):
                self.store.create(PREPROCESSING_FILE, as_json(preprocessing))

    def open_plan(self, wanted: Plan, source_asked: str = "") -> tuple[Plan, str]:
        """Return the plan in force and the drained checkpoint that its shards start from ("" = the initial values)."""
        # A plan with another placement than the newest one becomes a new version, which starts from a drained
        # checkpoint: the newest, if the shards have saved nothing beyond it, or the requested one.
        newest = self._plan_in_force()
        if newest is not None and newest.to_plan().shards == wanted.shards and not source_asked:
            self._plan_version = newest.version
            return replace(wanted, version=newest.version), newest.source or ""
        source = None
        if newest is None and source_asked:
            raise ConfigurationError(f"--from-checkpoint {source_asked}: this run has no drained checkpoint yet")
        if newest is not None:
            number = parse_job_id(source_asked)
            if source_asked and number not in self.catalogue.job_checkpoints():
                raise ConfigurationError(f"--from-checkpoint {source_asked}: this run has no such drained checkpoint")
            drained = self.catalogue.job_manifest(number) if number else self.catalogue.newest_job_manifest()
            if drained is None:
                raise ConfigurationError(
                    f"cluster.shards = {len(wanted.shards)}: the run is on {len(newest.plan.shards)} shards, and "
                    "another placement needs a drained checkpoint, of which it has none; resume it as it was, and "
                    "stop it by `parashard checkpoint create --stop`"
                )
            if not source_asked:
                self._check_nothing_lost(newest.version, len(newest.plan.shards), drained, len(wanted.shards))
            source = f"j{drained.number}"
            log.info("new-plan", source=source, steps=drained.steps, shards=len(wanted.shards))
        plan = replace(wanted, version=max(self.catalogue.plans(), default=0) + 1)
        record = PlanRecord.of(plan, source=source, coordinator_incarnation=self.incarnation)
        self._create(plan_name(plan.version), encode(record))
        self.check_newest()
        self._plan_version = plan.version
        return plan, source or ""

    def _plan_in_force(self) -> PlanRecord | None:
        """Return the newest plan that a successor has not invalidated."""
        earlier = self._earlier()
        for version in reversed(self.catalogue.plans()):
            plan = self.catalogue.plan(version)
            if earlier is None or version <= earlier.saved.plan_version or earlier.precedes(plan):
                return plan
        return None

    def _check_nothing_lost(self, version: int, shards: int, drained: JobManifest, wanted: int) -> None:
        """Refuse to discard later checkpoints of the shards, unless the drained checkpoint was requested by name."""
        newer = [f"j{n}" for n in self.catalogue.damaged_job_checkpoints() if n > drained.number]
        if newer:
            raise ConfigurationError(
                f"cluster.shards = {wanted}: the newest drained checkpoint {newer[-1]} is damaged; "
                f"--from-checkpoint j{drained.number} starts from the one before it, with {drained.steps} steps"
            )
        for shard in range(shards):
            for id_ in reversed(self.catalogue.shard_checkpoints(version, shard)):
                steps = len(self.catalogue.manifest(id_).steps)
                if steps > drained.steps:
                    raise ConfigurationError(
                        f"cluster.shards = {wanted}: another placement starts from a drained checkpoint, and the "
                        f"newest, j{drained.number}, has {drained.steps} steps where shard {shard} has saved {steps}. "
                        f"Resume it on {shards} shards, and stop it by `parashard checkpoint create --stop`; or give "
                        f"the rest up: `parashard resume --shards {wanted} --from-checkpoint j{drained.number}`"
                    )

    def add_job_manifest(
        self,
        run_id: str,
        digest: str,
        plan: Plan,
        steps: int,
        parts: Sequence[ShardPart],
        *,
        final: bool,
    ) -> str:
        """Store the manifest that commits a drained checkpoint; return its id."""
        self.check_newest()  # before, too: shards retain the parts only for the newest coordinator
        number = max(self.catalogue.job_checkpoints(), default=0) + 1
        while True:
            manifest = JobManifest(
                run_id=run_id,
                job_digest=digest,
                number=number,
                plan_version=plan.version,
                coordinator_incarnation=self.incarnation,
                steps=steps,
                final=final,
                parts=tuple(parts),
                written_at=time.time(),
            )
            try:
                self._create(job_name(number), encode(manifest))
            except AlreadyStored:
                number += 1  # an older coordinator that still runs was faster
                continue
            self.check_newest()
            return f"j{number}"

    def model(self, id_: str) -> SavedModel:
        """Return the whole model of a drained checkpoint."""
        number = parse_job_id(id_)
        assert number is not None, id_
        try:
            manifest = self.catalogue.job_manifest(number)
        except NotStored as error:
            raise DamagedCheckpoint(str(error)) from None
        parts = [self.catalogue.part_manifest(manifest, shard) for shard in range(len(manifest.parts))]
        plan = plan_of(self.store, manifest)
        counts: Counter[str] = Counter()
        for part in parts:
            counts.update(dict(part.tables))

        steps = tuple(len(part.steps) for part in parts)
        rows = partial(iterate_job_rows, self.catalogue, manifest)
        return SavedModel(whole_model(self.store, manifest), plan, steps, counts, rows)

    def load_saved(self) -> Saved | None:
        """Return the decisions of the latest earlier coordinator that are valid under the plan in force, or None."""
        # After `open_plan`. A plan that starts from a drained checkpoint discards decisions beyond it.
        earlier = self._earlier()
        if earlier is None:
            return None
        saved = earlier.saved
        if self._plan_version != saved.plan_version:
            source = parse_job_id(self.catalogue.plan(self._plan_version).source or "")
            if source is not None:
                saved = saved.returned_to(self.catalogue.job_manifest(source).steps)
        final = saved.final or self._final_of(earlier)
        return saved.replaced(final=final)

    def _earlier(self) -> _Earlier | None:
        """Return the newest record of an earlier coordinator."""
        for name in sorted(self.store.names(COORDINATORS), reverse=True):
            found = re.fullmatch(r"i(\d{8,})\.json", name, re.ASCII)
            if found is None or int(found[1]) >= self.incarnation:
                continue
            try:
                saved = decode(Saved, self.store.read(f"{COORDINATORS}/{name}", MANIFEST_BYTES_MAX), name)
            except (DamagedCheckpoint, NotStored) as error:
                log.warning("saved-state-damaged", name=name, error=str(error))
            else:
                return _Earlier(int(found[1]), saved)
        return None

    def _final_of(self, earlier: _Earlier) -> str:
        """Return the final checkpoint that an earlier coordinator stored without recording it before it died, or ""."""
        newest = self.catalogue.newest_job_manifest()
        if newest is None or not newest.final or newest.plan_version != self._plan_version:
            return ""
        if newest.steps != earlier.saved.target:
            return ""
        return f"j{newest.number}" if earlier.precedes(newest) else ""

    def save(self, saved: Saved) -> None:
        """Store the state that a later coordinator cannot learn from the shards; durable when this returns."""
        # Raises `Superseded` if a later coordinator has claimed the run: it may not have read this record, so this
        # coordinator must end.
        record = saved.replaced(plan_version=self._plan_version, stored_at=time.time())
        self.store.replace(f"{COORDINATORS}/i{self.incarnation:08d}.json", encode(record))
        failpoints.hit("coordinator.state.saved")
        self.check_newest()

    def keep_results(self, run_dir: Path) -> None:
        """Copy the results, the report last, to an object store; a store in a folder of this host needs no copy."""
        if self.store.local_path(REPORT_FILE) is not None:
            return
        self.check_newest()
        for name in (HISTORY_FILE, WEIGHTS_FILE, REPORT_FILE):
            if (run_dir / name).exists():
                self.store.replace(name, (run_dir / name).read_bytes())

    def check_newest(self) -> None:
        """Raise `Superseded` if a later coordinator has claimed the run."""
        if newest_claim(self.store, "coordinator") > self.incarnation:
            raise Superseded(f"a later coordinator has this run; incarnation {self.incarnation} must stop")

    def _create(self, name: str, content: bytes) -> None:
        """Create a record; after a retried create whose reply was lost, recognize it as ours."""
        try:
            self.store.create(name, content)
        except AlreadyStored:
            if self.store.read(name, MANIFEST_BYTES_MAX) != content:
                raise
