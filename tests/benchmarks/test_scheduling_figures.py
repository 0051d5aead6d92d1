"""The load of one coordinator: the page is made from the figures, and a run whose steps are not complete fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.scheduling import __main__ as command
from benchmarks.scheduling import coordinator
from benchmarks.scheduling.coordinator import Phase
from benchmarks.tables import RESULTS, page
from parashard.errors import Unreachable

WORKERS = 10


class Complete:
    """A coordinator of which each phase but `join` computes 100 steps, and which says how many are complete."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def do(self, what: str, meanwhile: Callable[[], None] = lambda: None, **_: Any) -> Phase:
        meanwhile()
        return Phase(
            1.0, {"computed": 100 if what == "work" else 0, "granted": 200, "steps": 90}, [], 0.5, 80.0, 20, 1.0
        )

    def views(self) -> dict[str, Any]:
        return {}

    def steps_complete(self) -> int:
        return self._steps


def measured(monkeypatch: pytest.MonkeyPatch, complete: int, parts: int) -> dict[str, Any]:
    class Loaded:
        @staticmethod
        @contextmanager
        def of(policy: str, *_: int) -> Iterator[Complete]:
            yield Complete(parts if policy == "auto" else complete)

    monkeypatch.setattr(command, "LoadedCoordinator", Loaded)
    return command.measured(WORKERS, 1.0, 1.0)


def test_the_page_is_made_from_the_figures() -> None:
    figures = json.loads((RESULTS / "scheduling.json").read_text())
    sections = command.sections_of(figures["rows"], 1.0)
    assert (RESULTS / "scheduling.md").read_text() == page(figures["machine"], sections)


def test_a_phase_is_told_by_the_steps_that_were_reported_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, complete=400, parts=20)
    assert (found["computed"], found["complete"], found["auto"]["batch_s"]) == (400, 400, 0.5)
    assert found["phases"]["paced"]["steps_per_s"] == 90
    assert "| 10 | 90 |" in command.calls_table([found], "paced")


@pytest.mark.parametrize(("complete", "parts"), [(0, 20), (359, 20), (401, 20), (400, 0), (400, WORKERS - 1)])
def test_a_run_whose_steps_are_not_complete_fails(monkeypatch: pytest.MonkeyPatch, complete: int, parts: int) -> None:
    with pytest.raises(AssertionError):
        measured(monkeypatch, complete, parts)


def test_what_was_asked_has_been_answered_at_least_once() -> None:
    answers: list[Any] = [Unreachable("not yet"), b"", OSError("no"), b"", b"four"]

    def ask() -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    assert coordinator._asked(ask)["bytes"] == 4
    answers += [OSError("no")] * coordinator.ASKED
    with pytest.raises(RuntimeError, match="none of 5 calls"):
        coordinator._asked(ask)
