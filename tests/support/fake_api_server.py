"""FakeApiServer: the part of the Kubernetes API that the coordinator uses, over real HTTP.

Keeps pods and one Job with resource versions, streams watches line by line, forgets old versions (410 Gone, as a status
or as an event in the stream), refuses changes of a version that is not the newest (409), and breaks when told to: with
a status, without an answer, or with a line in the stream that no API server should send.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]

NAMESPACE = "team"
JOB = "digits-worker"
PODS_PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"
JOB_PATH = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{JOB}"
WATCH_MAX_S = 30.0
LABELS = {"app.kubernetes.io/instance": "digits"}


class FakeApiServer:
    """Serves on a free port of loopback until `close`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._version = 1
        self._oldest = 1  # versions before it are forgotten
        self._pods: dict[str, Object] = {}
        self._events: list[tuple[int, Object]] = []
        self._watches: set[int] = set()
        self.job: Object = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": JOB, "namespace": NAMESPACE, "resourceVersion": "1"},
            "spec": {
                "parallelism": 2,
                "completions": 2,
                "template": {"metadata": {"labels": dict(LABELS)}, "spec": {"containers": [{"name": "worker"}]}},
            },
            "status": {},
        }
        self.answers: deque[int] = deque()
        """Statuses that the next requests are answered with, whatever they ask for; 0 closes the connection."""
        self.seen: list[str] = []
        """Every request: its verb, and for a list what it selects."""
        self.lines: deque[bytes] = deque()
        """Lines that the next watches get, one each, before they are hung up on."""
        self.refuses_patches = False
        """Answer every patch with 403, until told otherwise."""
        self.conflicts = 0
        """How many of the next patches conflict with a concurrent change."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.get(self)

            def do_PATCH(self) -> None:
                fake.patch(self)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every watch and the server."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    # --- what happens in the cluster ---

    def put(self, name: str, role: str = "worker", uid: str = "", **status: Any) -> None:
        """Add a pod, or give it another status."""
        with self._changed:
            kind = "MODIFIED" if name in self._pods else "ADDED"
            labels = {**LABELS, "app.kubernetes.io/component": role}
            pod = {"metadata": {"name": name, "uid": uid or f"uid-{name}", "labels": labels}, "status": status}
            self._pods[name] = pod
            self._record(kind, pod)

    def delete(self, name: str) -> None:
        """Take a pod away."""
        with self._changed:
            self._record("DELETED", self._pods.pop(name))

    def forget(self, *, quietly: bool = False) -> None:
        """Compact: no watch can go on from a version before now; those under way hear it, unless `quietly`."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            if not quietly:
                self._changed.notify_all()

    def wait_for_watch(self, deadline_s: float = 60.0) -> None:
        """Wait until a client watches from the newest version on."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._version in self._watches, deadline_s), "no client watches"

    def wait_for_requests(self, verb: str, count: int, deadline_s: float = 60.0) -> None:
        """Wait until there have been so many requests of a kind."""
        with self._changed:
            enough = self._changed.wait_for(lambda: self.count(verb) >= count, deadline_s)
            assert enough, self.seen

    def count(self, verb: str) -> int:
        """Return how many requests of a kind there have been."""
        return [seen.split()[0] for seen in self.seen].count(verb)

    def _saw(self, what: str) -> None:
        with self._changed:
            self.seen.append(what)
            self._changed.notify_all()

    def _record(self, kind: str, pod: Object) -> None:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, {"type": kind, "object": deepcopy(pod)}))
        self._changed.notify_all()

    # --- what is asked ---

    def get(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a list, a watch or the reading of the Job."""
        parts = urlsplit(request.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        watching = "watch" in query
        verb = "watch" if watching else "get" if parts.path == JOB_PATH else "list"
        self._saw(f"{verb} {query.get('labelSelector', '')}".strip())
        if self._fails(request):
            return
        if parts.path == JOB_PATH:
            with self._changed:
                self._answer(request, 200, self.job)
        elif parts.path != PODS_PATH:
            self._answer(request, 404, {"message": "not found"})
        elif watching:
            self._stream(request, int(query["resourceVersion"]))
        else:
            with self._changed:
                metadata = {"resourceVersion": str(self._version)}
                self._answer(request, 200, {"metadata": metadata, "items": list(self._pods.values())})

    def patch(self, request: BaseHTTPRequestHandler) -> None:
        """Change the Job, if what is changed is its newest version."""
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        self._saw("patch")
        if self._fails(request):
            return
        if self.refuses_patches:
            self._answer(request, 403, {"message": "as told"})
            return
        with self._changed:
            metadata = self.job["metadata"]
            if self.conflicts:
                self.conflicts -= 1
                metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
            if body["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
                self._answer(request, 409, {"message": "the object has been modified"})
                return
            self.job["spec"].update(body["spec"])
            metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
            self._answer(request, 200, self.job)
            self._changed.notify_all()

    def wait_for_parallelism(self, workers: int, deadline_s: float = 60.0) -> None:
        """Wait until the Job is scaled so."""
        with self._changed:
            reached = self._changed.wait_for(lambda: self.job["spec"]["parallelism"] == workers, deadline_s)
            assert reached, self.job["spec"]

    def _stream(self, request: BaseHTTPRequestHandler, version: int) -> None:
        with self._changed:
            if version < self._oldest:
                self._answer(request, 410, {"message": "too old resource version"})
                return
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        if self.lines:
            self._send_line(request, self.lines.popleft())
            request.wfile.write(b"0\r\n\r\n")
            return
        while True:
            with self._changed:
                self._watches.add(version)
                self._changed.notify_all()
                self._changed.wait_for(lambda at=version: self._closed or self._version > at, WATCH_MAX_S)
                self._watches.discard(version)
                if self._closed or self._version == version:
                    request.wfile.write(b"0\r\n\r\n")
                    return
                events = [event for number, event in self._events if number > version]
                if version < self._oldest:
                    events = [{"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}]
                version = self._version
            for event in events:
                self._send_line(request, json.dumps(event).encode())
            if events[0]["type"] == "ERROR":
                request.wfile.write(b"0\r\n\r\n")
                return

    def _send_line(self, request: BaseHTTPRequestHandler, line: bytes) -> None:
        request.wfile.write(f"{len(line) + 1:x}\r\n".encode() + line + b"\n\r\n")

    def _fails(self, request: BaseHTTPRequestHandler) -> bool:
        if not self.answers:
            return False
        status = self.answers.popleft()
        if status:
            self._answer(request, status, {"message": "as told"})
        else:
            request.close_connection = True
        return True

    def _answer(self, request: BaseHTTPRequestHandler, status: int, content: Object) -> None:
        body = json.dumps(content).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
