"""The example jobs on click logs, as a user starts them: they learn; a malformed row ends the start with its place.

Rules P28 and P35.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.click_cases import criteo_log
from support.cluster_run import ClusterRun
from support.command_run import ROOT

Start = Callable[..., ClusterRun]
EXAMPLES = ROOT / "examples"

pytest.importorskip("pyarrow")


def criteo(log: Path, *sets: str) -> list[str]:
    given = [f"data.path={log}", "job.batch_size=128", "evaluation.every_epochs=1", *sets]
    return [str(EXAMPLES / "criteo.toml"), *(part for text in given for part in ("--set", text))]


def test_criteo_s_log_teaches_what_its_first_text_tells(start_run: Start, tmp_path: Path) -> None:
    rates = "tables.wide.optimizer.learning_rate=0.5", "tables.deep.optimizer.learning_rate=0.1"
    log = criteo_log(tmp_path / "train.txt", 5000)
    run = start_run(*criteo(log, "model.kind=deepfm", *rates))
    report = run.report()
    assert report["data"]["examples"] == 4500
    assert report["held_out"].keys() == {"loss", "accuracy", "auc", "normalized_entropy"}
    assert report["held_out"]["auc"] > 0.9, "a tenth of the first texts is empty"


def test_a_malformed_row_ends_the_start_with_its_place(start_run: Start, tmp_path: Path) -> None:
    log = criteo_log(tmp_path / "train.txt", 300)
    log.write_text(log.read_text() + "1\tmany\n")
    run = start_run(*criteo(log))
    run.wait()
    assert run.process.returncode == 2
    assert f"{log}: row 301 has 2 fields; allowed: 40" in run.complaint()
    assert "Traceback" not in run.complaint()


def test_a_synthetic_log_is_learned_towards_its_best_auc(start_run: Start) -> None:
    sets = [part for text in ("data.examples=200_000", "data.held_out=20_000") for part in ("--set", text)]
    report = start_run(str(EXAMPLES / "clicks.toml"), *sets).report()
    assert 0.71 < report["held_out"]["auc"] < 0.79
