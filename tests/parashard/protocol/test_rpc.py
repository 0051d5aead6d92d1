"""The seam between our errors and gRPC's, over real sockets: what a servicer raises is what its caller gets."""

import errno
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from parashard import errors
from parashard.errors import ConfigurationError, ParashardError
from parashard.protocol import rpc, wire
from parashard.protocol.rpc import ERROR_BY_FOREIGN_STATUS, Server, check_reachable, connect, our_errors, status_of
from support.ipv6 import needs_ipv6
from support.unary_handlers import raw_handlers
from support.waiting import DEADLINE_S

SERVICE = "parashard.test.Echo"

Method = Callable[[bytes, grpc.ServicerContext], bytes]


class Echo:
    """A server whose one method does what the test says, and a channel to it."""

    def __init__(self, **options: int) -> None:
        self.answer: Method = lambda frame, context: frame
        self.server = Server("127.0.0.1:0", **options)
        handlers = raw_handlers(SERVICE, {"Call": lambda *call: self.answer(*call)})  # noqa: PLW0108  # the present one
        self.server.grpc.add_generic_rpc_handlers((handlers,))
        self.server.start()
        self.address = self.server.address
        self.channel = connect(self.address)

    def call(self, frame: bytes = b"", deadline_s: float = DEADLINE_S, method: str = "Call") -> bytes:
        with our_errors(self.address):
            answer: bytes = self.channel.unary_unary(f"/{SERVICE}/{method}")(frame, timeout=deadline_s)
            return answer

    def error(self, raised: Exception) -> ParashardError:
        def refuse(frame: bytes, context: grpc.ServicerContext) -> bytes:
            raise raised

        self.answer = refuse
        with pytest.raises(ParashardError) as caught:
            self.call()
        return caught.value


@pytest.fixture(scope="module")
def _echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.channel.close()
    echo.server.stop(0.0)


@pytest.fixture
def echo(_echo: Echo) -> Echo:
    """Return the module's one server, with its method as it was."""
    _echo.answer = lambda frame, context: frame
    return _echo


@pytest.fixture
def dead_address() -> str:
    """Return an address without a listener."""
    with socket.socket() as once:
        once.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{once.getsockname()[1]}"


# --- our errors ---


@pytest.mark.parametrize("kind", ParashardError.leaves(), ids=lambda kind: kind.__name__)
def test_every_error_of_the_tree_crosses_the_wire(echo, kind):
    error = echo.error(kind(f"why {kind.code} happened"))
    assert type(error) is kind
    assert (error.message, error.peer, error.code) == (f"why {kind.code} happened", echo.address, kind.code)


@pytest.mark.parametrize(
    "message", ["", "one\ntwo", "Größe ✓ 张量", "100 % sure: 'it'", " spaces at both ends "], ids=repr
)
def test_a_message_crosses_as_it_is(echo, message):
    assert echo.error(errors.BadData(message)).message == message


@pytest.mark.parametrize("character", ["x", "ü", "张", "🎲"])
def test_a_message_of_any_length_is_cut_and_its_error_stays_what_it_is(echo, character):
    error = echo.error(errors.BadData(character * 50_000))
    assert type(error) is errors.BadData
    assert error.message.rstrip(" .").strip(character) == ""
    assert 400 < len(error.message) <= rpc.MESSAGE_BYTES_MAX + 4


def test_a_message_that_is_not_text_crosses_with_marks_in_it(echo):
    error = echo.error(errors.BadData("a\udcffb"))  # a file name of bytes that are not UTF-8 looks like this
    assert (type(error), error.message) == (errors.BadData, "a?b")


@pytest.mark.parametrize("bug", [ZeroDivisionError("x / 0"), AssertionError("invariant"), KeyError("y" * 50_000)])
def test_any_other_exception_is_the_peers_failure(echo, bug):
    error = echo.error(bug)
    assert type(error) is errors.PeerFailed
    assert error.message.startswith(f"{type(bug).__name__}: ")
    assert error.peer == echo.address


def test_a_server_that_broke_once_still_serves(echo):
    echo.error(ZeroDivisionError())
    echo.answer = lambda frame, context: frame
    assert echo.call(b"abc") == b"abc"


def test_errors_are_told_apart_by_what_the_caller_must_do():
    group_of = {
        errors.MalformedFrame: grpc.StatusCode.INVALID_ARGUMENT,
        errors.StaleRound: grpc.StatusCode.ABORTED,
        errors.Superseded: grpc.StatusCode.FAILED_PRECONDITION,
        errors.QueueFull: grpc.StatusCode.UNAVAILABLE,
        errors.BadData: grpc.StatusCode.INVALID_ARGUMENT,
        errors.PeerFailed: grpc.StatusCode.INTERNAL,
        errors.JobFailed: grpc.StatusCode.FAILED_PRECONDITION,
    }
    assert {kind: status_of(kind("")) for kind in group_of} == group_of


# --- what gRPC, or something else on that port, says ---


def test_every_status_of_grpc_means_an_error_of_ours():
    assert set(ERROR_BY_FOREIGN_STATUS) == set(grpc.StatusCode)
    assert all(kind.code for kind in ERROR_BY_FOREIGN_STATUS.values())


@pytest.fixture(scope="module")
def foreign_server() -> Iterator[str]:
    """Return the address of a gRPC server that is none of ours: it ends a call with the status that the frame names."""
    server = grpc.server(ThreadPoolExecutor(1))

    def end(frame: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode[frame.decode()], "said another")

    server.add_generic_rpc_handlers((raw_handlers(SERVICE, {"Call": end}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0.0).wait()


@pytest.mark.parametrize("status", [s for s in grpc.StatusCode if s is not grpc.StatusCode.OK], ids=lambda s: s.name)
def test_a_foreign_servers_status_becomes_the_error_of_the_map(foreign_server, status):
    channel = connect(foreign_server)
    try:
        with pytest.raises(ParashardError, match="said another") as caught, our_errors(foreign_server):
            channel.unary_unary(f"/{SERVICE}/Call")(status.name.encode(), timeout=DEADLINE_S)
    finally:
        channel.close()
    assert type(caught.value) is ERROR_BY_FOREIGN_STATUS[status]
    assert caught.value.peer == foreign_server


class _Foreign(grpc.RpcError, grpc.Call):
    """A failed call as another implementation of the server would end it."""

    def __init__(self, status: grpc.StatusCode, details: str | None, metadata: tuple[tuple[str, str], ...] = ()):
        self._status, self._details, self._metadata = status, details, metadata

    def code(self):
        return self._status

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._metadata

    def add_callback(self, callback): ...
    def cancel(self): ...
    def initial_metadata(self): ...
    def is_active(self): ...
    def time_remaining(self): ...


@pytest.mark.parametrize("status", grpc.StatusCode, ids=lambda status: status.name)
def test_the_error_says_what_is_known_even_if_that_is_little(status):
    error = rpc.translated(_Foreign(status, "said another"), "10.0.0.1:7")
    assert type(error) is ERROR_BY_FOREIGN_STATUS[status]
    assert "said another" in error.message
    assert error.peer == "10.0.0.1:7"
    assert rpc.translated(_Foreign(status, None), "10.0.0.1:7").message


def test_a_code_of_a_later_version_falls_back_to_its_status():
    error = rpc.translated(_Foreign(grpc.StatusCode.ABORTED, "x", ((rpc.CODE_KEY, "from-the-future"),)), "a:1")
    assert type(error) is ERROR_BY_FOREIGN_STATUS[grpc.StatusCode.ABORTED]


def test_a_full_server_answers_retry_later_and_refuses_a_message_too_large_for_good():
    full = rpc.translated(_Foreign(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"), "a:1")
    large = rpc.translated(
        _Foreign(grpc.StatusCode.RESOURCE_EXHAUSTED, "Sent message larger than max (9 vs. 8)"), "a:1"
    )
    assert (type(full), type(large)) == (errors.QueueFull, errors.LimitExceeded)


def test_a_method_that_the_peer_does_not_have_means_another_program():
    echo = Echo()
    try:
        with pytest.raises(errors.WrongRun, match="UNIMPLEMENTED") as caught:
            echo.call(method="NoSuchMethod")
        assert caught.value.peer == echo.address
    finally:
        echo.channel.close()
        echo.server.stop(0.0)


def test_a_message_over_the_limit_is_refused_in_both_directions(echo):
    with pytest.raises(errors.LimitExceeded, match="larger than max"):
        echo.call(bytes(wire.FRAME_BYTES_MAX + 1))
    echo.answer = lambda frame, context: bytes(wire.FRAME_BYTES_MAX + 1)
    with pytest.raises(errors.LimitExceeded, match="larger than max"):
        echo.call()
    echo.answer = lambda frame, context: frame
    assert len(echo.call(bytes(wire.FRAME_BYTES_MAX))) == wire.FRAME_BYTES_MAX


def test_a_server_of_small_messages_has_a_bound_of_its_own_for_what_it_is_sent():
    small = Echo(request_bytes_max=1000)
    try:
        assert len(small.call(bytes(1000))) == 1000
        with pytest.raises(errors.LimitExceeded, match=r"larger than max \(1001 vs\. 1000\)"):
            small.call(bytes(1001))
        small.answer = lambda frame, context: bytes(wire.FRAME_BYTES_MAX)
        assert len(small.call()) == wire.FRAME_BYTES_MAX, "what it sends may be as large as ever"
    finally:
        small.channel.close()
        small.server.stop(0.0)


def test_a_call_to_a_dead_port_is_unreachable_within_its_deadline(dead_address):
    channel, started_s = connect(dead_address), time.monotonic()
    try:
        with pytest.raises(errors.Unreachable) as caught, our_errors(dead_address):
            channel.unary_unary("/any/Method")(b"", timeout=0.5)
    finally:
        channel.close()
    assert time.monotonic() - started_s < 3.0
    assert caught.value.peer == dead_address
    assert len(caught.value.message) < 100


def test_a_peer_that_is_silent_is_unreachable_at_the_deadline(echo):
    silent = threading.Event()
    echo.answer = lambda frame, context: b"late" if silent.wait(DEADLINE_S) else b""
    try:
        with pytest.raises(errors.Unreachable, match="DEADLINE_EXCEEDED"):
            echo.call(deadline_s=0.05)
    finally:
        silent.set()


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_peer_is_reached_directly_where_the_environment_names_a_proxy(echo, dead_address, monkeypatch, variable):
    monkeypatch.setenv(variable, f"http://{dead_address}")
    with connect(echo.address) as channel:
        assert channel.unary_unary(f"/{SERVICE}/Call")(b"direct", timeout=DEADLINE_S) == b"direct"


def test_every_maker_of_a_channel_ignores_proxies():
    root = Path(__file__).resolve().parents[3]
    folders = ("parashard", "ps_server", "worker", "coordinator", "tools", "benchmarks", "deploy", "examples")
    texts = [file.read_text() for folder in folders for file in (root / folder).rglob("*.py")]
    makers = [text for text in texts if re.search(r"\b(in)?secure_channel\(", text)]
    assert len(makers) == 4, "rpc.py, plain gRPC's benchmark, two of asyncio; others take a channel of rpc.connect"
    says_so = re.compile(r'\("grpc.enable_http_proxy", 0\)|from benchmarks.scheduling.crowd import .*\bOPTIONS\b')
    assert all(says_so.search(text) for text in makers)


def test_only_failed_calls_are_translated():
    with pytest.raises(KeyError), our_errors("a:1"):
        raise KeyError
    with pytest.raises(errors.Unreachable, match="no answer"), our_errors("a:1"):
        raise grpc.FutureTimeoutError


# --- the server ---


def test_the_health_service_says_serving_and_not_after_stop():
    server = Server("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        server.stop(0.0)
        with pytest.raises(grpc.RpcError):
            health.Check(health_pb2.HealthCheckRequest(), timeout=0.5)


def test_a_server_knows_the_port_that_it_was_given():
    server = Server("127.0.0.1:0")
    host, _, port = server.address.rpartition(":")
    assert (host, 0 < int(port) < 65536) == ("127.0.0.1", True)
    server.stop(0.0)


@needs_ipv6
def test_a_server_on_an_ipv6_address_is_reached_by_what_it_says_of_itself():
    server = Server("[::1]:0")
    server.start()
    try:
        assert server.address.startswith("[::1]:")
        with grpc.insecure_channel(server.address) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    finally:
        server.stop(0.0)


def test_a_port_that_is_taken_may_be_free_later(echo):
    with pytest.raises(errors.Unavailable, match=f"cannot listen on {echo.address}: Address already in use"):
        Server(echo.address)  # never shared: two processes on a port would split a shard's pushes


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_a_host_that_this_machine_has_not_is_refused(host: str) -> None:
    with pytest.raises(ConfigurationError, match="processes cannot reach each other on"):
        check_reachable(host)
    check_reachable("127.0.0.1")


def test_a_host_that_takes_no_connection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the interface is down: one can listen there all the same."""

    def unreachable(*where: object, **how: object) -> object:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr("socket.create_connection", unreachable)
    with pytest.raises(ConfigurationError, match="Network is unreachable; allowed: an address of this machine"):
        check_reachable("127.0.0.1")
