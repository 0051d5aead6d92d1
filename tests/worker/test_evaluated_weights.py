"""The weights of an evaluation, stored before its result is reported."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from parashard.plan.state import counter_rows
from parashard.plan.variables import Float32s, Variable
from parashard.store.arrays import read_arrays
from parashard_worker.evaluated import keep_evaluated


def variables(values: dict[str, Float32s]) -> dict[str, Variable]:
    return {name: Variable(name, value.shape) for name, value in values.items()}


def test_each_attempt_has_a_file_of_its_own_with_the_bits_that_were_judged(tmp_path: Path) -> None:
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((4, 2), np.float32)[:, 0]}
    names = {keep_evaluated(str(tmp_path), variables(values), 480, values) for _ in range(2)}
    assert len(names) == 2
    for name in names:
        assert re.fullmatch(r"evaluated/000000000480-[0-9a-f]{8}\.safetensors", name)
        found = read_arrays(tmp_path / name)
        assert {variable: array.tolist() for variable, array in found.items()} == {
            variable: array.tolist() for variable, array in values.items()
        }


def test_a_store_that_fails_costs_the_file_and_not_the_result(tmp_path: Path) -> None:  # P21
    (tmp_path / "evaluated").write_text("in the way")
    values = {"a": np.ones(2, np.float32)}
    assert keep_evaluated(str(tmp_path), variables(values), 480, values) == ""


def test_a_counter_is_stored_as_whole_numbers(tmp_path: Path) -> None:
    counted = np.array([3, -(2**40)])
    steps = Variable("steps", (2, 8), state="counter")
    name = keep_evaluated(str(tmp_path), {"steps": steps}, 480, {"steps": counter_rows(counted)})
    found = read_arrays(tmp_path / name)["steps"]
    assert (found.dtype, found.tolist()) == (np.int64, counted.tolist())
