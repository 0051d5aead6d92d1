"""The benchmark of a GPU, on a GPU of NumPy: what it runs, what it compares, and what it says without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu
from parashard.job.layers import parse_set
from parashard.job.load import load_job
from parashard.job.schema import Job
from parashard_server.state.cuda_storage import CudaStorage
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import drawn_from
from parashard_worker.device import Cpu
from support import reference_rules as reference
from support.late_device import LateDevice

SMALL = ("model.hidden=[8]", "job.batch_size=64", 'optimizer.kind="sgd"', "optimizer.learning_rate=0.5")


def small_job() -> Job:
    return load_job(gpu.JOB, [parse_set(setting) for setting in SMALL], {}).job


def test_its_job_is_valid_and_overlaps_transfers() -> None:
    settings = [parse_set(s) for s in (*gpu.SETTINGS, "cluster.device=cuda:0", "cluster.shard_device=cuda")]
    assert load_job(gpu.JOB, settings, {}).job.cluster.pipeline_depth == 1


def test_training_without_a_server_learns() -> None:
    training = gpu.NoServer(small_job(), Cpu(), reference)
    losses = [training.step(step) for step in range(60)]
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])


def test_training_without_a_server_has_the_kernels_that_it_is_given() -> None:
    pair = [gpu.NoServer(small_job(), Cpu(), kernels) for kernels in (fused, reference)]
    for training in pair:
        assert training.ms_per_step(3) > 0
    for name, values in pair[0].variables.items():
        np.testing.assert_array_equal(values, pair[1].variables[name])


class Untimed(gpu.NoServer):
    """A step without a server takes 4 ms."""

    batch = 100

    def __init__(self) -> None:
        self.asked: list[int] = []

    def ms_per_step(self, steps: int) -> float:
        self.asked.append(steps)
        return 4.0


def test_steps_are_compared_with_those_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def trained(command: str, job: Path, settings: list[str]) -> dict[str, Any]:
        runs.append(settings[-1])
        rate = 10_000.0 if settings[-1].endswith("cpu") else 12_500.0
        return {"steps_applied": [9, 9], "steps_total": 9, "examples_per_s": rate}

    monkeypatch.setattr(gpu, "trained", trained)
    no_server = Untimed()
    host, device = gpu.worker_step_rows(["cluster.device=cuda:0"], no_server, turns=2)
    assert runs == ["cluster.shard_device=cpu", "cluster.shard_device=cuda"] * 2
    assert no_server.asked == [8, 8]
    assert (host["case"], host["ours_ms"], host["peer_ms"], host["ratio"]) == ("shards on the host", 10.0, 4.0, 0.4)
    assert (device["case"], device["ours_ms"], device["ratio"]) == ("shards on the GPU", 8.0, 0.5)


def test_a_run_that_lost_a_step_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"steps_applied": [9, 8], "steps_total": 9, "examples_per_s": 1.0}
    monkeypatch.setattr(gpu, "trained", lambda *words: report)
    with pytest.raises(AssertionError):
        gpu.worker_step_rows([], Untimed(), turns=1)


def test_copies_of_both_kinds_of_memory_are_compared() -> None:
    device = LateDevice()
    rows = gpu.copy_rows(device, [0.001], turns=2)
    assert [row["case"] for row in rows] == ["0.001 MiB to the GPU", "0.001 MiB from the GPU"]
    assert len(device.copied_in) == len(device.copied_out) == 2 * 3
    for copied in (device.copied_in, device.copied_out):
        assert [host is device.staged[0] for host in copied] == [True, False] * 3


def test_shards_are_compared_rule_by_rule_with_pulls() -> None:
    device = LateDevice()
    rows = gpu.shard_rows(device, [0.001], turns=2)
    assert [row["case"] for row in rows] == ["sgd, 0.001 MiB", "adam, 0.001 MiB"]
    assert all(row["ratio"] == row["peer_ms"] / row["ours_ms"] for row in rows)
    assert len(device.copied_out) == 2 * 3  # a pull after every push


def test_shards_that_disagree_are_no_figure() -> None:
    device = LateDevice()
    device.kernels.update = lambda *given: None  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="other weights"):
        gpu.shard_rows(device, [0.001], turns=1)


def test_a_move_pushes_and_pulls_all_that_moved() -> None:
    device = LateDevice()
    storage = CudaStorage(
        gpu.one_variable(6), 0, Optimizer(gpu.RULES["sgd"], device.kernels), drawn_from(0), device=device
    )
    move, moved = gpu.moves(storage), storage.moved
    found: list[int] = []

    def moved_bytes(*run: Any) -> Any:
        runs = moved(*run)
        found.append(sum(piece.values.nbytes for piece in runs))
        return runs

    storage.moved = moved_bytes  # type: ignore[method-assign]
    for _ in range(2):
        move()
    assert found == [24, 24]
    assert storage.memory.done.tolist() == [2]


def test_calls_take_turns_and_the_first_turn_does_not_count() -> None:
    called: list[str] = []
    times = gpu.timed({name: lambda name=name: called.append(name) for name in "ab"}, turns=2)  # type: ignore[misc]
    assert called == ["a", "b"] * 3
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2}


def test_without_a_gpu_every_row_says_so_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    rows, why = gpu.measured(turns=1)
    tables = gpu.sections(rows, why)
    assert "needs CuPy" in tables.pop("GPU")
    assert list(tables) == [gpu.STEP, gpu.COPY, gpu.SHARD]
    lines = [line for text in tables.values() for line in text.splitlines()[2:]]
    assert len(lines) == len(rows) == 2 + 6 + 6
    assert all(line.count("not measured") == 3 for line in lines)


def test_figures_come_in_the_order_of_the_rows_without_figures() -> None:
    device = LateDevice()
    expected = [row["case"] for row in gpu.not_measured()]
    copies = [case.replace("0.001", "1") for case in (row["case"] for row in gpu.copy_rows(device, [0.001], turns=1))]
    assert expected[2:4] == copies


def test_a_figure_is_shown_with_its_ratio() -> None:
    row = gpu.row(gpu.COPY, "1 MiB to the GPU", [2.0, 1.0, 9.0], gpu.PAGEABLE, [6.0])
    text = gpu.sections([row], "Some GPU")[gpu.COPY]
    assert text.splitlines()[-1] == "| 1 MiB to the GPU | 2.000 | ordinary memory | 6.000 | 3.000 x |"
