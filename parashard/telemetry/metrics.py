"""Metrics: what a process shows at /metrics, as families of prometheus_client.

Nothing is counted here: each scrape reads what the process counts anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from parashard import __version__
from parashard.process.best_effort import failed_writes
from parashard.security.credentials import Credentials


class Metrics:
    """The metrics of one process; thread-safe."""

    def __init__(
        self,
        role: str,
        credentials: Credentials | None = None,
        refused: Mapping[str, Callable[[], int]] | None = None,  # by reason, which does not name the peer
    ) -> None:
        self._role = role
        self._credentials = credentials
        self._refused = refused
        self._more: list[Callable[[], Iterable[Metric]]] = []

    def add(self, families: Callable[[], Iterable[Metric]]) -> None:
        """Show further families, which every scrape asks for."""
        self._more.append(families)

    def collect(self) -> Iterator[Metric]:
        """Yield every family: what all processes show, then what was added."""
        yield from ProcessCollector(registry=None).collect()
        yield from self._common()
        for families in list(self._more):
            yield from families()

    def scrape(self) -> tuple[str, bytes]:
        """Return the content type and the text of all metrics."""
        return CONTENT_TYPE_LATEST, generate_latest(cast(Collector, self))

    def _common(self) -> Iterator[Metric]:
        text = "Always 1; the labels tell what runs."
        info = GaugeMetricFamily("parashard_build_info", text, labels=["version", "role"])
        info.add_metric([__version__, self._role], 1)
        yield info
        text = "Writes that failed and that the process goes on without."
        writes = CounterMetricFamily("parashard_failed_writes", text, labels=["what"])
        for what, count in ({"log lines": 0} | failed_writes()).items():
            writes.add_metric([what.removeprefix("the ").replace(" ", "_").replace("'", "")], count)
        yield writes
        if self._refused is not None:
            refused = CounterMetricFamily("parashard_refused_peers", "Refused to a peer, by reason.", labels=["reason"])
            for reason, count_refused in self._refused.items():
                refused.add_metric([reason], count_refused())
            yield refused
        if self._credentials is not None:
            expires_s = self._credentials.current().expires.timestamp()  # looks for new files
            name = "parashard_certificate_expires_timestamp_seconds"
            text = "Unix time at which the first of the process' certificates expires."
            yield GaugeMetricFamily(name, text, value=expires_s)
