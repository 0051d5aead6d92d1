"""Ports: what listens in `parashard serve`, over a run that is followed.

Puts the parts together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from parashard._proto import serving_pb2_grpc
from parashard.errors import NotReady
from parashard.launch.run_folders import how_it_ended
from parashard.protocol.rpc import Server, join_address
from parashard.security.credentials import Credentials
from parashard.serving.pages import BODY_BYTES_MAX, Pages
from parashard.serving.served import ServedRun
from parashard.serving.service import ServingService
from parashard.telemetry.http import NO_QUESTIONS, HttpPort, Metrics, Questions


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
    yield CounterMetricFamily("parashard_serve_resyncs", text, value=run.watcher.resyncs)


REQUEST_BYTES_MAX = 4 << 20


class Ports:
    """The gRPC and the HTTP port over a run that is followed."""

    def __init__(
        self,
        run: ServedRun,
        host: str,
        port: int,
        http_port: int,
        credentials: Credentials | None = None,
        *,
        lookups_over_http: bool = True,
    ) -> None:
        self.run = run
        self.lookups_over_http = lookups_over_http
        pages = Pages(run)
        self._grpc = Server(join_address(host, port), credentials, REQUEST_BYTES_MAX)
        serving_pb2_grpc.add_ServingServicer_to_server(ServingService(run), self._grpc.grpc)  # type: ignore[no-untyped-call]
        metrics = Metrics("serve")
        metrics.add(partial(serving_families, self.run))
        questions = Questions(pages.posts(), BODY_BYTES_MAX) if lookups_over_http else NO_QUESTIONS
        gets = pages.gets() if lookups_over_http else {}
        try:
            self._http = HttpPort(host, http_port, metrics, pages.ready, gets, questions)
        except BaseException:
            self._grpc.grpc.stop(None)
            raise
        self.address, self.http_address = self._grpc.address, self._http.address

    def start(self) -> None:
        """Look once, then serve and follow."""
        self.run.look()
        self._grpc.start()
        self._http.start()
        self.run.start()

    def stop(self) -> None:
        """End all calls, and close the ports."""
        self.run.stop()
        self._http.stop()
        self._grpc.stop()


def why_not_yet(run: ServedRun, run_dir: Path | None) -> str:
    """Return why nothing is served yet, and of a run that is over, that it is; empty: something is."""
    try:
        run.published()
    except NotReady as error:
        ended = None if run_dir is None else how_it_ended(run_dir)
        return str(error) if ended is None else f"{error}; the run is over ({ended[0]}: {ended[1]})"
    return ""
