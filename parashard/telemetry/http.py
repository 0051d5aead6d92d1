"""The HTTP port of a process: /metrics, /livez, /readyz and, for some processes, other pages; and its metrics.

Metrics are families of prometheus_client; nothing is counted here: each scrape reads the process's own counters.
Read-only: no request changes anything; a POST is a query too long for a path. Every answer tells browsers to run, load
and frame nothing that this port does not serve itself.
"""

from __future__ import annotations

import io
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, cast

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from parashard import __version__
from parashard.errors import Unavailable
from parashard.process.addresses import Port, address_family, advertised_beside, join_address, listen
from parashard.process.best_effort import failed_writes
from parashard.process.logs import log
from parashard.process.sigpipe import no_sigpipe
from parashard.security.credentials import Credentials

QUEUED_MAX = 128  # with the library's 5, probes would wait for a second or more
POLL_S = 0.05  # how long `stop` may have to wait
REQUEST_TIMEOUT_S = 5.0
REQUEST_BYTES_MAX = 16 << 10  # its first line and its headers; the library alone would take 6 MiB
QUESTION_BYTES_MAX = 2 << 20  # the body of a POST
CONNECTIONS_MAX = 64

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",  # answers are of this moment, and small
}
"""Headers of every answer."""

Page = Callable[[str], tuple[int, str, bytes]]
"""Takes what follows the path's question mark; returns an HTTP status, a content type and a body."""


Handler = Callable[[bytes], tuple[int, str, bytes]]
"""The same for a POST: takes its body."""


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
        """Add families, which every scrape collects."""
        self._more.append(families)

    def collect(self) -> Iterator[Metric]:
        """Yield every family: those of all processes, then those that were added."""
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


class HttpPort:
    """Serves GET, HEAD and POST requests on its own thread."""

    def __init__(
        self,
        host: str,
        port: Port,
        metrics: Metrics,
        ready: Callable[[], str],  # returns why the process is not ready, or ""
        pages: dict[str, Page] | None = None,
        questions: Mapping[str, Handler] | None = None,
        *,
        advertise: str | None = None,
    ) -> None:
        def scraped(query: str) -> tuple[int, str, bytes]:
            return 200, *metrics.scrape()

        def livez(query: str) -> tuple[int, str, bytes]:
            return 200, "text/plain", b"ok\n"

        def readyz(query: str) -> tuple[int, str, bytes]:
            reason = ready()
            return (503, "text/plain", f"{reason}\n".encode()) if reason else (200, "text/plain", b"ok\n")

        own: dict[str, Page] = {"/metrics": scraped, "/livez": livez, "/readyz": readyz}

        def listening(number: int) -> _Server:
            try:
                return _Server(host, number, own | (pages or {}), questions or {})
            except OSError as error:
                where = join_address(host, number)
                raise Unavailable(f"cannot listen on {where} for HTTP: {error.strerror}") from None

        self._server = listen(port, listening)
        self.address = advertised_beside(advertise, join_address(host, self._server.server_address[1]))
        self._thread = threading.Thread(target=self._server.serve_forever, args=[POLL_S], name="http", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and close the port."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingMixIn, TCPServer):
    """A server that silent connections cannot exhaust: above the bound, a new connection evicts the oldest."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = QUEUED_MAX

    def __init__(self, host: str, port: int, pages: Mapping[str, Page], questions: Mapping[str, Handler]) -> None:
        self.address_family = address_family(host)
        self.pages = pages
        self.questions = questions
        self._open: dict[Any, None] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)
        self.socket.setblocking(False)  # a connection that is gone again must not block the thread

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= CONNECTIONS_MAX else None
            self._open.pop(oldest, None)
            self._open[request] = None
        if oldest is not None:
            with suppress(OSError):  # it may have ended meanwhile
                oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error that broke a request; the library would print it. A client that has left is no error."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("request-broke", exc_info=error)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_S

    def setup(self) -> None:
        super().setup()
        self.rfile = self._request = _BoundedReader(self.rfile)

    def handle(self) -> None:
        with no_sigpipe():
            super().handle()

    def do_GET(self) -> None:
        if self._request.cut:
            self.send_error(431, explain=f"a request has at most {REQUEST_BYTES_MAX} bytes here")
            return
        path, _, query = self.path.partition("?")
        page = self.server.pages.get(path)
        self._answer(lambda: page(query) if page else (404, "text/plain", b"not found\n"))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        answers = self.server.questions.get(self.path)
        if answers is None:
            self.send_error(501, explain="only questions are answered here, and none on this path")
            return
        if self._request.cut:
            self.send_error(431, explain=f"a request has at most {REQUEST_BYTES_MAX} bytes here")
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 16):
            self.send_error(411, explain="a question has its length in Content-Length")
            return
        if int(length) > QUESTION_BYTES_MAX:
            self.send_error(413, explain=f"{length} bytes; allowed: at most {QUESTION_BYTES_MAX}")
            return
        body = self._request.read_body(int(length))
        if len(body) < int(length):
            self.send_error(400, explain=f"{len(body)} bytes came of {length}")
            return
        self._answer(lambda: answers(body))

    def _answer(self, answer: Callable[[], tuple[int, str, bytes]]) -> None:
        try:
            status, kind, body = answer()
        except Exception as error:  # the client learns that a page broke, and the port goes on
            log.exception("page-broke", path=self.path)
            status, kind, body = 500, "text/plain", f"{type(error).__name__}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing per request."""


class _BoundedReader(io.BufferedIOBase):
    """The first line and headers of a request, which end after `REQUEST_BYTES_MAX`: no more is read."""

    def __init__(self, source: io.BufferedIOBase) -> None:
        self._source = source
        self._left_bytes = REQUEST_BYTES_MAX
        self.cut = False

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line; nothing once the bound is reached."""
        allowed = self._left_bytes if size is None or size < 0 else min(size, self._left_bytes)
        line = self._source.readline(allowed) if allowed else b""
        self._left_bytes -= len(line)
        self.cut = not self._left_bytes
        return line

    def read_body(self, length: int) -> bytes:
        """Return the body after the headers; shorter than `length` if no more comes."""
        return self._source.read(length)

    def close(self) -> None:
        """Close the source."""
        self._source.close()
        super().close()
