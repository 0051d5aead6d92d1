"""Open the run that `parashard serve` serves, by its directory or a coordinator's address, and the server's ports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from parashard._proto import serving_pb2_grpc
from parashard.checkpoints.catalogue import RUN_NAME, Catalogue
from parashard.client.pulled_rows import TableSet
from parashard.errors import ConfigurationError, NotReady
from parashard.job.embeddings import tables_of
from parashard.job.load import job_from_toml
from parashard.job.schema import Job
from parashard.launch.run_folders import how_it_ended, place_of, resumed_job, run_named
from parashard.process.addresses import join_address
from parashard.process.run_files import CHECKPOINTS
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.protocol.rpc import Server
from parashard.security.credentials import Credentials
from parashard.serving.checkpoint_watcher import CheckpointWatcher
from parashard.serving.live_shards import LiveSource, ShardWatcher
from parashard.serving.pages import Pages
from parashard.serving.served import POLL_S, SLOW_POLL_S, ServedRun
from parashard.serving.service import ServingService
from parashard.store import open_store
from parashard.telemetry.http import HttpPort, Metrics

REQUEST_BYTES_MAX = 4 << 20

Tell = Callable[[str], None]


def run_at(place: str, *, fresh: bool, credentials: Credentials | None, tell: Tell) -> ServedRun:
    """Return the run at a place, before the first look at it."""
    if is_address(place):
        return _served_by(place, "", fresh=fresh, credentials=credentials, tell=tell)
    run_dir = run_named(place)
    if fresh:
        ended = how_it_ended(run_dir)
        if ended is not None:
            raise ConfigurationError(
                f"{run_dir}: the run is {ended[0]}, and its shards are gone with it; allowed: to serve it without "
                "--fresh, which serves what they saved last"
            )
        address = find_coordinator(str(run_dir))
        return _served_by(address, str(run_dir), fresh=True, credentials=credentials, tell=tell)
    return run_of(run_dir, resumed_job(run_dir, []).job)


def why_not_yet(run: ServedRun, place: str) -> str:
    """Return why nothing of the run at a place is served yet, and whether it is over; empty if something is served."""
    try:
        run.published()
    except NotReady as error:
        ended = None if is_address(place) else how_it_ended(run_named(place))
        return str(error) if ended is None else f"{error}; the run is over ({ended[0]}: {ended[1]})"
    return ""


def is_address(place: str) -> bool:
    """Tell whether a place is host:port, and not a run."""
    host, _, port = place.rpartition(":")
    return bool(host) and port.isdecimal() and not Path(place_of(place)).is_dir()


def run_of(run_dir: Path, job: Job) -> ServedRun:
    """Return the run of a directory, to serve its committed versions."""
    return _committed(job.checkpoint.url or str(run_dir / CHECKPOINTS), _tables(job), job.job.name)


def _served_by(address: str, where: str, *, fresh: bool, credentials: Credentials | None, tell: Tell) -> ServedRun:
    coordinator = CoordinatorClient(address, where=where, credentials=credentials, tell=tell)
    reply = coordinator.get_job()
    job = job_from_toml(reply.job_toml)
    if fresh:
        coordinator.retry_budget_s = 0.0  # the server looks again by itself, and reports the problem meanwhile
        source = LiveSource(coordinator, credentials)
        return ServedRun(ShardWatcher(source, _tables(job)), _tables(job), job.job.name)
    coordinator.close()
    run = Catalogue(open_store(reply.checkpoint_url)).run()
    if run is None or run.run_id != reply.run_id:
        found = "there is no run" if run is None else f"run {run.run_id} is there"
        raise ConfigurationError(
            f"{address} says that the checkpoints of run {reply.run_id} are in {reply.checkpoint_url}, and {found}; "
            "allowed: a store that this machine reaches by the same name, or --fresh"
        )
    return _committed(reply.checkpoint_url, _tables(job), job.job.name)


def _committed(url: str, tables: TableSet, name: str) -> ServedRun:
    store = open_store(url)
    elements = {table: one.row_elements for table, one in tables.by_name.items()}
    poll_s = POLL_S if store.local_path(RUN_NAME) is not None else SLOW_POLL_S
    return ServedRun(CheckpointWatcher(store, elements), tables, name, poll_s)


def _tables(job: Job) -> TableSet:
    return TableSet(tables_of(job), job.job.seed)


def serving_families(run: ServedRun) -> Iterator[Metric]:
    """Yield every family: how far behind its run a server is (no value while it serves nothing), and its resyncs."""
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


class Ports:
    """The gRPC and the HTTP port of a run that is followed."""

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
        gets, posts = (pages.gets(), pages.posts()) if lookups_over_http else ({}, {})
        try:
            self._http = HttpPort(host, http_port, metrics, pages.ready, gets, posts)
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
