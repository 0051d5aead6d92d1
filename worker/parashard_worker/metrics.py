"""The worker's Prometheus metrics, read from its loop when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from parashard_worker.loop import StepLoop


class WorkerCollector(Collector):
    """Translates a loop's counters."""

    def __init__(self, loop: StepLoop, name: str) -> None:
        self._loop = loop
        self._name = name

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield self._counter("steps", "Steps computed and acknowledged by every shard.", self._loop.steps)
        yield self._counter("computed_steps", "Steps computed, whatever became of them.", self._loop.computed)
        yield self._counter("staleness_pushes", "Staleness of its pushes, added up.", self._loop.staleness_pushes)
        yield self._counter("examples", "Examples in these steps.", self._loop.examples)
        phases = CounterMetricFamily(
            "parashard_worker_phase_seconds", "Where the step loop's time went.", labels=["worker", "phase"]
        )
        for phase, seconds in dict(self._loop.phases_s).items():
            phases.add_metric([self._name, phase], seconds)
        yield phases
        yield self._counter(
            "transfer_seconds", "Duration of pulls and pushes, waited for or not.", self._loop.transfer_s
        )

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"parashard_worker_{name}", text, labels=["worker"])
        family.add_metric([self._name], value)
        return family
