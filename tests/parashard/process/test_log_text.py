"""Events as people read them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from parashard.process.logs import as_text

AT = "2026-01-02T03:04:05.678901Z"


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
