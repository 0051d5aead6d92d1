"""Evaluations: the newest figures of a process that evaluates, as Prometheus metrics.

Made by `parashard.api.sidecar`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Evaluations(Collector):
    """Shows what a callable returns at each scrape.

    Parameters
    ----------
    newest : callable
        Returns the number of evaluations, the Unix time of the newest, and its figures by name.
    """

    def __init__(self, newest: Callable[[], tuple[int, float, Mapping[str, float]]]) -> None:
        self._newest = newest

    def collect(self) -> Iterator[Metric]:
        """Yield the families; before the first evaluation, only that there was none."""
        count, when_s, figures = self._newest()
        yield CounterMetricFamily("parashard_evaluations", "Files of weights that were evaluated.", value=count)
        if not count:
            return
        yield GaugeMetricFamily(
            "parashard_evaluated_timestamp_seconds", "Unix time of the newest evaluation.", value=when_s
        )
        family = GaugeMetricFamily("parashard_evaluation", "Figures of the newest weights.", labels=["metric"])
        for name, value in figures.items():
            family.add_metric([name], value)
        yield family
