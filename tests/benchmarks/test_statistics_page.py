"""The laboratory goes on where it was stopped, and its table says in bold what is worse than one machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import parashard as ps
from benchmarks.statistics.__main__ import read
from benchmarks.statistics.cells import METHODS, PARTS, SCENARIOS, Cell, cells_of, fits
from benchmarks.statistics.page import page
from benchmarks.statistics.tasks import digest
from benchmarks.statistics.trial import Trial


def cell(scenario: str, workers: int, seed: int, value: float) -> dict[str, Any]:
    return {
        **Cell("mlp", scenario, workers, seed)._asdict(),
        "task_sha256": digest("mlp"),
        "metric": "accuracy",
        "value": value,
        "higher_is_better": True,
        "tolerance": 0.005,
        "drift": [0.1, 0.2, 0.3],
        "staleness_mean": 1.0,
        "staleness_max": 2,
        "virtual_s": 10.0 / workers,
    }


def test_cells_are_read_back_but_for_a_line_that_was_cut_off_and_a_task_that_was_edited(tmp_path: Path) -> None:
    file = tmp_path / "statistics.jsonl"
    assert read(file) == {}
    whole = cell("auto", 4, 1, 0.9)
    edited = cell("auto", 2, 1, 0.9) | {"task_sha256": "another"}
    file.write_text(json.dumps(whole) + "\n" + json.dumps(edited) + "\n" + json.dumps(cell("auto", 8, 1, 0.9))[:40])
    assert list(read(file)) == [Cell("mlp", "auto", 4, 1)]


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_one_machine_first_and_scenarios_that_there_are(part: str) -> None:
    cells = list(cells_of(part, ["mlp"]))
    assert cells[0] == Cell("mlp", "plain", 1, 0)
    assert {cell.scenario for cell in cells} <= {*SCENARIOS, *METHODS}


def test_a_lag_is_not_tried_where_another_batch_has_other_rows() -> None:
    model = SimpleNamespace(tables=[ps.Table("users", 8)], keys=lambda batch: {})
    with_rows = Trial(model, ps.SGD(0.1), (0, 0), (0, 0), 1, 32, "loss", False, 0.01)
    assert (fits("lag 1", with_rows), fits("auto", with_rows)) == (False, True)
    assert fits("lag 1", replace(with_rows, model=SimpleNamespace()))


def test_what_is_worse_than_one_machine_is_bold() -> None:
    plain = [cell("plain", 1, seed, value) for seed, value in enumerate((0.95, 0.96, 0.97))]
    good = [cell("auto", 4, seed, value) for seed, value in enumerate((0.95, 0.96, 0.97))]
    bad = [cell("async", 4, seed, value) for seed, value in enumerate((0.90, 0.91, 0.92))]
    text = page([*plain, *good, *bad], written=False)
    assert "| auto | 4 | 0.9600 (+0.0000, ± 0.0000) |" in text
    assert "| async | 4 | **0.9100 (+0.0500, ± 0.0000)** |" in text
    assert "| mlp | 0.200 |" in text


def test_sixteen_workers_may_be_worse_by_twice_the_tolerance() -> None:
    plain = [cell("plain", 1, seed, 0.96) for seed in range(2)]
    auto = [cell("auto", workers, seed, 0.951) for seed in range(2) for workers in (8, 16)]
    text = page([*plain, *auto], written=False)
    assert "| auto | 16 | 0.9510" in text
    assert "| auto | 8 | **0.9510" in text


def test_one_seed_tells_nothing() -> None:
    text = page([cell("plain", 1, 0, 0.96), cell("auto", 4, 0, 0.9)], written=False)
    assert "| auto | 4 | *0.9000 (+0.0600, one seed)* |" in text


def test_a_task_without_one_machine_is_left_out() -> None:
    assert "auto" not in page([cell("auto", 4, 0, 0.9)], written=False)
