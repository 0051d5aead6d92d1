"""The benchmark of a GPU, on a CPU and on a GPU of NumPy: what it runs and compares, and what it says of failures."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import parashard as ps
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import ipc, limited, marked, memory, mlp, rows, speed
from benchmarks.gpu.limited import Found
from parashard.api import fits
from parashard.api import trainer as trainer_module
from parashard.api.script import Script
from parashard_server.state.cuda_storage import CudaStorage
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import drawn_from
from support import reference_rules as reference
from support.late_device import LateDevice

MEASURED = ["models", "mlp", "workers", "accuracy"]


def asked(device: str = "cuda:0", **changed: Any) -> command.Asked:
    return command.Asked(**{"device": device, "turns": 2, "rounds": 1, "data": None, "profile": None, **changed})


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is none that a script could be found of, as a notebook's."""
    monkeypatch.chdir(tmp_path)
    for user in (trainer_module, fits):
        monkeypatch.setattr(user, "SCRIPT", Script(None))


SMALL = ("--device", "cpu", "--width", "8", "--batch", "4", "--steps", "12", "--seconds", "0.1")


# --- the tests marked gpu ---

FAILING = """
import pytest


@pytest.mark.gpu
def test_that_fails():
    assert 1 == 2


@pytest.mark.gpu
def test_that_passes():
    pass


def test_of_a_cpu():
    raise SystemExit
"""


def test_tests_marked_gpu_are_rows_and_each_failure_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(marked, "ROOT", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\nmarkers = gpu\n")
    for folder, content in (("tests/parashard", FAILING), ("tests/worker", FAILING), ("tests/cli", "")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"test_{folder[6:]}.py").write_text(content)
    assert marked.files() == ["tests/worker/test_worker.py", "tests/parashard/test_parashard.py"]
    assert marked.run("all", marked.files()) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["case"] for one in found] == [
        "test_worker.py::test_that_fails",
        "test_parashard.py::test_that_fails",
        "all",
    ]
    assert found[0]["why"] == "assert 1 == 2"
    assert found[-1]["why"].startswith("2 failed, 2 passed, 2 deselected in ")


def test_fixtures_that_mark_a_test_are_looked_for() -> None:
    fixtures = (limited.ROOT / "tests" / "conftest.py").read_text().split("@pytest.fixture")
    marking = [text.partition("def ")[2].partition("(")[0] for text in fixtures if "marks=pytest.mark.gpu" in text]
    assert marking
    assert all(marked.MARKED.fullmatch(name) for name in marking)


# --- models ---


def test_training_without_a_server_learns_with_the_kernels_that_it_is_given() -> None:
    inputs, targets = mlp.data(512)
    pair = [mlp.NoServer(mlp.model(16), ps.Adam(0.02), np, kernels) for kernels in (fused, reference)]
    losses = [[one.step(inputs, targets) for _ in range(40)] for one in pair]
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.7 * losses[0][0]
    for name, values in pair[0].variables.items():
        np.testing.assert_array_equal(values, pair[1].variables[name])


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("what", ["plain", "one"])
def test_a_speed_is_that_of_a_warm_run(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["speed", "mlp", what, *SMALL])
    speed.main()
    told = json.loads(capsys.readouterr().out)
    assert told["measured_s"] >= 0.1
    assert told["examples_per_s"] > 0


@pytest.mark.full("a real cluster of two workers; what it measures by is in the tests around it")
def test_a_cluster_tells_where_a_workers_time_went_meanwhile() -> None:
    found = limited.run("speed", ["mlp", "cluster", "--workers", "2", "--depth", "0", *SMALL], 100.0)
    assert not found.why, found.why
    (told,) = found.lines
    assert told["examples_per_s"] > 0
    assert set(told["phases_ms"]) <= set(rows.PHASES)
    assert told["phases_ms"]["compute"] > 0


class Measure:
    """Keeps what is asked for, and answers by it."""

    def __init__(self, *answers: Found) -> None:
        self.asked: list[tuple[str, list[str], float]] = []
        self._answers = answers

    def __call__(self, module: str, words: Sequence[str], limit_s: float) -> Found:
        self.asked.append((module, list(words), limit_s))
        return self._answers[(len(self.asked) - 1) % len(self._answers)]


def rate(examples_per_s: float) -> Found:
    return Found([{"examples_per_s": examples_per_s, "accuracy": 0.5, "phases_ms": {"pull": 1.0}}])


@pytest.mark.parametrize("part", MEASURED)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_every_program_understands_its_words(part: str, device: str, tmp_path: Path) -> None:
    measure = Measure(rate(1.0))
    found = list(command.PARTS[part](asked(device, data=tmp_path), measure, []))
    assert len(found) < len(measure.asked), "those without a server have no row of their own"
    for module, words, limit_s in measure.asked:
        assert (module, limit_s <= 60.0) == ("speed", True)
        read = speed.words_parser().parse_args(words)
        assert (read.device, read.data) == (device, tmp_path)
        assert (read.width < 64) == (device == "cpu")


@pytest.mark.parametrize("model", [command.RESNET, command.LARGE_RESNET, command.SHARING, command.MLP])
def test_each_case_is_what_its_name_says(model: command.Model) -> None:
    read = {case: speed.words_parser().parse_args(asked().words(model, case)) for case in (model.alone, *model.cases)}
    assert read[model.alone].what == "plain"
    for case, words in read.items():
        assert (words.shard_device == "cuda:0") == case.endswith("on the GPU")
        assert (words.what == "cluster") == ("shard on" in case)
        assert (words.what == "one") == (case == command.ONE)
        assert words.workers == (int(case[0]) if case[0].isdigit() else 1)
        assert (words.depth == 0) == case.endswith("depth 0")


def test_speeds_are_compared_with_those_without_a_server_in_the_same_run() -> None:
    one, card, host = command.mlp(asked(), Measure(rate(1000), rate(900), rate(500), rate(250)), [])
    assert (one["case"], one["ours"], one["its"], one["ratio"], one["goal"]) == (command.ONE, 900, 1000, 0.9, 0.9)
    assert (card["ratio"], rows.below_goal(card), host["ratio"], rows.below_goal(host)) == (0.5, True, 0.25, False)


def test_workers_that_share_a_gpu_are_compared_with_what_was_measured_before() -> None:
    before = list(command.models(asked(), Measure(rate(100)), []))
    measure = Measure(rate(50))
    found = list(command.workers(asked(rounds=2), measure, before))
    assert [(one["its"], one["ratio"]) for one in found] == [(100, 0.5)] * 6
    assert "plain" not in {words[1] for _, words, _ in measure.asked}
    assert next(iter(command.workers(asked(), Measure(rate(10), rate(5)), [])))["ratio"] == 0.5


def test_rounds_are_medians_and_the_last_row_of_a_case_has_them_all() -> None:
    measure = Measure(*(rate(figure) for figure in (100, 10, 20, 30, 100, 50, 40, 60, 100, 90, 60, 20)))
    found = {one["case"]: one for one in command.mlp(asked(rounds=3), measure, [])}
    assert [one["ours"] for one in found.values()] == [50, 40, 30]


def test_what_fails_is_a_row_that_says_why_and_the_rest_goes_on() -> None:
    measure = Measure(rate(1000), Found([], "over its limit of 30 s: x"), rate(500), rate(250))
    one, card, _ = command.mlp(asked(), measure, [])
    assert (one["case"], one["why"]) == (command.ONE, "over its limit of 30 s: x")
    assert (card["ratio"], rows.below_goal(one)) == (0.5, False)
    alone, *others = command.mlp(asked(), Measure(Found([], "ended with 1: x"), rate(500)), [])
    assert alone["case"] == command.CUPY
    assert [other["why"] for other in others] == ["500 examples/s", "ended with 1: x", "500 examples/s"]


def test_accuracy_needs_digits(tmp_path: Path) -> None:
    measure = Measure(rate(1.0))
    (one,) = command.accuracy(asked(), measure, [])
    assert ("--data" in one["why"], measure.asked) == (True, [])
    found = list(command.accuracy(asked(data=tmp_path), measure, []))
    assert [(one["case"], one["ratio"]) for one in found] == [("1 worker, auto", 1.0), ("2 workers, auto", 1.0)]


def test_what_is_below_its_goal_is_profiled(tmp_path: Path) -> None:
    before = list(command.mlp(asked(), Measure(rate(1000), rate(900), rate(500), rate(250)), []))
    measure = Measure(rate(1.0))
    (one,) = command.profiles(asked(profile=tmp_path / "p"), measure, before)
    assert one["case"] == f"{command.MLP.table}: {command.CARD}"
    read = speed.words_parser().parse_args(measure.asked[0][1])
    assert (Path(read.profile).parent, read.shard_device) == (tmp_path / "p", "cuda:0")
    assert list(command.profiles(asked(), measure, before)) == []


# --- limits ---


def test_a_program_over_its_limit_ends_with_what_it_started() -> None:
    found = limited.run("about", ["--device", "cpu"], 0.0)
    assert (found.lines, found.why.startswith("over its limit of 0 s")) == ([], True)


def test_a_program_that_fails_says_why_in_a_line() -> None:
    found = limited.run("about", ["--device", "card"], 100.0)
    assert found.lines == []
    assert found.why.startswith("ended with 1: ")
    assert found.why.endswith("device 'card' is unknown; allowed: cpu, cuda, cuda:N")


@pytest.mark.parametrize("asked_for", ["1", ""])
def test_programs_keep_bytecode_where_they_are_told_to_write_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_for: str
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", asked_for)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setattr(limited.tempfile, "tempdir", str(tmp_path))
    with limited.bytecode_kept():
        assert limited.run("about", ["--device", "cpu"], 100.0).lines
        assert any(tmp_path.glob("*/**/benchmarks/gpu/about.*.pyc")) is bool(asked_for)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)


def test_nothing_begins_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(limited, "run", lambda module, words, limit_s: limits.append(limit_s) or Found([]))  # type: ignore[func-returns-value]
    clock = iter([0.0, 10.0, 90.0, 98.0])
    measure = command.within(100.0, 1.0, lambda: next(clock))
    assert [measure("speed", [], 40.0).why for _ in range(3)] == ["", "", "not measured: 100 s were over"]
    assert limits == [40.0, 10.0]


def test_the_command_runs_on_a_cpu_and_writes_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(command, "_write", lambda rows, about, folder: written.append(len(rows)))
    monkeypatch.setattr(command, "within", lambda *limits: Measure(Found([{"about": "a GPU", "examples_per_s": 1}])))
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--device", "cpu", "--parts", "mlp", "--write", "--results", str(tmp_path)]
    )
    command.main()
    assert written == [1, 2, 3]


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cuda:0"])
    monkeypatch.setattr(command, "within", lambda *limits: Measure(Found([], "ended with 1: needs CuPy")))
    with pytest.raises(SystemExit, match="nothing was measured: ended with 1: needs CuPy"):
        command.main()


def test_figures_are_files_in_a_folder(tmp_path: Path) -> None:
    command._write(list(command.mlp(asked(), Measure(rate(8.0), rate(4.0)), [])), "Some GPU", tmp_path)
    assert json.loads((tmp_path / "gpu.json").read_text())["device"] == "Some GPU"
    text = (tmp_path / "gpu.md").read_text()
    assert f"| {command.ONE} | 4 examples/s | {command.CUPY} | 8 examples/s | 0.50 | 0.9 |" in text
    assert f"| {command.MLP.table}: {command.ONE} | 0.00 | 1.00 | 0.00 | 0.00 | 0.00 |" in text


def test_a_time_and_a_failure_are_shown() -> None:
    found = [rows.row("A", "one", "other", rows.TIME, ([2.0, 1.0, 9.0], [6.0])), rows.missing("A", "two", "a|b")]
    lines = rows.sections(found, "Some GPU")["A"].splitlines()
    assert lines[2:] == ["| one | 2.000 ms | other | 6.000 ms | 3.00 |  |", "| two | a/b |  |  |  |  |"]


# --- memory ---


def test_copies_of_both_kinds_of_memory_are_compared() -> None:
    device = LateDevice()
    found = list(memory.copy_rows(device, [0.001], 2))
    assert [one["case"] for one in found] == ["0.001 MiB to the GPU", "0.001 MiB from the GPU"]
    assert len(device.copied_in) == len(device.copied_out) == 2 * 3
    for copied in (device.copied_in, device.copied_out):
        assert [host is device.staged[0] for host in copied] == [True, False] * 3


def test_shards_are_compared_rule_by_rule_with_pulls() -> None:
    device = LateDevice()
    found = list(memory.shard_rows(device, [0.001], 2))
    assert [one["case"] for one in found] == ["sgd, 0.001 MiB", "adam, 0.001 MiB"]
    assert all(one["ratio"] == one["its"] / one["ours"] for one in found)
    assert len(device.copied_out) == 2 * 3  # a pull after every push


def test_shards_that_disagree_are_no_figure() -> None:
    device = LateDevice()
    device.kernels.update = lambda *given, **more: None  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="other weights"):
        list(memory.shard_rows(device, [0.001], 1))


def test_a_move_pushes_and_pulls_all_that_moved() -> None:
    device = LateDevice()
    storage = CudaStorage(
        memory.one_variable(6), 0, Optimizer(memory.RULES["sgd"], device.kernels), drawn_from(0), device=device
    )
    move, moved = memory.moves(storage), storage.changed_runs
    found: list[int] = []

    def moved_bytes(*run: Any) -> Any:
        runs = moved(*run)
        found.append(sum(piece.values.nbytes for piece in runs))
        return runs

    storage.changed_runs = moved_bytes  # type: ignore[method-assign]
    for _ in range(2):
        move()
    assert found == [24, 24]
    assert storage.memory.done.tolist() == [2]


def test_calls_take_turns_and_the_first_turn_does_not_count() -> None:
    called: list[str] = []
    times = memory.timed({name: lambda name=name: called.append(name) for name in "ab"}, 2)  # type: ignore[misc]
    assert called == ["a", "b"] * 3
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize("what", ["copies", "shard"])
def test_rows_of_memory_are_printed_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    monkeypatch.setattr(memory, "open_device", lambda name, shard: LateDevice())
    monkeypatch.setattr(sys, "argv", ["memory", what, "--turns", "1", "--sizes-mib", "0.001"])
    memory.main()
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 2


# --- CUDA IPC ---


class HostRuntime:
    """`cupy.cuda.runtime` of one process, whose device memory is the host's."""

    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3

    def __init__(self) -> None:
        self._memory: dict[int, np.ndarray] = {}
        self._opened: set[int] = set()
        self.locked: set[int] = set()
        self.copies = 0  # from device to device
        self.gone = False  # its owner has died

    def malloc(self, size: int) -> int:
        values = np.zeros(size, np.uint8)
        self._memory[values.ctypes.data] = values
        return int(values.ctypes.data)

    def free(self, address: int) -> None:
        del self._memory[address]

    def memset(self, address: int, value: int, size: int) -> None:
        ctypes.memset(address, value, size)

    def memcpy(self, to: int, source: int, size: int, kind: int) -> None:
        self.copies += kind == self.memcpyDeviceToDevice
        ctypes.memmove(to, source, size)

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        self.locked.add(address)

    def hostUnregister(self, address: int) -> None:
        self.locked.remove(address)

    def ipcGetMemHandle(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        if self.gone:
            raise RuntimeError("cudaErrorInvalidValue")
        address = int.from_bytes(handle, "little")
        self._opened.add(address)
        return address

    def ipcCloseMemHandle(self, address: int) -> None:
        self._opened.remove(address)

    def deviceSynchronize(self) -> None:
        pass

    @property
    def held(self) -> int:
        return len(self._memory) + len(self._opened) + len(self.locked)


class Here:
    """The other process, in this one."""

    def __init__(self, runtime: HostRuntime) -> None:
        self._vector = ipc.Vector(runtime)
        self._runtime = runtime
        self.asked: list[str] = []

    def ask(self, **asked: Any) -> dict[str, Any]:
        self.asked.append(asked["do"])
        found: dict[str, Any] = json.loads(json.dumps(self._vector.answer(json.loads(json.dumps(asked)))))
        return found

    def kill(self) -> None:
        self._runtime.gone = True


def test_both_ways_bring_the_vector_and_give_back_all_memory() -> None:
    runtime = HostRuntime()
    other = Here(runtime)
    (one,) = ipc.speed_rows(runtime, other, [0.001], 2)
    assert (one["case"], one["peer"], one["ratio"] == one["its"] / one["ours"]) == ("0.001 MB", ipc.HOSTS_WAY, True)
    assert other.asked == ["make", "fill", "wait", "fill", "to host", *["wait", "to host"] * 3, "free"]
    assert (runtime.held, runtime.copies) == (0, 4)


def test_bytes_that_do_not_arrive_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = HostRuntime()
    monkeypatch.setattr(runtime, "memcpy", lambda *given: None)
    with pytest.raises(AssertionError, match="not what the other process wrote"):
        list(ipc.speed_rows(runtime, Here(runtime), [0.001], 1))


def test_a_reader_tells_what_it_saw_of_a_vector_whose_process_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "KILLED_AFTER_S", 0.001)
    runtime = HostRuntime()
    one = ipc.death_row(runtime, Here(runtime), 0.001, 0.0)
    assert one["why"].endswith("after its death: its bytes, and no error; opened again: cudaErrorInvalidValue")
    runtime = HostRuntime()
    other = Here(runtime)
    monkeypatch.setattr(other, "kill", lambda: [values.fill(0) for values in runtime._memory.values()])
    assert "other bytes, and no error" in ipc.death_row(runtime, other, 0.001, 0.0)["why"]


def test_an_error_of_a_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("cudaErrorLaunchFailure")

    monkeypatch.setattr(ipc, "KILLED_AFTER_S", 0.001)
    runtime = HostRuntime()
    monkeypatch.setattr(runtime, "memcpy", broken)
    assert "cudaErrorLaunchFailure" in ipc.death_row(runtime, Here(runtime), 0.001, 0.0)["why"]


@pytest.fixture
def as_the_other(monkeypatch: pytest.MonkeyPatch) -> HostRuntime:
    runtime = HostRuntime()
    monkeypatch.setattr(ipc.cuda, "index_of", lambda device, process: 0)
    monkeypatch.setattr(ipc.cuda, "device", lambda index: None)
    monkeypatch.setattr(ipc.cuda, "namespace", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    return runtime


def test_the_other_process_answers_line_by_line(
    as_the_other: HostRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ipc", "--other"])
    monkeypatch.setattr(sys, "stdin", ['{"do": "wait"}\n', '{"do": "wait"}\n'])
    ipc.main()
    assert capsys.readouterr().out.splitlines() == ['{"done": true}'] * 2


def test_a_reader_prints_what_it_measured_before_the_other_dies(
    as_the_other: HostRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ipc, "Other", lambda device: Here(as_the_other))
    monkeypatch.setattr(ipc, "KILLED_AFTER_S", 0.001)
    monkeypatch.setattr(ipc, "READ_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["ipc", "--turns", "1", "--sizes-mb", "0.001"])
    ipc.main()
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["table"] for one in printed] == [ipc.IPC, ipc.DEATH]
