"""RefusedPeers: the counter of what peers were refused, by reason.

Knows no limit: each owner of one counts, and is asked when the metrics are scraped. Called by the services that serve
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class RefusedPeers(Collector):
    """Reads counters.

    Parameters
    ----------
    counts : mapping
        Reason -> returns how often it was one. Reasons are few and do not name the peer.
    """

    def __init__(self, counts: Mapping[str, Callable[[], int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield the one family."""
        family = CounterMetricFamily("parashard_refused_peers", "Refused to a peer, by reason.", labels=["reason"])
        for reason, count in self._counts.items():
            family.add_metric([reason], count())
        yield family
