"""What the benchmark of tracing measures: all that it names, once."""

from __future__ import annotations

import pytest

from benchmarks import tracing


def test_every_way_is_measured_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "ROUNDS", 2)
    monkeypatch.setattr(tracing, "CALLS_OFF", 10)
    monkeypatch.setattr(tracing, "CALLS_ON", 10)
    figures = [*tracing.off().values(), *tracing.unseen().values(), *tracing.on().values()]
    assert [len(values) for values in figures] == [2] * 7
    assert all(value > 0 for values in figures for value in values)
