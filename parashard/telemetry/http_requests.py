"""Requests of the HTTP port: their bounds, and the answers from its pages.

`parashard.telemetry.http` imports this with the first connection: most local runs never see one.
"""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from parashard.process.logs import log
from parashard.telemetry.http import HEADERS, NO_QUESTIONS, Page, Questions

REQUEST_TIMEOUT_S = 5.0
REQUEST_BYTES_MAX = 16 << 10  # its first line and its headers; the library alone would take 6 MiB
CONNECTIONS_MAX = 64


class RequestServer(ThreadingHTTPServer):
    """A server that silent connections cannot fill: one too many takes the place of the oldest.

    Parameters
    ----------
    listening : socket.socket
        Whose connections it takes.
    pages : dict
        Path -> page.
    questions : Questions
        What answers to POST.
    """

    daemon_threads = True
    timeout = 0  # of `handle_request`: a connection that is gone again must not hold its caller, which has to stop

    def __init__(self, listening: socket.socket, pages: dict[str, Page], questions: Questions = NO_QUESTIONS) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.pages = pages
        self.questions = questions
        self._open: dict[Any, None] = {}  # the oldest first
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= CONNECTIONS_MAX else None
            self._open.pop(oldest, None)
            self._open[request] = None
        if oldest is not None:
            with suppress(OSError):  # it may have ended meanwhile
                oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    server: RequestServer
    timeout = REQUEST_TIMEOUT_S

    def setup(self) -> None:
        super().setup()
        self.rfile = self._request = _BoundedReader(self.rfile)

    def do_GET(self) -> None:
        if self._request.cut:
            self.send_error(431, explain=f"a request has at most {REQUEST_BYTES_MAX} bytes here")
            return
        path, _, query = self.path.partition("?")
        page = self.server.pages.get(path)
        self._answer(lambda: page(query) if page else (404, "text/plain", b"not found\n"))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        questions = self.server.questions
        answers = questions.answers.get(self.path)
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
        if int(length) > questions.bytes_max:
            self.send_error(413, explain=f"{length} bytes; allowed: at most {questions.bytes_max}")
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
    """A request as it comes, which ends after `REQUEST_BYTES_MAX`: no more of it is kept."""

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
        """Return what follows the headers; less than `length` if no more comes."""
        return self._source.read(length)

    def close(self) -> None:
        """Close what it reads."""
        self._source.close()
        super().close()
