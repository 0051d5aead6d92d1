"""StreamServer: a bounded number of connections, each told why it ends, and nothing left behind."""

import socket
import threading

import pytest

from parashard.errors import MalformedFrame, NotReady, PeerFailed, QueueFull, Unreachable
from parashard.transports.stream import Kind, Refused, Stream, receive_answer
from parashard_server.serving.stream_server import StreamServer
from support.logs import capture_logs
from support.stream_cases import DEADLINE_S, HELLO, all_left, echo, serving, soon


def welcomed(stream: Stream) -> bool:
    """Say HELLO and return whether it was answered."""
    stream.send(Kind.HELLO, HELLO, deadline_s=soon())
    return receive_answer(stream, Kind.WELCOME, deadline_s=soon()).kind is Kind.WELCOME


def refusal_of(stream: Stream) -> Exception:
    """Return what the server says before it closes."""
    with pytest.raises(Refused) as caught:
        receive_answer(stream, Kind.WELCOME, deadline_s=soon())
    with pytest.raises(Unreachable, match=r"closed|reset"):
        stream.receive(deadline_s=soon())
    return caught.value.error


def test_each_connection_is_served_on_its_own():
    with serving(echo) as (server, connect):
        first, second = connect(), connect()
        assert welcomed(second)
        assert welcomed(first)
        assert welcomed(second)
        assert server.connections == 2


def test_one_connection_too_many_is_refused_until_another_leaves():
    left = threading.Event()

    def serve(stream: Stream) -> None:
        try:
            echo(stream)
        finally:
            left.set()

    with serving(serve, connections_max=1) as (_, connect):
        first = connect()
        assert welcomed(first)
        error = refusal_of(connect())
        assert isinstance(error, QueueFull)
        assert error.message == "1 connections are open here; at most 1 may be"
        first.close()
        assert left.wait(DEADLINE_S)
        all_left()
        assert welcomed(connect())


def test_a_machine_without_threads_refuses_and_goes_on(monkeypatch):
    real_start, lacking = threading.Thread.start, [True]

    def start(thread: threading.Thread) -> None:
        if thread.name == "data" and lacking:
            lacking.clear()
            raise RuntimeError("can't start new thread")
        real_start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with serving(echo) as (server, connect):
        error = refusal_of(connect())
        assert isinstance(error, QueueFull)
        assert error.message == "can't start new thread"
        assert welcomed(connect())
        assert server.connections == 1


def test_an_error_of_ours_is_reported_and_ends_the_connection():
    def serve(stream: Stream) -> None:
        raise MalformedFrame("this is not what a connection begins with")

    with serving(serve) as (_, connect):
        error = refusal_of(connect())
    assert isinstance(error, MalformedFrame)
    assert error.message == "this is not what a connection begins with"


def test_a_bug_is_logged_and_reported():
    def serve(stream: Stream) -> None:
        raise ZeroDivisionError("a bug")

    with capture_logs() as logs, serving(serve) as (_, connect):
        error = refusal_of(connect())
    assert isinstance(error, PeerFailed)
    assert error.message == "ZeroDivisionError: a bug"
    assert [(log["event"], log["server"]) for log in logs] == [("call-broke", "data")]


def test_a_peer_that_leaves_ends_its_thread_without_a_word():
    ended = threading.Event()

    def serve(stream: Stream) -> None:
        try:
            echo(stream)
        finally:
            ended.set()

    with capture_logs() as logs, serving(serve) as (_, connect):
        connect().close()
        assert ended.wait(DEADLINE_S)
    assert logs == []


def test_stopping_ends_connections_that_wait_and_takes_no_more():
    with serving(echo) as (server, connect):
        waiting = connect()
        assert welcomed(waiting)
        server.stop()
        with pytest.raises(Unreachable):
            waiting.receive(deadline_s=soon())
        with pytest.raises(OSError, match="refused"):
            connect()


def test_who_comes_while_it_stops_is_told_so(monkeypatch):
    with serving(echo) as (server, connect):
        monkeypatch.setattr("parashard_server.serving.stream_server.tune", lambda connection: server._stopping.set())
        error = refusal_of(connect())
        assert isinstance(error, NotReady)
        assert error.message == "the shard is stopping"


def test_a_server_that_never_started_stops():
    listening = socket.create_server(("127.0.0.1", 0))
    StreamServer(listening, echo, connections_max=1, name="data").stop()
    assert listening.fileno() == -1


def test_unix_sockets_are_served_too(tmp_path):
    path = tmp_path / "shard.sock"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()
    server = StreamServer(listening, echo, connections_max=1, name="data")
    server.start()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        assert welcomed(Stream(connection, str(path)))
    server.stop()
