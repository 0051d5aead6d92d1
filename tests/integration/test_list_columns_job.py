"""The example of several values in a cell, from the table to predictions that need neither table nor vocabulary."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster_run import ClusterRun
from support.command_run import DIES_WITH_US, ROOT

Start = Callable[..., ClusterRun]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def films(tmp_path: Path) -> Path:
    """Return the example's folder, in which a fifth of the table is a held-out table."""
    shutil.copytree(EXAMPLES / "films", tmp_path / "films")
    shutil.copy(EXAMPLES / "films.toml", tmp_path)
    head, *rows = (tmp_path / "films" / "films.csv").read_text().splitlines()
    for name, some in (("films", rows[300:]), ("test", rows[:300])):
        (tmp_path / "films" / f"{name}.csv").write_text("\n".join([head, *some]) + "\n")
    return tmp_path


def test_it_learns_and_predicts_as_it_was_judged(start_run: Start, films: Path) -> None:
    test = films / "films" / "test.csv"
    run = start_run(str(films / "films.toml"), "--set", f"data.held_out_path={test}", "--set", "job.epochs=10")
    report = run.report()
    assert report["held_out"]["auc"] > 0.8
    assert report["rows"] == {"deep": 38, "wide": 38}  # 30 users, 8 genres
    assert (report["data"]["hashed_texts"], report["data"]["hashed_keys"]) == (30, 30)
    kept = test.rename(films / "kept.csv")
    shutil.rmtree(films / "films")
    whole = [*DIES_WITH_US, sys.executable, "-m", "parashard", "predict", str(run.dir), str(kept)]
    told = subprocess.run(whole, capture_output=True, text=True, timeout=60, check=True).stdout
    with kept.open() as file:
        due = [row["liked"] for row in csv.DictReader(file)]
    predicted = [row["prediction"] for row in csv.DictReader(told.splitlines())]
    share = sum(a == b for a, b in zip(predicted, due, strict=True)) / len(due)
    assert share == pytest.approx(report["held_out"]["accuracy"], abs=1e-6)
