"""The worker's Prometheus metrics, read from its loop when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from parashard_worker.loop import StepLoop


def worker_families(loop: StepLoop, worker: str) -> Iterator[Metric]:
    """Yield every family of a worker."""

    def counter(name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"parashard_worker_{name}", text, labels=["worker"])
        family.add_metric([worker], value)
        return family

    yield counter("steps", "Steps computed and acknowledged by every shard.", loop.steps)
    yield counter("computed_steps", "Steps computed, whatever became of them.", loop.computed)
    yield counter("staleness_pushes", "Staleness of its pushes, added up.", loop.staleness_pushes)
    yield counter("examples", "Examples in these steps.", loop.examples)
    phases = CounterMetricFamily(
        "parashard_worker_phase_seconds", "Where the step loop's time went.", labels=["worker", "phase"]
    )
    for phase, seconds in dict(loop.phases_s).items():
        phases.add_metric([worker, phase], seconds)
    yield phases
    yield counter("transfer_seconds", "Duration of pulls and pushes, waited for or not.", loop.transfer_s)
