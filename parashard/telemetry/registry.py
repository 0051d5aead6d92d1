"""The Prometheus registry of a process, with metrics common to all. Called by `parashard.telemetry.metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from parashard import __version__
from parashard.process.side_effects import failed_writes
from parashard.security.credentials import Credentials


class _FailedWrites(Collector):
    """What this process could not write and goes on without."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the family, with a zero for the log lines, which every process writes."""
        family = CounterMetricFamily(
            "parashard_failed_writes", "Writes that failed and that the process goes on without.", labels=["what"]
        )
        for what, count in ({"log lines": 0} | failed_writes()).items():
            family.add_metric([what.removeprefix("the ").replace(" ", "_").replace("'", "")], count)
        yield family


class RefusedPeers(Collector):
    """How often something was refused to a peer, by reason."""

    def __init__(self, counts: Mapping[str, Callable[[], int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the one family."""
        family = CounterMetricFamily("parashard_refused_peers", "Refused to a peer, by reason.", labels=["reason"])
        for reason, count in self._counts.items():
            family.add_metric([reason], count())
        yield family


def new_registry(
    role: str, credentials: Credentials | None = None, refused: Mapping[str, Callable[[], int]] | None = None
) -> CollectorRegistry:
    """Return a registry with parashard_build_info and what the system says of the process: memory, time, files.

    With credentials it also has when they expire; to be asked for it makes them look for new files. With `refused` it
    has these counts of refusals by reason.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    info = Gauge("parashard_build_info", "Always 1; the labels tell what runs.", ["version", "role"], registry=registry)
    info.labels(__version__, role).set(1)
    registry.register(_FailedWrites())
    if refused is not None:
        registry.register(RefusedPeers(refused))
    if credentials is not None:
        expires = Gauge(
            "parashard_certificate_expires_timestamp_seconds",
            "Unix time at which the first of the process' certificates expires.",
            registry=registry,
        )

        def present() -> float:
            return credentials.current().expires.timestamp()

        expires.set_function(present)
    return registry
