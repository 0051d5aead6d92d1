"""Rows of tables for scheduled functions: what a function gets, what it pushes, and what wrong keys become."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api.programs.calls import Calls, Function, FunctionCall, PerWorker
from parashard.api.programs.scheduled import ScheduledFunctions
from parashard.client.pulled_rows import TableSet
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.models.base import StepSignal
from parashard.models.looking_up import looked_up, uses_tables

WEIGHTS = {"b": np.zeros(2, np.float32)}
USERS = ps.Table("users", 3, scale=0.5, keys_per_step_max=4)
IDS = np.array([[7, -(3**39)], [10**15, 7]])


class Worker:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, called: Any, keys: Any, pushes: int = 1) -> None:
        self.calls = Calls(folder)
        self.calls.make()
        monkeypatch.setattr(sys.modules[__name__], "called", Function(called, pushes, keys), raising=False)
        self.functions = ScheduledFunctions(WEIGHTS, self.calls, "worker-3", {"users": USERS})
        self.batch: Batch

    def run(self, step: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Look a call's keys up and call it, as a worker does."""
        self.calls.write(step, FunctionCall(f"{__name__}:called", args, kwargs))
        bare = Batch(step, 0, np.arange(1), np.zeros((1, 0)), np.zeros((1, 0)))
        self.batch = looked_up(self.functions, bare, {"users": USERS})
        drawn = TableSet((USERS,), 3)
        rows = {name: drawn.first_rows(name, keys) for name, keys in self.batch.keys.items()}
        return self.functions.loss_and_gradients({**WEIGHTS, **rows}, self.batch, np)

    def failure(self) -> str:
        """Return what call 0 failed of."""
        failed = self.calls.error(0)
        assert failed is not None
        return failed.says


def test_a_function_gets_the_row_of_each_id_and_its_gradients_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(weights: Any, ids: Any, scale: float) -> Any:
        assert weights["users"].shape == (2, 2, 3)
        assert weights["users"][0, 0].tolist() == weights["users"][1, 1].tolist()
        return 0.5, {"users": scale * np.ones_like(weights["users"])}

    worker = Worker(tmp_path, monkeypatch, called, lambda ids, scale: {"users": ids})
    loss, gradients = worker.run(4, IDS, scale=2.0)
    assert (worker.calls.error(4), loss, gradients["b"]) == (None, 0.5, None)
    assert sorted(gradients["users"][:, 0].tolist()) == [2.0, 2.0, 4.0]


def test_what_is_not_named_or_not_returned_does_not_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Worker(tmp_path, monkeypatch, lambda weights, ids: (0.0, {}), lambda ids: {"users": ids})
    assert silent.run(0, IDS)[1] == {"b": None, "users": None}
    plain = Worker(tmp_path, monkeypatch, lambda weights: (0.0, {"b": np.ones(2)}), None)
    assert set(plain.run(1)[1]) == {"b"}
    assert not plain.batch.keys
    reading = Worker(tmp_path, monkeypatch, lambda w, ids: w["users"], lambda ids: {"users": ids}, pushes=0)
    assert reading.run(2, IDS) == (StepSignal.NO_LOSS, StepSignal.NO_PUSH)
    assert reading.calls.result(2).shape == (2, 2, 3)


WRONG = {
    "raises": (lambda ids: 1 / 0, "worker-3: ZeroDivisionError: division by zero ("),
    "no mapping": (lambda ids: ids, "called: keys returned a ndarray; due is a mapping of tables to their ids"),
    "no such table": (lambda ids: {"items": ids}, "called: keys named the table 'items'; the job has: users"),
    "no keys": (lambda ids: {"users": ids / 2}, "called: keys returned for table 'users' are not ids"),
    "too many": (lambda ids: {"users": np.arange(5)}, "a step needs 5 rows of table 'users'; its keys_per_step_max is"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_keys_are_the_answer_of_their_call_and_move_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    keys, says = WRONG[name]
    worker = Worker(tmp_path, monkeypatch, lambda weights, ids: (0.0, {"b": np.ones(2)}), keys)
    assert worker.run(0, IDS) == (StepSignal.NO_LOSS, StepSignal.NO_PUSH)
    assert says in worker.failure()


@pytest.mark.parametrize(
    ("gradient", "says"),
    [
        (np.ones((2, 3)), "called: it returned the gradient of table 'users' is float64 (2, 3); due is floating point"),
        (np.full((2, 2, 3), np.nan), "called: it returned a gradient for table 'users' that is not finite"),
    ],
)
def test_a_wrong_gradient_of_rows_is_the_answer_of_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gradient: Any, says: str
) -> None:
    worker = Worker(tmp_path, monkeypatch, lambda w, ids: (0.0, {"users": gradient}), lambda ids: {"users": ids})
    assert worker.run(0, IDS) == (StepSignal.NO_LOSS, StepSignal.NO_PUSH)
    assert says in worker.failure()


def test_items_of_a_workers_own_iterator_are_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(tmp_path, monkeypatch, lambda weights, items: (0.0, {}), lambda items: {"users": next(items)})
    worker.run(0, [PerWorker(0, f"{__name__}:data")])
    assert "keys= is of the arguments, and one is an iterator of the worker" in worker.failure()


def test_without_tables_no_rows_are_looked_up(tmp_path: Path) -> None:
    assert not uses_tables(ScheduledFunctions(WEIGHTS, Calls(tmp_path), "worker-0"))
    with pytest.raises(ConfigurationError, match="keys is a function of the arguments"):
        ps.function(keys=3)
