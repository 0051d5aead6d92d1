"""Rows of tables in `sync:N` have the same bits for any number of workers and shards (P28, P35)."""

from __future__ import annotations

from collections.abc import Callable

from support.cluster_run import ClusterRun
from support.command_run import ROOT

Start = Callable[..., ClusterRun]
SETS = (
    "data.examples=6_000",
    "data.held_out=500",
    "job.batch_size=64",
    "consistency.policy=sync:4",
    "checkpoint.every_steps=20",
)


def digests(start_run: Start, *sets: str) -> tuple[dict[str, str], dict[str, int], str]:
    given = [part for text in (*SETS, *sets) for part in ("--set", text)]
    report = start_run(str(ROOT / "examples" / "clicks.toml"), *given).report()
    return report["rows_digest"], report["rows"], report["weights_sha256"]


def test_workers_and_shards_leave_no_trace_in_rows(start_run: Start) -> None:
    travel = "tables.deep.encoding='int8'"
    alone = digests(start_run, "cluster.workers=1", "cluster.shards=1", travel)
    assert min(alone[1].values()) > 1000
    assert digests(start_run, "cluster.workers=3", "cluster.shards=2", travel) == alone
