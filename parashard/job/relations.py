"""Relations: which values of two keys of a job file exclude each other.

Owns one pure check per relation and their order. Knows nothing of where the values came from; `validation` adds that.
Called by `schema.Job` once every key is valid by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parashard.encodings.encoding import Encoding
from parashard.job.embeddings import embedding_of
from parashard.job.keys import dotted
from parashard.job.validation import Relation

if TYPE_CHECKING:
    from parashard.job.embeddings import TableSettings
    from parashard.job.schema import Job

PORT_MAX = 65535


def broken_relations(job: Job) -> Iterator[Relation]:
    """Yield every relation that the job breaks."""
    yield from _consistency(job)
    yield from _encodings(job)
    yield from _optimizer(job)
    yield from _tables(job)
    yield from _ports(job)


def _consistency(job: Job) -> Iterator[Relation]:
    policy = job.consistency.policy
    if policy.kind == "ssp" and job.cluster.pipeline_depth > policy.bound:
        yield (
            "cluster.pipeline_depth",
            "consistency.policy",
            f"<= {policy.bound}, the policy's bound: a worker cannot hold more steps than it may run ahead",
        )
    if policy.kind == "auto" and job.cluster.pipeline_depth:
        yield "cluster.pipeline_depth", "consistency.policy", "0 in auto, which overlaps transfers by itself"


def _encodings(job: Job) -> Iterator[Relation]:
    for pattern, setting in job.variables.items():
        has_residue = setting.encoding is not None and Encoding.parse(setting.encoding).has_residue
        if has_residue and job.consistency.policy.kind == "sync":
            yield (
                dotted("variables", pattern, "encoding"),
                "consistency.policy",
                '"float32", "bfloat16" or "float16" in sync: what int8 and topk leave out depends on which worker '
                "computed which steps",
            )


def _optimizer(job: Job) -> Iterator[Relation]:
    if job.optimizer.requires_unsplit_variables and job.cluster.partitioner.kind != "whole":
        yield (
            "cluster.partitioner.kind",
            "optimizer.kind",
            f'"whole" with {job.optimizer.kind}, which needs the norm of whole variables: [cluster.partitioner] kind = '
            '"whole", or in a script settings={"cluster.partitioner": {"kind": "whole"}} of the trainer',
        )
    rates = {"optimizer.learning_rate": job.optimizer.learning_rate}
    rates |= {
        dotted("tables", name, "optimizer", "learning_rate"): table.optimizer.learning_rate
        for name, table in job.tables.items()
    }
    for key, rate in rates.items():
        if rate < 0 and job.model.kind not in ("ledger", "row_ledger"):
            yield key, "model.kind", "> 0"


def _tables(job: Job) -> Iterator[Relation]:
    if not job.tables:
        return
    if job.cluster.shard_device != "cpu":
        yield "cluster.shard_device", "tables", '"cpu" with tables: rows lie in the host\'s memory'
    policy = job.consistency.policy
    for name, table in sorted(job.tables.items()):
        embedding_of(name, table)
        together = policy.steps_of_update
        most = table.evict_above_rows
        if together > 1 and most is not None and most + together * table.keys_per_step_max > table.rows_max:
            yield (
                dotted("tables", name, "rows_max"),
                "consistency.policy",
                f">= {most + together * table.keys_per_step_max:,} (evict_above_rows and keys_per_step_max of each of "
                f"{together} steps of a round)",
            )
        if job.model.kind == "row_ledger":
            yield from _ledger_of(name, table, in_rounds=together > 1)


def _ledger_of(name: str, table: TableSettings, *, in_rounds: bool) -> Iterator[Relation]:
    """Refuse a table that the ledger of rows could not count in."""
    if table.dtype != "float32":
        yield dotted("tables", name, "dtype"), "model.kind", '"float32": the ledger counts exactly'
    if table.combiner is not None:
        yield dotted("tables", name, "combiner"), "model.kind", "unset: the ledger has no columns of lists"
    if table.encoding != "float32":
        yield dotted("tables", name, "encoding"), "model.kind", '"float32": the ledger counts exactly'
    if table.initializer not in (None, "zeros"):
        yield dotted("tables", name, "initializer"), "model.kind", '"zeros": the ledger counts from 0'
    if in_rounds and table.evict_above_rows is not None:
        why = "unset in sync: which rows this rule drops depends on where rows lie, and the ledger does not know"
        yield dotted("tables", name, "evict_above_rows"), "model.kind", why


def _ports(job: Job) -> Iterator[Relation]:
    last = max(job.cluster.ports_of_shard(job.cluster.shards - 1))
    if job.cluster.port is not None and last > PORT_MAX:
        yield "cluster.port", "cluster.shards", f"<= {job.cluster.port - (last - PORT_MAX)}, for two ports a shard"
