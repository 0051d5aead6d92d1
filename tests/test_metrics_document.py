"""docs/metrics.md names every metric that a process exports, with its type and labels, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parashard.plan.embedding import EmbeddingTable
from parashard.plan.optimizers import SGD
from parashard.serving.server import serving_families
from parashard.serving.versions import Behind
from parashard.telemetry.http import Metrics
from parashard_coordinator.core.calls import CoreSettings
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.evaluations import Evaluations
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.policies import Async
from parashard_coordinator.core.rounds import Rounds
from parashard_coordinator.endpoints.status import StatusView, coordinator_families
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_server.durability.checkpointer import CheckpointRecord
from parashard_server.metrics import shard_families
from parashard_server.push_memory import PushMemory
from parashard_server.shard_host import AdmissionLock, ShardHost
from parashard_server.state.rows.embedding_tables import EmbeddingTables
from parashard_worker.gpu_copies import Traffic
from parashard_worker.worker import worker_families
from support.in_process import WEIGHT_AND_BIAS, plan_of, shard_of

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
TYPES = ("counter", "gauge", "histogram")

CREDENTIALS: Any = SimpleNamespace(current=lambda: SimpleNamespace(expires=datetime.now(UTC)))

Told = tuple[str, str, frozenset[str]]
"""Name as Prometheus shows it, type, labels."""


def documented() -> list[Told]:
    rows = re.findall(
        r"^\| `((?:parashard|process)_\w+)` \| (\w+) \| ([^|]*) \| [^|]+ \| [^|]+ \|$", DOCUMENT.read_text(), re.M
    )
    return [(name, kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows]


def exported() -> Iterator[Told]:
    for metrics in (_coordinator(), _shard(), _worker(), _serve()):
        for family in metrics.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            yield name, family.type, frozenset(labels)


def _coordinator() -> Metrics:
    options = CoreSettings(run_id="run", job_digest="d", steps_total=1, shards=1, workers=1)
    core = Core(JobRecord(options, Async(), Evaluations([], Async(), 1), None, Rounds()))
    view = StatusView("job", "async")
    metrics = Metrics("coordinator", CREDENTIALS, {"calls": lambda: 0})
    metrics.add(partial(coordinator_families, ExclusiveCore(core), view))
    return metrics


def _shard() -> Metrics:
    metrics = Metrics("shard", CREDENTIALS, {"connections": lambda: 0})
    tables = EmbeddingTables([EmbeddingTable("user", 2, SGD(0.1), rows_max=9)], 0, 0, 1)
    served = ShardHost(shard_of(plan_of(WEIGHT_AND_BIAS), tables=tables), AdmissionLock(1), "")
    metrics.add(partial(shard_families, served, PushMemory(1), CheckpointRecord()))
    return metrics


def _worker() -> Metrics:
    session = SimpleNamespace(
        steps_done=0,
        computed=0,
        examples=0,
        phases_s={"lease": 0.0, "pull": 0.0},
        transfers=SimpleNamespace(staleness_pushes=0, transfer_s=0.0),
    )
    loop: Any = SimpleNamespace(session=session, traffic=Traffic(), gpu_wait_s=0.0)
    metrics = Metrics("worker", CREDENTIALS)
    metrics.add(partial(worker_families, loop, "worker-0", lambda: (1, 2)))
    return metrics


def _serve() -> Metrics:
    metrics = Metrics("serve", CREDENTIALS)
    run: Any = SimpleNamespace(behind=lambda: Behind(0, 0.0), watcher=SimpleNamespace(resyncs=0))
    metrics.add(partial(serving_families, run))
    return metrics


def test_every_metric_is_in_the_document_and_none_else() -> None:
    assert len(documented()) == len(set(documented()))
    assert set(documented()) == set(exported())


def test_queries_name_only_metrics_that_there_are() -> None:
    queries = re.findall(r"^```promql\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)
    known = {name for name, _, _ in documented()}
    known |= {f"{name}{part}" for name, kind, _ in documented() if kind == "histogram" for part in ("_bucket", "_sum")}
    assert len(queries) >= 3
    for query in queries:
        assert set(re.findall(r"parashard_\w+", query)) <= known, query


@pytest.mark.parametrize("told", documented(), ids=lambda told: told[0])
def test_names_carry_the_prefix_and_a_known_type(told: Told) -> None:
    name, kind, labels = told
    assert name.startswith(("parashard_", "process_"))
    assert kind in TYPES
    assert labels <= {
        "shard",
        "result",
        "way",
        "worker",
        "table",
        "phase",
        "version",
        "role",
        "reason",
        "what",
        "memory",
    }  # bounded: no step, variable or address
