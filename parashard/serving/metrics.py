"""The Prometheus metrics of `parashard serve`, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from parashard.errors import NotReady
from parashard.serving.served import ServedRun


def serving_families(run: ServedRun) -> Iterator[Metric]:
    """Yield every family: how far behind its run a server is; nothing while it serves nothing."""
    versions = GaugeMetricFamily(
        "parashard_serve_behind_versions", "Committed checkpoints later than what is served, of the furthest shard."
    )
    seconds = GaugeMetricFamily(
        "parashard_serve_behind_seconds", "Age of the oldest version that is served; 0 when the job is done."
    )
    try:
        found = run.behind()
    except NotReady:
        pass
    else:
        versions.add_metric([], found.versions)
        seconds.add_metric([], found.seconds)
    yield versions
    yield seconds
    text = "Running shards found to be another incarnation."
    yield CounterMetricFamily("parashard_serve_resyncs", text, value=run.resyncs)
