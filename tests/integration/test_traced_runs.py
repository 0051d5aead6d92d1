"""Whole jobs that trace, with a collector of OpenTelemetry's own protocol; and collectors that are not there."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from parashard.protocol.coordinator_client import ADDRESS_FILE
from parashard.telemetry.tracer import trace_id
from support.cluster_run import ClusterRun, sets
from support.otlp_collector import Collector, Sent

Start = Callable[..., ClusterRun]
EPOCH = ("examples/digits.toml", *sets(job__epochs=1, evaluation__every_epochs=1))


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Return a collector that every process of a run sends to, if it traces."""
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
    yield collector
    collector.stop()


def below(spans: list[Sent], above: Sent) -> Counter[tuple[str, str]]:
    return Counter((s.service, s.name) for s in spans if s.parent == above.id and s.trace == above.trace)


def test_every_step_is_one_trace_of_all_processes(start_run: Start, collector: Collector) -> None:
    run = start_run(*EPOCH, "--trace", *sets(cluster__speculate_after=0, consistency__policy="async"))
    report = run.report()
    total, run_id = report["steps_total"], json.loads((run.dir / ADDRESS_FILE).read_text())["run_id"]
    spans = collector.spans
    leases = collector.named("lease", "coordinator")
    assert {s.trace for s in leases} == {f"{trace_id(run_id, step):032x}" for step in range(total)}
    steps = collector.named("step", "worker")
    assert sorted(s.about["parashard.step"] for s in steps) == list(range(total))
    for step in steps:
        assert step.parent in {s.id for s in leases if s.about["parashard.step"] == step.about["parashard.step"]}
        assert step.about["parashard.outcome"] == "completed"
        assert below(spans, step) == {("parashard-worker", name): 1 for name in ("pull", "compute", "push")}
        pull, push = (next(s for s in spans if (s.parent, s.name) == (step.id, name)) for name in ("pull", "push"))
        assert below(spans, push) == {("parashard-shard", "push"): 2}
        pulled = [s.about["parashard.shard"] for s in spans if s.parent == pull.id and s.service == "parashard-shard"]
        assert set(pulled) == {0, 1}  # over shared memory a second time where the weights moved too often
    applies = collector.named("apply", "shard")
    counted = Counter((s.about["parashard.step"], s.about["parashard.shard"]) for s in applies)
    assert counted == {(step, shard): 1 for step in range(total) for shard in range(2)}  # P1
    pushes = {s.id: s for s in collector.named("push", "shard")}
    assert all(pushes[s.parent].about["parashard.result"] == "applied" for s in applies)
    assert all(s.start_ns <= s.end_ns for s in spans)


def test_without_the_flag_nothing_is_sent(start_run: Start, collector: Collector) -> None:
    start_run(*EPOCH).report()
    assert collector.spans == []


@pytest.mark.parametrize("there", ["no collector", "silent collector"])
def test_a_run_needs_no_collector(start_run: Start, monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # takes connections, and never says a word
        port = listening.getsockname()[1] if there == "silent collector" else 1
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("PARASHARD_TRACE", "1")
        run = start_run(*EPOCH)
        run.report()
    for log in (run.dir / "logs").iterdir():
        lines = log.read_text().splitlines()
        assert sum("opentelemetry" in line or "spans-lost" in line for line in lines) <= 1, log
    assert not run.left_over()


def test_a_wrong_exporter_is_reported_before_anything_is_trained(
    start_run: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "jaeger")
    run = start_run(*EPOCH, "--trace")
    run.wait()
    assert run.process.returncode == 2
    assert "OTEL_TRACES_EXPORTER: found 'jaeger'" in run.complaint()
