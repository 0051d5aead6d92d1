"""A worker's side of a coordinator: what a function gets, and what becomes of its answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.api.programs import scheduled
from parashard.api.programs.calls import Calls, Function, FunctionCall, PerWorker
from parashard.api.programs.scheduled import ScheduledFunctions
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.models.base import StepSignal

WEIGHTS = {"b": np.zeros(2, np.float32), "w": np.ones((3, 2), np.float32)}
made: list[int] = []


def answer(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    return args[0](weights) if args and callable(args[0]) else (args, kwargs)


def data() -> Iterator[int]:
    made.append(1)
    return iter(range(5))


def numbers() -> Iterator[int]:
    made.append(1)
    return (number for number in (1, 2, 3))


def listed() -> list[int]:
    made.append(1)
    return [1, 2, 3]


class Worker:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, called: Any, pushes: int = 1) -> None:
        self.calls = Calls(folder)
        self.calls.make()
        monkeypatch.setattr(sys.modules[__name__], "called", Function(called, pushes), raising=False)
        self.functions = ScheduledFunctions(WEIGHTS, self.calls, "worker-3")

    def run(self, step: int = 0, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.calls.write(step, FunctionCall(f"{__name__}:called", args, kwargs))
        return self.functions.loss_and_gradients(WEIGHTS, Batch(step, 0, np.arange(1), [], []), np)


def test_gradients_are_pushed_and_the_result_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(tmp_path, monkeypatch, lambda weights, x, scale: (0.5, {"w": weights["w"] * x * scale}))
    loss, gradients = worker.run(4, 2.0, scale=3.0)
    assert (loss, gradients["b"]) == (0.5, None)
    assert gradients["w"].tolist() == [[6.0, 6.0]] * 3
    assert gradients["w"].dtype == np.float32
    assert (worker.calls.result(4), worker.calls.error(4)) == (0.5, None)


def test_without_a_push_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(tmp_path, monkeypatch, lambda weights: {"sum": weights["w"].sum()}, pushes=0)
    assert worker.run() == (StepSignal.NO_LOSS, StepSignal.NO_PUSH)
    assert worker.calls.result(0) == {"sum": 6.0}


def spoil(weights: Mapping[str, Any]) -> Any:
    weights["w"][0] = 1.0


WRONG = {
    "raises": (lambda weights: 1 / 0, "worker-3: ZeroDivisionError: division by zero ("),
    "ends": (lambda weights: sys.exit("enough"), "worker-3: SystemExit: enough ("),
    "writes to the weights": (spoil, "worker-3: ValueError: assignment destination is read-only ("),
    "returns no pair": (lambda weights: 3, "called: a function with @ps.function returns (result, gradients)"),
    "returns no gradients": (lambda weights: (3, None), "called: a function with @ps.function returns (result, gra"),
    "of no variable": (lambda weights: (3, {"x": 1.0}), "a gradient for 'x', which is none of b, w"),
    "of another shape": (lambda weights: (3, {"b": np.zeros(3)}), "for 'b' that is float64 (3,); due is float32 (2,)"),
    "of whole numbers": (lambda weights: (3, {"b": np.zeros(2, int)}), "for 'b' that is int64 (2,); due is float32"),
    "not finite": (lambda weights: (3, {"b": np.full(2, np.inf)}), "for 'b' that is not finite"),
    "a result of no kind": (lambda weights: (object(), {}), "called: found object; allowed are arrays"),
    "too large": (
        lambda weights: (-(10**400), {}),
        "called: it returned a whole number that is too large for a float64",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_goes_wrong_is_the_answer_and_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    called, says = WRONG[wrong]
    worker = Worker(tmp_path, monkeypatch, called)
    assert worker.run(7) == (StepSignal.NO_LOSS, StepSignal.NO_PUSH)
    failure = worker.calls.error(7)
    assert failure is not None
    assert says in failure.says


def test_an_error_has_its_class_and_its_traceback_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(tmp_path, monkeypatch, lambda weights: next(iter(())), pushes=0)
    worker.run(7)
    failure = worker.calls.error(7)
    assert failure is not None
    assert failure.kind == "StopIteration"
    (logged,) = [record for record in caplog.records if record.getMessage() == "function-failed"]
    assert logged.exc_info is not None
    assert logged.exc_info[0] is StopIteration


@pytest.mark.parametrize("number", [2**64 + 1, -(2**63) - 1, 10**300], ids="{:.0e}".format)
def test_a_whole_number_of_any_length_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    worker = Worker(tmp_path, monkeypatch, lambda weights: number, pushes=0)
    assert worker.run(7) == (float(number), StepSignal.NO_PUSH)
    assert (worker.calls.result(7), worker.calls.error(7)) == (number, None)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), np.float32("-inf")])
def test_a_result_that_is_not_finite_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    worker = Worker(tmp_path, monkeypatch, lambda weights: number, pushes=0)
    assert worker.run(7) == (StepSignal.NO_LOSS, StepSignal.NO_PUSH)
    assert (repr(worker.calls.result(7)), worker.calls.error(7)) == (repr(number), None)


def test_an_iterator_is_this_workers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    mine, other = iter(PerWorker(0, f"{__name__}:data")), PerWorker(1, f"{__name__}:data")
    worker = Worker(tmp_path, monkeypatch, lambda weights, a, b: [next(a["it"]), next(b[0])], pushes=0)
    for step in range(3):
        worker.run(step, {"it": mine}, [other])
        assert worker.calls.result(step) == [step, step]
    assert len(made) == 2
    with pytest.raises(ConfigurationError, match="has its elements in workers: pass it to"):
        next(mine)


def test_each_iterator_begins_anew_and_goes_on_over_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    dataset = PerWorker(0, f"{__name__}:numbers")
    worker = Worker(tmp_path, monkeypatch, lambda weights, items: [next(items), *items], pushes=0)
    for epoch in range(3):
        iterator = iter(dataset)
        assert iter(iterator) is iterator
        for step, due in ((2 * epoch, [1, 2, 3]), (2 * epoch + 1, None)):
            worker.run(step, iterator)
            assert (worker.calls.error(step) is None) == (due is not None), "the second call finds it at its end"
            if due:
                assert worker.calls.result(step) == due
    assert len(made) == 3, "a generator is made anew for each"


@pytest.mark.parametrize("name", ["numbers", "listed"])
def test_a_dataset_begins_anew_in_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made.clear()
    worker = Worker(tmp_path, monkeypatch, lambda weights, items: [sum(items), next(items)], pushes=0)
    for step in range(3):
        worker.run(step, PerWorker(0, f"{__name__}:{name}"))
        assert worker.calls.result(step) == [6, step + 1], "next goes on"
    assert len(made) == (4 if name == "numbers" else 1)


def test_an_iterator_that_is_forgotten_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduled, "ITERATORS_MAX", 2)
    dataset = PerWorker(0, f"{__name__}:listed")
    worker = Worker(tmp_path, monkeypatch, lambda weights, items: next(items), pushes=0)
    iterators = [iter(dataset) for _ in range(3)]
    for step, place in enumerate([0, 1, 2, 2, 1, 0]):
        worker.run(step, iterators[place])
    assert [worker.calls.error(step) is not None for step in range(6)] == [False] * 5 + [True]
    assert "is used after 2 newer ones: make a new one" in str(worker.calls.error(5))
