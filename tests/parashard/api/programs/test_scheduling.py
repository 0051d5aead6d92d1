"""The program's side of a coordinator, without a cluster: its queue, its errors, and what it is given."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from parashard.api.programs import coordinator as coordinator_module
from parashard.api.programs.calls import Calls, function
from parashard.api.programs.coordinator import ERRORS_MAX, Coordinator, FunctionFailed, RemoteValue
from parashard.api.script import CALLS
from parashard.errors import ConfigurationError
from parashard.plan.intervals import IntervalSet
from support.waiting import DEADLINE_S


class Pair(NamedTuple):
    loss: Any
    others: Any


@function
def step(weights: Any, *args: Any) -> Any:
    return 0.5, {}


class Script:
    """The script that makes the coordinator."""

    is_worker = False
    path = Path("train.py")
    job_name = "train"

    @contextmanager
    def call(self, kind: str) -> Iterator[dict[str, Any]]:
        yield {}


class Run:
    """A run that goes on."""

    def check(self) -> None: ...

    def finish(self, timeout_s: float) -> dict[str, Any]:
        return {}


class Program:
    """A program with a coordinator, whose calls are complete when it says so."""

    calls: Calls

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def coordinator(self) -> Coordinator:
        return self.made()

    def made(self, **given: Any) -> Coordinator:
        return Coordinator(variables={"w": np.zeros(2)}, **given)

    def schedule(self, count: int) -> list[RemoteValue]:
        return [self.coordinator.schedule(step, (number,)) for number in range(count)]

    def answer(self, number: int, answer: Any) -> None:
        if isinstance(answer, Exception):
            self.calls.write_error(number, str(answer), type(answer).__name__)
        else:
            self.calls.write_result(number, answer)

    def complete(self, count: int) -> None:
        self.coordinator._control.report(IntervalSet([(0, count)]))


def start(coordinator: Coordinator, program: Program, loaded: Any) -> None:
    """Be the start of a coordinator's cluster."""
    coordinator.run_dir = program.folder
    program.calls = coordinator._calls = Calls(program.folder)
    program.calls.make()
    run: Any = Run()
    coordinator._run = run


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    made = Program(tmp_path)
    monkeypatch.setattr(coordinator_module, "SCRIPT", Script())
    monkeypatch.setattr(Coordinator, "_start", functools.partialmethod(start, made))
    return made


def failed(program: Program, count: int) -> list[RemoteValue]:
    values = program.schedule(count)
    for number in range(count):
        program.answer(number, ValueError(f"error {number}"))
    program.complete(count)
    return values


def test_join_raises_the_first_error_that_nobody_has_seen_and_counts_all_others(program: Program) -> None:
    failed(program, 3 * ERRORS_MAX)
    with pytest.raises(FunctionFailed, match=rf"^error 0 \(and {3 * ERRORS_MAX - 1} more\)$"):
        program.coordinator.join()
    program.coordinator.join()


def test_an_error_that_fetch_has_raised_is_not_counted_again(program: Program) -> None:
    values = failed(program, ERRORS_MAX + 3)
    for number in (0, ERRORS_MAX + 1):
        with pytest.raises(FunctionFailed, match=f"^error {number}$") as caught:
            values[number].fetch()
        assert caught.value.type_name == "ValueError"
        assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(FunctionFailed, match=rf"^error 1 \(and {ERRORS_MAX} more\)$"):
        program.coordinator.done()


def test_an_error_whose_text_is_not_kept_is_still_raised(program: Program) -> None:
    values = failed(program, ERRORS_MAX + 1)
    for value in values[:ERRORS_MAX]:
        with pytest.raises(FunctionFailed):
            value.fetch()
    with pytest.raises(FunctionFailed, match=rf"^call {ERRORS_MAX} has failed, and its fetch\(\) says why$"):
        program.coordinator.join()


def test_arguments_that_are_written_while_others_are_removed_count(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.schedule(2)
    drop_calls, scheduled = program.calls.drop_calls, threading.Event()

    def schedule() -> None:
        program.schedule(1)
        scheduled.set()

    other = threading.Thread(target=schedule)

    def drop_while_another_is_scheduled(unused: Callable[[int], bool]) -> int:
        kept_bytes = drop_calls(unused)
        other.start()
        scheduled.wait(0.05)  # in vain, unless there is the fault
        return kept_bytes

    monkeypatch.setattr(coordinator_module, "open_store", lambda url: None)
    monkeypatch.setattr(coordinator_module, "Catalogue", lambda store: None)
    monkeypatch.setattr(coordinator_module, "restorable_in_all", lambda *_, **__: IntervalSet([(0, 1)]))
    monkeypatch.setattr(program.calls, "drop_calls", drop_while_another_is_scheduled)
    coordinator = program.coordinator
    coordinator._store_url, coordinator._kept_checkpoints = "", 1
    coordinator._sweep()
    other.join(DEADLINE_S)
    files = list((program.folder / CALLS).glob("*.call"))
    assert sorted(path.name for path in files) == ["1.call", "2.call"]
    assert coordinator._kept_bytes == sum(path.stat().st_size for path in files)


def test_arguments_are_kept_for_a_damaged_checkpoint_as_long_as_there_is_room(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.schedule(2)
    kept = [IntervalSet(), IntervalSet([(0, 1)])]
    monkeypatch.setattr(coordinator_module, "open_store", lambda url: None)
    monkeypatch.setattr(coordinator_module, "Catalogue", lambda store: None)
    monkeypatch.setattr(coordinator_module, "restorable_in_all", lambda *_, after_damage: kept[not after_damage])
    coordinator = program.coordinator
    coordinator._store_url, coordinator._kept_checkpoints = "", 1
    files = program.folder / CALLS
    coordinator._sweep()
    assert len(list(files.glob("*.call"))) == 2
    monkeypatch.setattr(coordinator_module, "KEPT_BYTES_MAX", 2)
    coordinator._sweep()
    assert [path.name for path in files.glob("*.call")] == ["1.call"]


def test_fetch_returns_values_in_the_form_in_which_they_are_given(program: Program) -> None:
    values = program.schedule(5)
    for number in range(5):
        program.answer(number, {"number": number})
    program.complete(5)
    given = Pair(values[0], [values[1], (values[2],), {"a": values[3]}, MappingProxyType({"b": [values[4], 7]})])
    found = program.coordinator.fetch(given)
    assert type(found) is Pair
    first, second, third, fourth, fifth = ({"number": number} for number in range(5))
    assert found == Pair(first, [second, (third,), {"a": fourth}, {"b": [fifth, 7]}])
    assert program.coordinator.fetch(OrderedDict(a=values[0])) == {"a": first}
    assert program.coordinator.fetch(values[0]) == first


@pytest.mark.parametrize("text", ["\ud800", {"\udfff": ["a\ud800"]}])
def test_text_with_half_a_surrogate_pair_is_text(program: Program, text: Any) -> None:
    program.coordinator.schedule(step, (text,))
    assert program.calls.read(0).args == (text,)


@pytest.mark.parametrize("queue", ["a", 1.5, 0, True, None])
def test_a_queue_has_a_whole_number_of_places(program: Program, queue: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^queue must be a whole number of at least 1, found {queue!r}$"):
        program.made(queue=queue)


WAITS: dict[str, Callable[[Program, Any], object]] = {
    "the coordinator": lambda program, wrong: program.made(timeout_s=wrong),
    "schedule": lambda program, wrong: program.coordinator.schedule(step, timeout_s=wrong),
    "join": lambda program, wrong: program.coordinator.join(wrong),
    "fetch": lambda program, wrong: program.coordinator.fetch([], timeout_s=wrong),
    "fetch of a value": lambda program, wrong: program.schedule(1)[0].fetch(timeout_s=wrong),
    "close": lambda program, wrong: program.coordinator.close(wrong),
}


@pytest.mark.parametrize("wait", WAITS)
def test_every_timeout_is_a_number_of_seconds(program: Program, wait: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^timeout_s must be a number of seconds of at most 1e\+09, found '3'"
    ):
        WAITS[wait](program, "3")
    assert not program.coordinator._control.closed
    with pytest.raises(ConfigurationError, match="found inf"):
        WAITS[wait](program, float("inf"))


def test_a_remote_value_is_no_argument(program: Program) -> None:
    value = program.coordinator.schedule(step)
    with pytest.raises(
        ConfigurationError, match=r"found RemoteValue, which is there once fetch\(\) is called; allowed are"
    ):
        program.coordinator.schedule(step, (value,))
