"""What the benchmark of encodings computes from reports: nothing here runs a job."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.encodings import HEADER, compared, pushed_per_step


def row(encoding: str, seed: int, accuracy: float, pushed: int, examples_per_s: float = 1000.0) -> dict[str, Any]:
    return {
        "encoding": encoding,
        "seed": seed,
        "accuracy": accuracy,
        "examples_per_s": examples_per_s,
        "steps_total": 10,
        "steps_applied": [10, 10],
        "duplicate_pushes": 0,
        "bytes": {"pushed": pushed},
    }


def test_a_step_is_pushed_to_every_shard_and_duplicates_are_pushes_too() -> None:
    assert pushed_per_step(row("int8", 0, 0.9, 10_000)) == 1000.0
    assert pushed_per_step(row("int8", 0, 0.9, 12_000) | {"duplicate_pushes": 4}) == 1000.0


def test_encodings_are_compared_with_float32_of_the_same_seed() -> None:
    rows = [
        row("float32", 0, 0.90, 40_000),
        row("int8", 0, 0.91, 10_000, 1100.0),
        row("float32", 1, 0.94, 40_000, 2000.0),
        row("int8", 1, 0.91, 10_000, 1600.0),
    ]
    plain, int8 = compared(rows)
    assert plain == ["float32", "4.0 kB", "100.0%", "0.0%", "0.9200 (0.9000 to 0.9400)", "+0.0000", "1.00"]
    assert int8 == ["int8", "1.0 kB", "25.0%", "75.0%", "0.9100 (0.9100 to 0.9100)", "-0.0100", "0.95"]
    assert len(HEADER) == len(plain)


def test_a_run_without_its_float32_cannot_be_compared() -> None:
    with pytest.raises(KeyError):
        compared([row("int8", 0, 0.9, 10_000)])
