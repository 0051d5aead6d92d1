"""The weights of an evaluation, stored before its result is reported."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import RUN_NAME
from parashard.checkpoints.encoding import encode
from parashard.checkpoints.manifest import RunRecord
from parashard.errors import ConfigurationError
from parashard.plan.state import counter_rows
from parashard.plan.variables import Float32s, Variable
from parashard.store import open_store
from parashard.store.arrays import read_arrays
from parashard_worker.loop import check_store, keep_evaluated

RUN = "run-1"


def store_of(folder: Path, run_id: str = RUN) -> str:
    """Return the store of a run, which a coordinator began."""
    record = RunRecord(run_id=run_id, job_digest="e" * 64, identity={}, job_toml="", created_at=0.0)
    open_store(str(folder)).replace(RUN_NAME, encode(record))
    return str(folder)


def variables(values: dict[str, Float32s]) -> dict[str, Variable]:
    return {name: Variable(name, value.shape) for name, value in values.items()}


def test_each_attempt_has_a_file_of_its_own_with_the_bits_that_were_judged(tmp_path: Path) -> None:
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((4, 2), np.float32)[:, 0]}
    names = {keep_evaluated(store_of(tmp_path), RUN, variables(values), 480, values) for _ in range(2)}
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
    assert keep_evaluated(store_of(tmp_path), RUN, variables(values), 480, values) == ""


def test_a_counter_is_stored_as_whole_numbers(tmp_path: Path) -> None:
    counted = np.array([3, -(2**40)])
    steps = Variable("steps", (2, 8), state="counter")
    name = keep_evaluated(store_of(tmp_path), RUN, {"steps": steps}, 480, {"steps": counter_rows(counted)})
    found = read_arrays(tmp_path / name)["steps"]
    assert (found.dtype, found.tolist()) == (np.int64, counted.tolist())


def test_nothing_is_written_where_the_run_s_store_is_not(tmp_path: Path) -> None:
    away, values = tmp_path / "runs" / "a" / "checkpoints", {"a": np.ones(2, np.float32)}
    assert keep_evaluated(str(away), RUN, variables(values), 480, values) == ""
    assert not list(tmp_path.iterdir()), "no folder was made"
    other = store_of(away, "run-2")
    assert keep_evaluated(other, RUN, variables(values), 480, values) == ""
    assert [path.name for path in away.iterdir()] == [RUN_NAME]


def test_a_worker_that_could_not_keep_weights_for_callbacks_says_so_at_its_start(tmp_path: Path) -> None:
    away = str(tmp_path / "away")
    check_store(pb.GetJobReply(run_id=RUN, checkpoint_url=away))  # no callback asks for weights
    reply = pb.GetJobReply(run_id=RUN, checkpoint_url=away, stores_evaluated=True)
    with pytest.raises(ConfigurationError, match="is not on this machine: share that folder at the same path"):
        check_store(reply)
    store_of(tmp_path / "away", "run-2")
    with pytest.raises(ConfigurationError, match="is of another run, run-2, on this machine"):
        check_store(reply)
    store_of(tmp_path / "away")
    check_store(reply)
    assert not (tmp_path / "away" / "evaluated").exists()
