"""The log: events, their fields, and the lines that they become."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from parashard.process.logs import as_json, as_logfmt, as_text, bound, configure_logging, log
from support.logs import capture_logs

AT = "2026-01-02T03:04:05.678901Z"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Return where the log is written, as logfmt."""
    root, stream = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    configure_logging(stream, as_logfmt)
    return stream


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "x=3"),
        (0.5, "x=0.5"),
        (None, "x="),
        (True, "x"),
        (False, "x=false"),
        ("", "x="),
        ("two words", 'x="two words"'),
        ("a=b", 'x="a=b"'),
        ('"', r'x="\""'),
        ("one\ntwo", r"x=one\ntwo"),
        ("\\", "x=\\"),
        ("\\ ", r'x="\\ "'),
        ({"shm": "no slot"}, """x="{'shm': 'no slot'}\""""),
    ],
)
def test_a_field_in_logfmt(value: object, text: str) -> None:
    assert as_logfmt({"event": "left", "x": value}) == f"event=left {text}"


def test_an_event_in_json_is_an_object() -> None:
    event: dict[str, Any] = {"timestamp": AT, "level": "info", "event": "left", "steps": 3, "of": {"a": None}}
    assert json.loads(as_json(event)) == event
    assert json.loads(as_json({"error": ValueError("x")})) == {"error": "ValueError('x')"}


def test_a_line_has_time_level_event_and_fields(lines: io.StringIO) -> None:
    log.info("serving", address="127.0.0.1:7", level_of="x")
    log.debug("too-much")
    log.warning("100 % of %s")
    first, second = lines.getvalue().splitlines()
    assert re.fullmatch(
        r"timestamp=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z level=info event=serving address=127\.0\.0\.1:7 level_of=x",
        first,
    )
    assert second.endswith('level=warning event="100 % of %s"')


@pytest.mark.parametrize("name", ["name", "message", "args", "module", "event_", "exception_"])
def test_a_field_may_have_any_name(name: str) -> None:
    with capture_logs() as logs:
        log.info("left", **{name: 3})
    assert logs[0][name] == 3


def test_a_traceback_is_a_field(lines: io.StringIO) -> None:
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError as error:
        log.warning("step-failed", step=3, exc_info=error)
        log.exception("page-broke", path="/")
    for line, start in zip(lines.getvalue().splitlines(), ("step-failed step=3", "page-broke path=/"), strict=True):
        assert f'event={start} exception="Traceback (most recent call last):\\n' in line
        assert line.endswith('\\nZeroDivisionError: a bug"')


def test_what_is_bound_is_in_each_event_of_its_block_and_gives_way_to_the_events_own() -> None:
    with capture_logs() as logs:
        with bound(worker="w", incarnation=1):
            with bound(shard=2):
                log.info("a", worker="mine")
            log.info("b")
        log.info("c")
    assert [{key: event[key] for key in event if key not in ("timestamp", "level")} for event in logs] == [
        {"event": "a", "worker": "mine", "incarnation": 1, "shard": 2},
        {"event": "b", "worker": "w", "incarnation": 1},
        {"event": "c"},
    ]


def test_other_libraries_warnings_are_lines_of_the_same_format(lines: io.StringIO) -> None:
    logging.getLogger("grpc._server").warning("%d calls", 3)
    logging.getLogger("grpc._server").info("unimportant")
    (line,) = lines.getvalue().splitlines()
    assert line.endswith('level=warning event="3 calls" logger=grpc._server')


def test_where_nothing_is_configured_events_go_nowhere() -> None:
    program = "from parashard.process.logs import log\nlog.critical('hung')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {
                "event": "joined",
                "worker": "guest-0",
                "device": "cpu",
                "threads": 2,
                "http": "127.0.0.1:9",
                "incarnation": 3,
            },
            "joined as guest-0 (cpu, 2 threads)",
        ),
        ({"event": "left", "worker": "guest-0", "steps": 3, "reason": "every step is in"}, "left: every step is in"),
        (
            {"event": "waiting-without-end", "why": "no answer from x:1"},
            "waiting: no answer from x:1",
        ),
        (
            {"event": "waiting", "why": "no answer from x:1", "at_most_s": 60.0},
            "waiting for at most 60 s: no answer from x:1",
        ),
        ({"event": "step-dropped", "step": 7, "error": "late", "worker": "w"}, "step dropped: step 7, error late"),
        ({"event": "spans-arrive-again"}, "spans arrive again"),
        ({"event": "joined"}, "joined"),
        ({"event": "spans-lost", "level": "warning", "reason": "full"}, "warning: spans lost: reason full"),
    ],
)
def test_an_event_is_a_line_with_the_time_of_day(event: dict[str, Any], line: str) -> None:
    assert as_text({"level": "info", "timestamp": AT, **event}) == f"03:04:05 {line}"


def test_a_traceback_comes_below() -> None:
    event = {"event": "step-failed", "level": "warning", "timestamp": AT, "step": 3, "exception": "Traceback ...\nE"}
    assert as_text(event) == "03:04:05 warning: step failed: step 3\nTraceback ...\nE"


def test_a_time_that_is_none_stays_as_it_is() -> None:
    assert as_text({"event": "left", "reason": "x", "timestamp": "soon"}) == "soon left: x"
