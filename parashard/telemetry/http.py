"""The HTTP port of a process: /metrics, /livez, /readyz and, where there are any, pages of its own.

Read-only: no verb changes anything; a POST is a question too long for a path. Every answer tells browsers to run, load
and frame nothing that this port does not serve itself. What answers is `parashard.telemetry.http_requests`, which the
first connection imports.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from parashard.errors import Unavailable
from parashard.process.logs import log
from parashard.protocol.rpc import address_family, join_address
from parashard.telemetry.metrics import Metrics

QUEUED_MAX = 128  # http.server's 5 would have probes wait a second and more for their turn
POLL_S = 0.05  # how long `stop` may have to wait

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",  # what is shown is of this moment, and small
}
"""Of every answer."""

Page = Callable[[str], tuple[int, str, bytes]]
"""Takes what follows the path's question mark; returns an HTTP status, a content type and a body."""


class Questions(NamedTuple):
    """What answers to POST, by path, and the most bytes of a question."""

    answers: Mapping[str, Callable[[bytes], tuple[int, str, bytes]]] = MappingProxyType({})
    bytes_max: int = 0


NO_QUESTIONS = Questions()


class HttpPort:
    """Serves GET and HEAD requests on a thread of its own.

    Parameters
    ----------
    host, port
        Where to listen; port 0 picks a free one.
    metrics : Metrics
        What /metrics shows.
    ready : callable
        Returns the reason why the process is not ready, or "" when it is.
    pages : dict, optional
        More paths and what they return.
    questions : Questions
        What answers to POST; by default nothing does.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Metrics,
        ready: Callable[[], str],
        pages: dict[str, Page] | None = None,
        questions: Questions = NO_QUESTIONS,
    ) -> None:
        self._questions = questions

        def scraped(query: str) -> tuple[int, str, bytes]:
            return 200, *metrics.scrape()

        def livez(query: str) -> tuple[int, str, bytes]:
            return 200, "text/plain", b"ok\n"

        def readyz(query: str) -> tuple[int, str, bytes]:
            reason = ready()
            return (503, "text/plain", f"{reason}\n".encode()) if reason else (200, "text/plain", b"ok\n")

        self._pages: dict[str, Page] = {"/metrics": scraped, "/livez": livez, "/readyz": readyz, **(pages or {})}
        self._socket = socket.socket(address_family(host))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(QUEUED_MAX)
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"cannot listen on {join_address(host, port)} for HTTP: {error.strerror}") from None
        self.address = join_address(host, self._socket.getsockname()[1])
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and close the port."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        server = None
        with selectors.DefaultSelector() as arrivals:
            arrivals.register(self._socket, selectors.EVENT_READ)
            while not self._stopping.is_set():
                if not arrivals.select(POLL_S):
                    continue
                try:
                    from parashard.telemetry.http_requests import RequestServer

                    server = server or RequestServer(self._socket, self._pages, self._questions)
                except OSError as error:  # no file can be opened now, not even a module's
                    log.warning("http-not-answered", error=str(error))
                    self._stopping.wait(POLL_S)
                else:
                    server.handle_request()
