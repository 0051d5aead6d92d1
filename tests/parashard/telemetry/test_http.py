"""The HTTP port: /metrics, /livez, /readyz and pages to look at, and no verb that acts."""

import re
import signal
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from parashard import __version__
from parashard.cli.health import ask
from parashard.errors import Unavailable
from parashard.security.credentials import LOOK_S, Credentials
from parashard.security.identity import Role
from parashard.telemetry import http
from parashard.telemetry.http import HEADERS, REQUEST_BYTES_MAX, HttpPort, Metrics
from support.certificates import Certificates
from support.ipv6 import needs_ipv6
from support.shown_metrics import shown_value
from support.waiting import DEADLINE_S, eventually


class Served:
    """An HTTP port whose readiness a test may change."""

    def __init__(self) -> None:
        self.reason = ""
        metrics = Metrics("shard")
        self.pushes = Counter("parashard_pushes", "Pushes.", ["result"], registry=None)
        metrics.add(self.pushes.collect)
        pages = {
            "/": lambda query: (200, "text/html", f"<h1>größe</h1>{query}".encode()),
            "/broken": lambda query: 1 / 0,
        }
        self.port = HttpPort("127.0.0.1", 0, metrics, lambda: self.reason, pages)  # type: ignore[arg-type]

    def get(self, path: str, method: str = "GET") -> tuple[int, str, str]:
        """Return (status, content type, body)."""
        request = urllib.request.Request(f"http://{self.port.address}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture(scope="module")
def _served() -> Iterator[Served]:
    served = Served()
    served.port.start()
    yield served
    served.port.stop()


@pytest.fixture
def served(_served: Served) -> Served:
    """Return the module's one port, ready."""
    _served.reason = ""
    return _served


def test_metrics_are_prometheus_text_and_name_what_runs(served):
    served.pushes.labels("applied").inc(3)
    status, kind, body = served.get("/metrics")
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }
    assert samples["parashard_build_info", ("role", "shard"), ("version", __version__)] == 1.0
    assert samples["parashard_pushes_total", ("result", "applied")] == 3.0


def test_alive_is_not_ready(served):
    served.reason = "not registered with the coordinator"
    assert served.get("/livez") == (200, "text/plain", "ok\n")
    assert served.get("/readyz") == (503, "text/plain", "not registered with the coordinator\n")
    served.reason = ""
    assert served.get("/readyz") == (200, "text/plain", "ok\n")


def test_pages_are_served_and_hear_the_query(served):
    assert served.get("/") == (200, "text/html", "<h1>größe</h1>")
    assert served.get("/?a=1?&b") == (200, "text/html", "<h1>größe</h1>a=1?&b")
    assert served.get("/livez?a=1") == (200, "text/plain", "ok\n")


def test_head_is_get_without_the_body(served):
    assert served.get("/", "HEAD") == (200, "text/html", "")
    assert served.get("/no", "HEAD") == (404, "text/plain", "")


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/no", "/broken"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_every_answer_allows_browsers_nothing_of_others(served, path, method):
    request = urllib.request.Request(f"http://{served.port.address}{path}", method=method)
    try:
        answer = urllib.request.urlopen(request, timeout=DEADLINE_S)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        assert dict(answer.headers).items() >= HEADERS.items()


@pytest.mark.parametrize("path", ["/no", "/metrics/", "/../etc/passwd", "/livez%00"])
def test_what_is_not_there_is_not_found(served, path):
    assert served.get(path) == (404, "text/plain", "not found\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/metrics"])
def test_no_verb_acts(served, method, path):
    assert served.get(path, method)[0] == 501


def test_a_request_is_not_logged(served, capfd):
    served.get("/livez")
    served.get("/no")
    assert capfd.readouterr() == ("", "")


def test_a_page_that_breaks_says_so_and_the_port_goes_on(served):
    status, _, body = served.get("/broken")
    assert (status, body) == (500, "ZeroDivisionError\n")
    assert served.get("/livez")[0] == 200


def test_a_client_that_leaves_before_its_answer_leaves_no_traceback(capfd):
    left = threading.Event()

    def page(query: str) -> tuple[int, str, bytes]:
        left.wait(DEADLINE_S)
        return 200, "text/plain", bytes(8 << 20)

    port = HttpPort("127.0.0.1", 0, Metrics("shard"), lambda: "", {"/": page})
    port.start()
    host, _, number = port.address.rpartition(":")
    with socket.create_connection((host, int(number)), DEADLINE_S) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        eventually(lambda: port._server._open, "the request is there")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
    left.set()
    eventually(lambda: not port._server._open, "the request is over")
    port.stop()
    assert capfd.readouterr() == ("", "")


def test_the_address_names_the_port_that_was_found(served):
    host, _, port = served.port.address.rpartition(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)


@needs_ipv6
def test_it_listens_on_an_ipv6_address_and_is_asked_there():
    port = HttpPort("::1", 0, Metrics("shard"), lambda: "")
    port.start()
    try:
        assert port.address.startswith("[::1]:")
        ask(port.address, live=False, timeout_s=DEADLINE_S)
        with pytest.raises(Unavailable, match=rf"cannot listen on {re.escape(port.address)} for HTTP"):
            HttpPort("::1", int(port.address.rpartition(":")[2]), Metrics("shard"), lambda: "")
    finally:
        port.stop()


def test_a_port_that_is_taken_may_be_free_later(served):
    taken = int(served.port.address.rpartition(":")[2])
    with pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{taken} for HTTP"):
        HttpPort("127.0.0.1", taken, Metrics("shard"), lambda: "")


def test_a_port_that_never_answered_can_be_stopped():
    port = HttpPort("127.0.0.1", 0, Metrics("shard"), lambda: "")
    port.stop()


def test_silent_connections_do_not_block_others(monkeypatch):
    monkeypatch.setattr("parashard.telemetry.http.CONNECTIONS_MAX", 3)
    monkeypatch.setattr("parashard.telemetry.http._Handler.timeout", 60 * DEADLINE_S)
    served = Served()
    served.port.start()
    host, _, port = served.port.address.rpartition(":")
    silent = [socket.create_connection((host, int(port)), DEADLINE_S) for _ in range(3)]
    assert served.get("/livez")[0] == 200
    assert silent[0].recv(1) == b"", "the oldest was evicted"
    for connection in silent:
        connection.close()
    served.port.stop()


@pytest.mark.parametrize("headers", [1, 99])
def test_of_a_request_only_so_much_is_kept(served, headers):
    host, _, port = served.port.address.rpartition(":")
    line = b"X: " + bytes([97]) * (2 * REQUEST_BYTES_MAX // headers) + b"\r\n"
    with socket.create_connection((host, int(port)), DEADLINE_S) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\n" + line * headers)  # it does not end
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.0 431 ")
    assert b"Content-Security-Policy: default-src 'none'" in answer
    assert served.get("/livez")[0] == 200


def test_a_request_that_is_nearly_too_long_is_answered(served):
    padding = "x" * (REQUEST_BYTES_MAX // 2)
    request = urllib.request.Request(f"http://{served.port.address}/livez", headers={"X-Padding": padding})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        assert answer.read() == b"ok\n"


def test_metrics_tell_when_the_certificate_expires_and_see_a_new_one(
    certificates: Certificates, tmp_path: Path
) -> None:
    name, now_s = "parashard_certificate_expires_timestamp_seconds", [0.0]
    certificates.renew(tmp_path, [Role.SHARD], valid_days=2)
    credentials = Credentials(tmp_path, clock=lambda: now_s[0])
    metrics = Metrics("shard", credentials)
    first_s = shown_value(metrics.collect(), name)
    assert first_s == credentials.current().expires.timestamp()
    certificates.renew(tmp_path, [Role.SHARD], valid_days=9)
    now_s[0] += LOOK_S
    assert shown_value(metrics.collect(), name) - first_s == pytest.approx(7 * 86_400, abs=120)
    assert datetime.fromtimestamp(first_s) > datetime.now()


def test_metrics_tell_of_no_certificate_where_there_is_none() -> None:
    assert "certificate" not in str(list(Metrics("shard").collect()))


def test_a_connection_that_is_gone_when_it_is_taken_holds_nothing_up():
    with http._Server("127.0.0.1", 0, {}, {}) as server, pytest.raises(BlockingIOError):
        server.get_request()  # there is none


def test_a_client_that_leaves_before_the_answer_raises_no_sigpipe_in_a_script_that_has_changed_it() -> None:
    signals: list[object] = []
    gone, answered = threading.Event(), threading.Event()

    def slow(query: str) -> tuple[int, str, bytes]:
        gone.wait(DEADLINE_S)
        answered.set()
        return 200, "text/plain", b"late"

    port = HttpPort("127.0.0.1", 0, Metrics("worker"), lambda: "", {"/slow": slow})
    port.start()
    before = signal.signal(signal.SIGPIPE, lambda *given: signals.append(given))
    try:
        host, _, number = port.address.rpartition(":")
        with socket.create_connection((host, int(number)), timeout=DEADLINE_S) as client:
            client.sendall(b"GET /slow HTTP/1.0\r\n\r\n")
        gone.set()
        assert answered.wait(DEADLINE_S)
        eventually(lambda: not port._server._open, "the request is over")
    finally:
        signal.signal(signal.SIGPIPE, before)
        port.stop()
    assert not signals
