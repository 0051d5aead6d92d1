"""What a run with tables leaves: `parashard predict` judges as its evaluation did, `checkpoint export` has its rows."""

from __future__ import annotations

import csv
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from parashard.plan.embedding import BFLOAT16, floats_of
from parashard.store.arrays import from_bytes
from support.cluster_run import ClusterRun
from support.command_run import DIES_WITH_US

Start = Callable[..., ClusterRun]

JOB = """
[job]
name = "keyed"
epochs = 3
batch_size = 32

[data]
source = "csv"
path = "train.csv"
held_out_path = "test.csv"
label = "kind"
key_columns = ["*"]

[model]
kind = "wide_deep"
hidden = [8]

[optimizer]
kind = "adam"

[tables.wide]
dimension = 1

[tables.deep]
dimension = 4
dtype = "bfloat16"
encoding = "int8"
"""


def table(path: Path, rows: int, seed: int, words: int) -> None:
    """Write rows whose kind follows from a word, most of the time."""
    rng = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["word", "n", "kind"])
        for _ in range(rows):
            word = rng.randrange(words)
            writer.writerow([f"w{word}", rng.random(), "odd" if word % 2 != (rng.random() < 0.1) else "even"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keyed")
    table(path / "train.csv", 2000, 1, words=40)
    table(path / "test.csv", 300, 2, words=44)  # four words that nobody has seen
    (path / "job.toml").write_text(JOB)
    return path


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    whole = [*DIES_WITH_US, sys.executable, "-m", "parashard", *words]
    return subprocess.run(whole, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_predictions_are_those_that_were_evaluated(start_run: Start, folder: Path) -> None:
    run = start_run(str(folder / "job.toml"))
    report = run.report()
    assert report["rows"] == {"deep": 40, "wide": 40}
    run_dir = report["run_dir"]
    said = command(folder, "predict", run_dir, "test.csv", "--output", "said.csv")
    assert said.returncode == 0, said.stderr
    with (folder / "said.csv").open() as file, (folder / "test.csv").open() as test:
        pairs = list(zip(csv.DictReader(file), csv.DictReader(test), strict=True))
    right = sum(found["prediction"] == due["kind"] for found, due in pairs)
    assert right / len(pairs) == pytest.approx(report["held_out"]["accuracy"])
    assert right / len(pairs) > 0.75

    exported = command(folder, "checkpoint", "export", run_dir, "--table", "deep", "--output", "deep.npz")
    assert exported.returncode == 0, exported.stderr
    assert "40 rows of table deep" in exported.stdout
    with np.load(folder / "deep.npz") as arrays:
        assert arrays["rows"].shape == (40, 4)
        assert arrays["rows"].dtype == np.float32
        assert (np.diff(arrays["keys"].astype(object)) > 0).all()
        due = dict(zip(arrays["keys"].tolist(), arrays["rows"].tolist(), strict=True))
    exported = command(folder, "checkpoint", "export", run_dir, "--table", "deep", "--output", "deep.parquet")
    assert exported.returncode == 0, exported.stderr
    assert "40 rows of table deep" in exported.stdout
    columns = parquet.read_table(folder / "deep.parquet").to_pydict()
    assert dict(zip(columns["key"], columns["row"], strict=True)) == due
    exported = command(folder, "checkpoint", "export", run_dir, "--table", "deep", "--output", "deep.safetensors")
    assert exported.returncode == 0, exported.stderr
    found = from_bytes((folder / "deep.safetensors").read_bytes())
    assert found["rows"].dtype == BFLOAT16
    assert dict(zip(found["keys"].tolist(), floats_of(found["rows"]).tolist(), strict=True)) == due
    none = command(folder, "checkpoint", "export", run_dir, "--table", "dep", "--output", "dep.npz")
    assert none.returncode == 2
    assert "--table dep: j1 has no row of it; tables with rows: deep, wide" in none.stderr
    none = command(folder, "checkpoint", "export", run_dir, "--table", "dep", "--output", "dep.parquet")
    assert none.returncode == 2
    assert not (folder / "dep.parquet").exists()
    whole = command(folder, "checkpoint", "export", run_dir, "--output", "all.parquet")
    assert "found '.parquet'; allowed: .safetensors, .npz" in whole.stderr
