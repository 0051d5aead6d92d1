"""Manifests and the other records of the store: their fields and bounds.

A manifest is written last and commits its checkpoint. Owns the fields and their bounds; their bytes are in `encoding`.
Knows nothing of stores.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field

from parashard.checkpoints.encoding import Record, Stored
from parashard.errors import ConfigurationError, DamagedCheckpoint
from parashard.frozen_model import FrozenModel
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import Partition, Plan
from parashard.plan.row_rules import RowRules
from parashard.plan.variables import Initializer, Variable, in_name_order

Count = Annotated[int, Field(ge=0, lt=2**63)]
Ordinal = Annotated[int, Field(ge=0, lt=10**9)]
"""A number in file names: of an incarnation, checkpoint, plan or shard."""
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Field(min_length=1, max_length=200)]
FileName = Annotated[str, Field(pattern="^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$")]
Folder = Annotated[str, Field(pattern="^shards/p[0-9]{4,9}/s[0-9]{4,9}/i[0-9]{8,9}-c[0-9]{8,9}$")]
Slot = Annotated[str, Field(pattern="^[^/]{1,200}$")]
Rows = tuple[Name, Count, Count]
Shape = Annotated[tuple[Annotated[int, Field(ge=1, lt=2**63)], ...], Field(min_length=1)]


class StoredFile(FrozenModel):
    """A file of a checkpoint, in the folder of its manifest, with its size and digest."""

    name: FileName
    size_bytes: Count
    sha256: Sha256


class TableFile(StoredFile):
    """A file with rows of an embedding table, which later checkpoints may share.

    `incarnation` and `number` are of the checkpoint that wrote it, in whose folder it is; `gone` counts removed keys,
    and `buckets` is the half-open range of its keys' buckets.
    """

    incarnation: Ordinal
    number: Ordinal
    table: Name
    rows: Count
    gone: Count
    buckets: tuple[Count, Count]


class TableRule(FrozenModel):
    """A table's eviction rules that depend on time alone; see `parashard.plan.row_rules`."""

    table: Name
    unused_steps: Annotated[int, Field(ge=1, lt=2**32)] | None
    norm_below: Annotated[float, Field(ge=0, le=1e15)]
    norm_every: Annotated[int, Field(ge=1, lt=2**32)]

    @property
    def rules(self) -> RowRules:
        """The rules."""
        return RowRules(
            evict_unused_steps=self.unused_steps,
            evict_norm_below=self.norm_below,
            evict_norm_every=self.norm_every,
        )


def _sorted(steps: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    if tuple(IntervalSet(steps).intervals()) != steps:
        raise ValueError("intervals must be sorted, not empty, and must not touch")
    return steps


def _different(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) != len(values):
        raise ValueError("all must differ from each other")
    return values


def _different_and_not_empty(partitions: tuple[Rows, ...]) -> tuple[Rows, ...]:
    if any(start >= stop for _, start, stop in partitions):
        raise ValueError("row ranges must not be empty")
    return _different(partitions)


def _named_differently(files: tuple[StoredFile, ...]) -> tuple[StoredFile, ...]:
    _different(tuple(file.name for file in files))
    return files


Steps = Annotated[tuple[tuple[Count, Count], ...], AfterValidator(_sorted)]


class ShardManifest(Record):
    """One shard's state at one moment; the files that it names hold the arrays.

    `applied` are half-open intervals of steps, `skipped` those of them that were skipped with an empty push (omitted if
    there are none), `partitions` half-open row ranges in the order of the plan. `round` is None except in `sync:N`.
    `log_position` is None, unless an earlier version that kept a log of later pushes wrote it. `tables` has the number
    of rows of each embedding table that has any, and `table_files` all files with these rows, in the order written
    (both omitted if there are none); rows that `table_rules` have evicted by time `version` are counted, too.
    `written_at` is in seconds since 1970, for information.
    """

    kind = "shard-manifest"
    later = ("skipped", "tables", "table_files", "table_rules")

    run_id: Name
    job_digest: Sha256
    plan_version: Ordinal
    shard: Ordinal
    incarnation: Ordinal
    number: Ordinal
    round: Count | None
    version: Count
    applied: Steps
    slots: Annotated[tuple[Slot, ...], AfterValidator(_different)]
    partitions: Annotated[tuple[Rows, ...], AfterValidator(_different_and_not_empty)]
    files: Annotated[tuple[StoredFile, ...], AfterValidator(_named_differently)]
    written_at: float
    log_position: Count | None = None
    skipped: Steps = ()
    tables: Annotated[tuple[tuple[Name, Count], ...], AfterValidator(_different)] = ()
    table_files: tuple[TableFile, ...] = ()
    table_rules: tuple[TableRule, ...] = ()

    @property
    def steps(self) -> IntervalSet:
        """A new set of the applied steps."""
        return IntervalSet(self.applied)

    @property
    def skipped_steps(self) -> IntervalSet:
        """A new set of the skipped steps."""
        return IntervalSet(self.skipped)

    @property
    def held(self) -> tuple[Partition, ...]:
        """The partitions, in the order of the plan."""
        return tuple(Partition(*rows) for rows in self.partitions)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files that this checkpoint has written, without the manifest."""
        return sum(file.size_bytes for file in (*self.files, *self.own_table_files))

    @property
    def own_table_files(self) -> tuple[TableFile, ...]:
        """The files of rows in this checkpoint's own folder."""
        own = (self.incarnation, self.number)
        return tuple(file for file in self.table_files if (file.incarnation, file.number) == own)


class StoredVariable(Stored):
    """A variable's declaration; see `parashard.plan.variables.Variable`."""

    later = ("state",)

    name: Name
    shape: Shape
    initializer: Name
    initializer_scale: float
    frozen: bool
    decay: bool
    learning_rate_factor: float
    state: str = ""

    @classmethod
    def of(cls, variable: Variable, **more: Any) -> Self:
        """Return a variable's declaration; `more` are the fields that a subclass adds."""
        return cls(
            name=variable.name,
            shape=tuple(int(n) for n in variable.shape),
            initializer=variable.initializer.kind,
            initializer_scale=float(variable.initializer.scale),
            frozen=variable.frozen,
            decay=variable.decay,
            learning_rate_factor=float(variable.learning_rate_factor),
            state=variable.state,
            **more,
        )

    def to_variable(self, **more: Any) -> Variable:
        """Return the variable, or raise ConfigurationError if its fields are invalid."""
        return Variable(
            name=self.name,
            shape=self.shape,
            initializer=Initializer(self.initializer, self.initializer_scale),
            frozen=self.frozen,
            decay=self.decay,
            learning_rate_factor=self.learning_rate_factor,
            state=self.state,
            **more,
        )


class StoredPlan(FrozenModel):
    """The variables in name order, and for each shard its partitions in order."""

    variables: tuple[StoredVariable, ...]
    shards: tuple[tuple[Rows, ...], ...]


class PlanRecord(Record):
    """A version of the plan. Build it with `PlanRecord.of`, read it with `to_plan`.

    `source` is the drained checkpoint ("j1") that its shards start from; None: the initial values.
    """

    kind = "plan"

    version: Ordinal
    plan: StoredPlan
    source: Name | None
    coordinator_incarnation: Ordinal

    @classmethod
    def of(cls, plan: Plan, *, source: str | None, coordinator_incarnation: int) -> Self:
        """Return the record of a plan."""
        variables = tuple(StoredVariable.of(v) for v in in_name_order(plan.variables))
        shards = tuple(tuple((p.variable, p.row_start, p.row_stop) for p in shard) for shard in plan.shards)
        return cls(
            version=plan.version,
            plan=StoredPlan(variables=variables, shards=shards),
            source=source,
            coordinator_incarnation=coordinator_incarnation,
        )

    def to_plan(self) -> Plan:
        """Return the plan; DamagedCheckpoint unless variables are valid and each row is placed exactly once."""
        try:
            variables = {v.name: v.to_variable() for v in self.plan.variables}
        except ConfigurationError as error:
            raise DamagedCheckpoint(f"plan {self.version}: {error}") from None
        shards = tuple(tuple(Partition(*rows) for rows in shard) for shard in self.plan.shards)
        covered = dict.fromkeys(variables, 0)
        for p in sorted(p for shard in shards for p in shard):
            if covered.get(p.variable) != p.row_start or p.row_stop <= p.row_start:
                raise DamagedCheckpoint(
                    f"plan {self.version}: rows [{p.row_start}, {p.row_stop}) of variable {p.variable!r} do not follow "
                    f"row {covered.get(p.variable)}"
                )
            covered[p.variable] = p.row_stop
        short = [name for name, rows in covered.items() if rows != variables[name].rows]
        if short:
            raise DamagedCheckpoint(f"plan {self.version}: not every row is placed of {', '.join(short)}")
        return Plan(self.version, variables, shards)


class ShardPart(FrozenModel):
    """One shard's checkpoint in a drained one: its folder, and size and digest of its manifest."""

    name: Folder
    size_bytes: Count
    sha256: Sha256


class JobManifest(Record):
    """A drained checkpoint: the applied set of every part is exactly [0, steps). Part i is shard i's.

    `final`: it completes the job. `written_at` is in seconds since 1970, for information.
    """

    kind = "job-manifest"

    run_id: Name
    job_digest: Sha256
    number: Ordinal
    plan_version: Ordinal
    coordinator_incarnation: Ordinal
    steps: Count
    final: bool
    parts: Annotated[tuple[ShardPart, ...], Field(min_length=1)]
    written_at: float


class InitialManifest(Record):
    """Initial values of a run that are not drawn from its seed; named by the job's digest, which covers them.

    `variables` are names and shapes of those in the files, `sha256` is `parashard.plan.variables.values_sha256`
    of them, and `incarnation` the coordinator's that wrote the files. `table_files` have rows of tables, and `slots`
    are pairs of an optimizer's slot and a variable whose state is in `slot_files`; `sha256` covers these, too.
    """

    kind = "initial-manifest"

    job_digest: Sha256
    incarnation: Ordinal
    sha256: Sha256
    variables: Annotated[tuple[tuple[Name, Shape], ...], Field(min_length=1)]
    files: tuple[StoredFile, ...]
    table_files: tuple[TableFile, ...] = ()
    slots: tuple[tuple[Name, Name], ...] = ()
    slot_files: tuple[StoredFile, ...] = ()


class RunRecord(Record):
    """The run that a store belongs to; `identity` is the result of `parashard.job.digest.job_identity`."""

    kind = "run"

    run_id: Name
    job_digest: Sha256
    identity: dict[str, Any]
    job_toml: str
    created_at: float
