"""Servers of buckets for tests: a small one of Google Cloud Storage, and a proxy that spoils answers of any.

`serving(handler)` runs either on a free port of this host.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """One request: read here, answered by `answer_request`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def answer_request(self) -> None:
        raise NotImplementedError

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer_request()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET


@contextmanager
def serving(handler: type[Handler]) -> Iterator[str]:
    """Serve on a free port of this host, and give the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refusal(code: str, message: str = "the server's words") -> bytes:
    """Return an error's body, as S3 and Google Cloud Storage have it."""
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


def spoiling(target: str) -> type[Proxy]:
    """Return a handler that passes requests on to the server at `target`, and spoils those that its `faults` say."""
    return type("Spoiling", (Proxy,), {"target": target, "faults": [], "seen": [], "released": threading.Event()})


class Proxy(Handler):
    """Passes requests on, and spoils answers; make one by `spoiling`.

    `faults` has one entry for each of the next requests: "pass"; "lose": carry out and send no answer; "hang": send
    nothing until `released`; or (status, error code).
    """

    target: str
    faults: list[str | tuple[int, str]]
    seen: list[str]
    released: threading.Event

    def answer_request(self) -> None:
        body = self.body()
        self.seen.append(self.command)
        fault = self.faults.pop(0) if self.faults else "pass"
        if fault == "hang":
            self.released.wait(60)
            self.close_connection = True
        elif isinstance(fault, tuple):
            self.answer(fault[0], refusal(fault[1]))
        else:
            connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.target).netloc, timeout=30)
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            content = answer.read()
            if fault == "lose":
                self.close_connection = True
                return
            own = ("content-length", "connection", "transfer-encoding", "date", "server")
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in own}
            if self.command == "HEAD":  # without a body, its length is what it tells
                kept["Content-Length"] = answer.headers.get("Content-Length", "0")
                self.send_response(answer.status)
                for name, value in kept.items():
                    self.send_header(name, value)
                self.end_headers()
                return
            self.answer(answer.status, content, **kept)


class CloudStorage(Handler):
    """What of the XML interface of Google Cloud Storage `ObjectStore` uses, over `contents`; make one by `gcs`.

    Its create is conditional by ``x-goog-if-generation-match: 0``, as documented; the real one was not tried.
    """

    contents: dict[str, bytes]
    lock: threading.Lock

    def answer_request(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        name = urllib.parse.unquote(url.path).lstrip("/").partition("/")[2]
        asked = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        with self.lock:
            if not name:
                self.answer(200, self._listed(asked["prefix"]))
            elif self.command == "PUT":
                body = self.body()
                if self.headers.get("x-goog-if-generation-match") == "0" and name in self.contents:
                    self.answer(412, refusal("PreconditionFailed"))
                    return
                self.contents[name] = body
                self.answer(200, ETag='"1"', x_goog_generation="1")
            elif name not in self.contents:
                self.answer(404, refusal("NoSuchKey"))
            elif self.command == "DELETE":
                del self.contents[name]
                self.answer(204)
            else:
                content = self.contents[name]
                self.send_response(200)
                for header, value in (("ETag", '"1"'), ("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")):
                    self.send_header(header, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

    def _listed(self, prefix: str) -> bytes:
        below = [name for name in sorted(self.contents) if name.startswith(prefix)]
        folders = sorted(
            {prefix + name[len(prefix) :].partition("/")[0] for name in below if "/" in name[len(prefix) :]}
        )
        entries = [
            f"<Contents><Key>{name}</Key><Size>{len(self.contents[name])}</Size><ETag>1</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in below
            if "/" not in name[len(prefix) :]
        ]
        entries += [f"<CommonPrefixes><Prefix>{folder}/</Prefix></CommonPrefixes>" for folder in folders]
        return f"<ListBucketResult>{''.join(entries)}</ListBucketResult>".encode()


def gcs() -> type[CloudStorage]:
    """Return a handler with no contents yet."""
    return type("Gcs", (CloudStorage,), {"contents": {}, "lock": threading.Lock()})


def gcs_key(endpoint: str) -> str:
    """Return what GOOGLE_SERVICE_ACCOUNT_KEY is for a server of ours."""
    key = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    return json.dumps(key)
