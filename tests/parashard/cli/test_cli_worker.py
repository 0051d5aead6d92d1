"""`parashard worker`: what the process that it becomes is told."""

import math

import pytest

from parashard.process.starts import WorkerStart
from support.command_line import Command, begun


def test_a_worker_joins_a_run_by_its_name(parashard, monkeypatch):
    begun("small-1")
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, words: started.append(words))
    for where in ("small-1", "runs/small-1", "host:1", "elsewhere"):
        parashard("worker", "--connect", where)
    assert [words[words.index("--connect") + 1] for words in started] == [
        *["runs/small-1"] * 2,
        "host:1",
        "elsewhere",
    ]


@pytest.mark.parametrize("flags", [["--log-format", "json"], []])
def test_a_worker_by_hand_logs_for_people_unless_it_is_told_otherwise(
    parashard: Command, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, words: started.append(words))
    parashard("worker", "--connect", "host:1", *flags)
    assert WorkerStart.read(started[0][4:]).log_format == ("json" if flags else "text")


@pytest.mark.parametrize("flags", [["--trace"], []])
def test_a_worker_that_is_to_trace_is_told_so(
    parashard: Command, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, words: started.append(words))
    parashard("worker", "--connect", "host:1", *flags)
    assert [[word for word in words if word == "--trace"] for words in started] == [flags]


def test_what_starts_workers_elsewhere_says_how_they_listen_and_end(
    parashard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, words: started.append(words))
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.0.0.7")
    flags = ["--host", "auto", "--http-port", "9100", "--give-up-s", "600", "--stopped-exit-code", "75"]
    parashard("worker", "--connect", "host:1", *flags)
    parashard("worker", "--connect", "host:1")
    given, default = (WorkerStart.read(words[4:]) for words in started)
    assert (given.host, given.http_port, given.stopped_exit_code, given.give_up_s) == ("10.0.0.7", 9100, 75, 600.0)
    assert (default.host, default.http_port, default.stopped_exit_code) == ("127.0.0.1", 0, 0)
    assert default.give_up_s == math.inf
