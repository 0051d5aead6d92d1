"""The report oracle sees each kind of wrong report, and nothing wrong in that of a sound run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_run import Ended, Expected, JobRun, violations
from safetensors.numpy import load_file, save_file

from parashard.process.run_files import WEIGHTS_FILE
from support.report_oracle import evaluations_of, misreported

DEADLINE_S = 100.0

pytestmark = pytest.mark.full("a test of what the tests of clusters judge by, on a run of its own")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Any]]:
    """Return the directory and the report of a run of one epoch."""
    run_dir = tmp_path_factory.mktemp("report") / "run"
    with JobRun(run_dir, ["run", "examples/digits.toml", "--set", "job.epochs=1"]) as run:
        ended = run.wait(time.monotonic() + DEADLINE_S)
    assert ended.exit_code == 0, ended.complaint
    return run_dir, ended.report


def test_a_sound_report_agrees_with_what_the_run_left(finished: tuple[Path, Mapping[str, Any]]) -> None:
    assert misreported(*finished) == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"held_out": {"accuracy": 0.99999}}, "held-out accuracy is 0.99999, and the final weights have 0."),
        ({"held_out": {"loss": None}}, "held-out loss is None, and the final weights have "),
        ({"steps_applied": [90, 89]}, "steps_applied is [90, 89], and the shards saved [90, 90] steps"),
        ({"shards": 3}, "shards is 3, and 2 have saved"),
        ({"steps_total": 40}, "shard 0 saved the steps [(0, 90)], not 0 to 39"),
        ({"skipped_steps": 7}, "skipped_steps is 7, and the shards saved 0"),
        ({"partly_skipped": 3}, "partly_skipped is 3, and the shards saved 0"),
        ({"held_out": {"happiness": 1.0}}, "held-out happiness is reported but was not evaluated"),
        ({"weights_sha256": "b2"}, "the report has the weights b2, the last checkpoint "),
    ],
)
def test_a_figure_that_the_files_do_not_have_is_reported(
    finished: tuple[Path, Mapping[str, Any]], wrong: Mapping[str, Any], told: str
) -> None:
    run_dir, report = finished
    held_out = {**report["held_out"], **wrong.get("held_out", {})}
    found = misreported(run_dir, {**report, **wrong, "held_out": held_out})
    assert found[0].startswith(told)


def test_weights_that_are_not_the_checkpoint_s_are_reported(finished: tuple[Path, Mapping[str, Any]]) -> None:
    run_dir, report = finished
    path = run_dir / WEIGHTS_FILE
    sound = path.read_bytes()
    try:
        save_file({name: value + np.float32(1.0) for name, value in load_file(path).items()}, path)
        found = misreported(run_dir, report)
    finally:
        path.write_bytes(sound)
    assert found[0].startswith("the weights file has the weights ")


def test_an_evaluation_that_a_run_without_faults_has_otherwise_is_reported(
    finished: tuple[Path, Mapping[str, Any]],
) -> None:
    run_dir, report = finished
    recorded = evaluations_of(run_dir)
    assert len(recorded) == 1, "one epoch"
    (step, metrics), ended = *recorded.items(), Ended(0, report, "", (), run_dir)
    assert violations(ended, Expected(evaluations=recorded)) == []
    other = {step: {**metrics, "accuracy": 0.5}}
    assert violations(ended, Expected(evaluations=other)) == [
        f"after step {step} the metrics were {metrics}, not {other[step]}"
    ]
