"""Catalogue: the checkpoints, plans and runs that a store holds, by the names of its files.

Owns the layout of the store. Reads manifests and the other records, never the arrays.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

from parashard.checkpoints.encoding import MANIFEST_BYTES_MAX, R, check_whole, decode, encode, sha256_of
from parashard.checkpoints.manifest import InitialManifest, JobManifest, PlanRecord, RunRecord, ShardManifest, ShardPart
from parashard.errors import ConfigurationError, DamagedCheckpoint, NotStored
from parashard.store import Store

RUN_NAME = "run.json"
MANIFEST_NAME = "manifest.json"
COORDINATORS = "coordinator"
"""Folder of the states that coordinators save for their successors."""
EVALUATED = "evaluated"
"""Folder of evaluated weights, stored if callbacks ask for them."""

_ID = re.compile(r"p(\d{1,9})/s(\d{1,9})/i(\d{1,9})/c(\d{1,9})", re.ASCII)
_JOB_ID = re.compile(r"j(\d{1,9})", re.ASCII)


class CheckpointId(NamedTuple):
    """Names one shard's checkpoint; ordered by age within a shard and a plan. As text: "p1/s0/i3/c7"."""

    plan_version: int
    shard: int
    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"p{self.plan_version}/s{self.shard}/i{self.incarnation}/c{self.number}"

    @property
    def folder(self) -> str:
        """The folder of the store with its files."""
        parent = shard_folder(self.plan_version, self.shard)
        return f"{parent}/i{self.incarnation:08d}-c{self.number:08d}"

    @property
    def manifest_name(self) -> str:
        """Its manifest, the file that commits it."""
        return f"{self.folder}/{MANIFEST_NAME}"

    @classmethod
    def of(cls, manifest: ShardManifest) -> Self:
        """Return the id of the checkpoint that a manifest belongs to."""
        return cls(manifest.plan_version, manifest.shard, manifest.incarnation, manifest.number)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the id in a text such as "p1/s0/i3/c7"; anything else is a ConfigurationError."""
        match = _ID.fullmatch(text)
        if not match:
            raise ConfigurationError(
                f"checkpoint {text!r}: allowed: a shard's such as p1/s0/i3/c7, a drained one as j1"
            )
        return cls(*map(int, match.groups()))


def part_of(manifest: ShardManifest) -> ShardPart:
    """Return a shard's checkpoint as part of a drained one."""
    content = encode(manifest)
    return ShardPart(name=CheckpointId.of(manifest).folder, size_bytes=len(content), sha256=sha256_of(content))


def initial_name(job_digest: str) -> str:
    """Return the name of the manifest of a job's initial values."""
    return f"initial/{job_digest}/{MANIFEST_NAME}"


def initial_folder(job_digest: str, incarnation: int) -> str:
    """Return the folder of the initial values that an incarnation of the coordinator wrote."""
    return f"initial/{job_digest}/i{incarnation:08d}"


def evaluated_name(after_steps: int, token: str) -> str:
    """Return the file name of the weights of an evaluation; the token distinguishes its attempts."""
    return f"{EVALUATED}/{after_steps:012d}-{token}.safetensors"


def plan_name(version: int) -> str:
    """Return the name of a plan's record."""
    return f"plans/{version:04d}.json"


def job_name(number: int) -> str:
    """Return the name of a drained checkpoint's manifest."""
    return f"jobs/j{number:08d}.json"


def parse_job_id(text: str) -> int | None:
    """Return the number of a drained checkpoint in its id, such as 1 for "j1"; None if the text is no such id."""
    match = _JOB_ID.fullmatch(text)
    return int(match[1]) if match else None


class Catalogue:
    """What a store holds. Nothing is cached: each call reads the store.

    Every method raises StoreFailed on an error of the store, and DamagedCheckpoint for a record that is corrupt or has
    another record's name.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def shard_checkpoints(self, plan_version: int, shard: int, after: CheckpointId | None = None) -> list[CheckpointId]:
        """Return the checkpoints of a shard that have a manifest, the oldest first; only those after `after`."""
        found = []
        for folder in self.store.folders(shard_folder(plan_version, shard)):
            match = re.fullmatch(r"i(\d{8,})-c(\d{8,})", folder, re.ASCII)
            if match:
                id_ = CheckpointId(plan_version, shard, int(match[1]), int(match[2]))
                if (after is None or id_ > after) and self.has(id_):
                    found.append(id_)
        return sorted(found)

    def checkpoints(self) -> list[CheckpointId]:
        """Return the checkpoints of all shards and plans that have a manifest: by plan, by shard, the oldest first."""
        found: list[CheckpointId] = []
        for version in _numbers(self.store.folders("shards"), r"p(\d{4,})"):
            for shard in _numbers(self.store.folders(f"shards/p{version:04d}"), r"s(\d{4,})"):
                found += self.shard_checkpoints(version, shard)
        return found

    def has(self, id_: CheckpointId) -> bool:
        """Return whether a shard's checkpoint exists, that is, whether its manifest does."""
        return MANIFEST_NAME in self.store.names(id_.folder)

    def manifest(self, id_: CheckpointId) -> ShardManifest:
        """Return the manifest of a shard's checkpoint."""
        manifest = self._read(ShardManifest, id_.manifest_name)
        self._check_place(id_.manifest_name, str(CheckpointId.of(manifest)), str(id_))
        return manifest

    def part_manifest(self, job: JobManifest, shard: int) -> ShardManifest:
        """Return the manifest of a shard's part of a drained checkpoint.

        DamagedCheckpoint if it is missing, does not match the digest in the job manifest, or is of another run, plan or
        set of steps.
        """
        part = job.parts[shard]
        name = f"{part.name}/{MANIFEST_NAME}"
        where = place_of(self.store, name)
        try:
            content = self.store.read(name, MANIFEST_BYTES_MAX)
        except NotStored:
            raise DamagedCheckpoint(f"{where}: is not there, and part of drained checkpoint j{job.number}") from None
        if len(content) != part.size_bytes or sha256_of(content) != part.sha256:
            raise DamagedCheckpoint(f"{where}: is not the manifest that drained checkpoint j{job.number} was made of")
        manifest = decode(ShardManifest, content, where)
        self._check_place(name, CheckpointId.of(manifest).folder, part.name)
        for key, found, due in (
            ("shard", manifest.shard, shard),
            ("plan", manifest.plan_version, job.plan_version),
            ("run", manifest.run_id, job.run_id),
            ("job digest", manifest.job_digest, job.job_digest),
            ("applied steps", manifest.applied, ((0, job.steps),) if job.steps else ()),
        ):
            if found != due:
                raise DamagedCheckpoint(f"{where}: {key} {found}, and drained checkpoint j{job.number} has {due}")
        return manifest

    def job_checkpoints(self) -> list[int]:
        """Return the numbers of the drained checkpoints, the oldest first."""
        return _numbers(self.store.names("jobs"), r"j(\d{8,})\.json")

    def job_manifest(self, number: int) -> JobManifest:
        """Return the manifest of a drained checkpoint."""
        manifest = self._read(JobManifest, job_name(number))
        self._check_place(job_name(number), f"j{manifest.number}", f"j{number}")
        return manifest

    def newest_job_manifest(self) -> JobManifest | None:
        """Return the newest manifest of a drained checkpoint that is not damaged.

        Newest by coordinator incarnation first: a superseded coordinator may have written later.
        """
        manifests = [m for m in map(self._undamaged_job, self.job_checkpoints()) if m]
        return max(manifests, key=lambda m: (m.coordinator_incarnation, m.number), default=None)

    def damaged_job_checkpoints(self) -> list[int]:
        """Return the numbers of the drained checkpoints whose manifest is damaged, the oldest first."""
        return [number for number in self.job_checkpoints() if self._undamaged_job(number) is None]

    def pinned(self) -> set[str]:
        """Return the folders of the parts of drained checkpoints, which must not be deleted."""
        manifests = map(self._undamaged_job, self.job_checkpoints())
        return {part.name for manifest in manifests if manifest for part in manifest.parts}

    def plans(self) -> list[int]:
        """Return the versions of the plans, the oldest first."""
        return _numbers(self.store.names("plans"), r"(\d{4,})\.json")

    def plan(self, version: int) -> PlanRecord:
        """Return the record of a plan."""
        record = self._read(PlanRecord, plan_name(version))
        self._check_place(plan_name(version), f"plan {record.version}", f"plan {version}")
        return record

    def newest_plan(self) -> PlanRecord | None:
        """Return the newest plan; a damaged one is an error, since an older one would be wrong."""
        versions = self.plans()
        return self.plan(versions[-1]) if versions else None

    def run(self) -> RunRecord | None:
        """Return the record of the store's run, or None if it has none."""
        try:
            return self._read(RunRecord, RUN_NAME)
        except NotStored:
            return None

    def of_run(self, run_id: str) -> Self:
        """Return this catalogue; ConfigurationError if the store is not the run's: no other one is written to."""
        found = self.run()
        if found is None or found.run_id != run_id:
            what = "is not on this machine" if found is None else f"is of another run, {found.run_id}, on this machine"
            raise ConfigurationError(
                f"the run's checkpoint store, {self.store.url}, {what}: share that folder at the same path, or set "
                "checkpoint.url to a bucket"
            )
        return self

    def initial_manifests(self) -> list[str]:
        """Return the digests of the jobs whose initial values are stored, sorted."""
        return [
            digest
            for digest in self.store.folders("initial")
            if re.fullmatch(r"[0-9a-f]{64}", digest) and MANIFEST_NAME in self.store.names(f"initial/{digest}")
        ]

    def initial_manifest(self, job_digest: str) -> InitialManifest | None:
        """Return the manifest of a job's initial values, or None if none are stored."""
        name = initial_name(job_digest)
        try:
            manifest = self._read(InitialManifest, name)
        except NotStored:
            return None
        self._check_place(name, f"job {manifest.job_digest[:12]}", f"job {job_digest[:12]}")
        return manifest

    def check_record(self, name: str) -> None:
        """Verify the digest of a record of any kind."""
        check_whole(self.store.read(name, MANIFEST_BYTES_MAX), place_of(self.store, name))

    def _undamaged_job(self, number: int) -> JobManifest | None:
        try:
            return self.job_manifest(number)
        except DamagedCheckpoint:
            return None

    def _read(self, kind: type[R], name: str) -> R:
        return decode(kind, self.store.read(name, MANIFEST_BYTES_MAX), place_of(self.store, name))

    def _check_place(self, name: str, found: str, due: str) -> None:
        if found != due:
            raise DamagedCheckpoint(f"{place_of(self.store, name)}: holds {found}, and {due} belongs here")


def by_age(manifest: ShardManifest) -> tuple[int, ...]:
    """Return the sort key of a shard's checkpoints; in `sync:N` an older incarnation may have a later round."""
    return (-1 if manifest.round is None else manifest.round, manifest.incarnation, manifest.number)


def place_of(store: Store, name: str) -> str:
    """Return the location of a file, for messages."""
    return f"{store.url.rstrip('/')}/{name}"


def shard_folder(plan_version: int, shard: int) -> str:
    """Return the folder of a shard's checkpoints."""
    return f"shards/p{plan_version:04d}/s{shard:04d}"


def _numbers(names: list[str], pattern: str) -> list[int]:
    matches = (re.fullmatch(pattern, name, re.ASCII) for name in names)
    return sorted(int(match[1]) for match in matches if match)
