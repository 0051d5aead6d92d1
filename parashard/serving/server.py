"""Ports: what listens in `parashard serve`, over a run that is followed.

Puts the parts together. Called by the command line.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from parashard._proto import serving_pb2_grpc
from parashard.errors import NotReady
from parashard.launch.run_folders import how_it_ended
from parashard.protocol.rpc import Server, join_address
from parashard.security.credentials import Credentials
from parashard.serving.metrics import serving_families
from parashard.serving.pages import BODY_BYTES_MAX, Pages
from parashard.serving.served import ServedRun
from parashard.serving.service import ServingService
from parashard.telemetry.http import NO_QUESTIONS, HttpPort, Questions
from parashard.telemetry.metrics import Metrics

REQUEST_BYTES_MAX = 4 << 20


class Ports:
    """The gRPC and the HTTP port over a run that is followed.

    Parameters
    ----------
    run : ServedRun
    host : str
        Where to listen.
    port, http_port : int
        0: any that is free.
    credentials : Credentials, optional
        Then gRPC is inside mutual TLS. HTTP has no TLS.
    lookups_over_http : bool
        Whether HTTP answers look-ups, too.

    Attributes
    ----------
    address, http_address : str
        host:port.

    Raises
    ------
    Unavailable
        If a port is taken.
    """

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
