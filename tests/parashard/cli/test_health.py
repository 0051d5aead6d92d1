"""`parashard health`: ready, not ready, no listener and a foreign server are four answers, by exit code too."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from parashard.cli.health import REASON_BYTES_MAX, ask
from parashard.errors import NotReady, Unreachable, WrongRun
from parashard.process.shell import ExitCode
from parashard.telemetry.http import HttpPort, Metrics
from support.command_line import Ran, run_command
from support.waiting import DEADLINE_S


class Service:
    """The HTTP port of a service whose readiness a test may change."""

    def __init__(self) -> None:
        self.reason = ""
        self.port = HttpPort("127.0.0.1", 0, Metrics("shard"), lambda: self.reason)


@pytest.fixture
def service() -> Iterator[Service]:
    """Return a service that is ready."""
    service = Service()
    service.port.start()
    yield service
    service.port.stop()


@pytest.fixture
def foreign_server() -> Iterator[Callable[[int, bytes], str]]:
    """Return a function that starts a server which answers everything in one way, and returns its address."""
    servers: list[http.server.HTTPServer] = []

    def serve(status: int, body: bytes) -> str:
        class Answers(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        servers.append(http.server.HTTPServer(("127.0.0.1", 0), Answers))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return f"127.0.0.1:{servers[-1].server_address[1]}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def unused_address() -> Iterator[str]:
    """Return an address without a listener: bound, so that no other process gets it meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_a_ready_service_is_ready_and_alive(service):
    ask(service.port.address, live=False, timeout_s=DEADLINE_S)
    ask(service.port.address, live=True, timeout_s=DEADLINE_S)


def test_a_service_that_is_not_ready_says_why_and_is_alive(service):
    service.reason = "waiting for the shards"
    with pytest.raises(NotReady, match="waiting for the shards") as refused:
        ask(service.port.address, live=False, timeout_s=DEADLINE_S)
    assert refused.value.peer == service.port.address
    ask(service.port.address, live=True, timeout_s=DEADLINE_S)


def test_no_listener_is_unreachable(unused_address):
    with pytest.raises(Unreachable, match="no answer"):
        ask(unused_address, live=True, timeout_s=DEADLINE_S)


@pytest.mark.parametrize(("status", "body"), [(200, b"<h1>It works!</h1>"), (404, b"no"), (500, b"")])
def test_a_foreign_server_is_not_taken_for_a_service(foreign_server, status, body):
    with pytest.raises(WrongRun, match="no HTTP port of a parashard service"):
        ask(foreign_server(status, body), live=False, timeout_s=DEADLINE_S)


def test_no_more_is_read_than_a_reason_takes(foreign_server):
    with pytest.raises(NotReady) as refused:
        ask(foreign_server(503, b"x" * 100_000), live=False, timeout_s=DEADLINE_S)
    assert len(refused.value.message) == REASON_BYTES_MAX


def test_no_proxy_is_asked(service, unused_address, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://{unused_address}")
    ask(service.port.address, live=False, timeout_s=DEADLINE_S)


@pytest.fixture
def health(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Return a function that runs `parashard health`."""

    def run(*arguments: str) -> Ran:
        return run_command(monkeypatch, capsys, "health", *arguments)

    return run


def test_the_command_says_ok_or_why_not(service, health):
    assert health(service.port.address) == (ExitCode.DONE, "ok\n", "")
    service.reason = "waiting for the shards"
    ran = health(service.port.address)
    assert (ran.exit_code, ran.err.count("\n")) == (ExitCode.RETRY, 1)
    assert "waiting for the shards" in ran.err
    assert health(service.port.address, "--live").exit_code == ExitCode.DONE


def test_the_host_auto_is_this_machine(service, health, monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    assert health(f"auto:{service.port.address.rpartition(':')[2]}").exit_code == ExitCode.DONE


@pytest.mark.parametrize("text", ["shard-0", "shard-0:", ":7", "shard-0:70000", "shard-0:x"])
def test_what_is_no_address_is_a_mistake_of_the_user(health, text):
    ran = health(text)
    assert (ran.exit_code, "to 65535" in ran.err) == (ExitCode.CONFIGURATION, True)
