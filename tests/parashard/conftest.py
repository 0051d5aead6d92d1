"""Virtual time for what retries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tenacity
import tenacity.nap


class VirtualTime:
    """A clock that moves only when someone sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """Let every retry of this test pause in virtual time."""
    clock = VirtualTime()
    monkeypatch.setattr(tenacity, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(tenacity.nap, "time", SimpleNamespace(sleep=clock.sleep))
    monkeypatch.setattr(tenacity, "sleep_using_event", lambda event: clock.sleep)
    return clock
