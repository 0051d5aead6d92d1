"""The Prometheus metrics of `parashard serve`, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from parashard.errors import NotReady
from parashard.serving.served import ServedRun


class ServingCollector(Collector):
    """How far behind its run a server is; nothing while it serves nothing."""

    def __init__(self, run: ServedRun) -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        versions = GaugeMetricFamily(
            "parashard_serve_behind_versions", "Committed checkpoints later than what is served, of the furthest shard."
        )
        seconds = GaugeMetricFamily(
            "parashard_serve_behind_seconds", "Age of the oldest version that is served; 0 when the job is done."
        )
        try:
            found = self._run.behind()
        except NotReady:
            pass
        else:
            versions.add_metric([], found.versions)
            seconds.add_metric([], found.seconds)
        yield versions
        yield seconds
        resyncs = CounterMetricFamily("parashard_serve_resyncs", "Running shards found to be another incarnation.")
        resyncs.add_metric([], self._run.resyncs)
        yield resyncs
