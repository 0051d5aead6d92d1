"""Jobs on a user's table, from the file to a prediction: a line as a CSV, and one with a stray text."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from parashard.data.preprocessing import read_preprocessing
from support.cluster_run import ClusterRun

Start = Callable[..., ClusterRun]

JOB = """
job = { name = "line", epochs = 20, batch_size = 20 }
data = { source = "csv", path = "line.csv", label = "y", held_out_path = "held-out.csv" }
model = { kind = "mlp", hidden = [] }
optimizer = { kind = "adam", learning_rate = 0.05, schedule = { kind = "cosine" } }
cluster = { shards = 2, workers = 2 }
"""


def write(path: Path, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        file.write("a,b,y\n")
        for a, b, noise in rng.standard_normal((rows, 3)) * [3, 0.1, 2_000]:
            file.write(f"{a},{b},{40_000 * a - 9_000 * b + 500_000 + noise}\n")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "line.toml").write_text(JOB)
    write(tmp_path / "line.csv", 800, 0)
    write(tmp_path / "held-out.csv", 50, 1)
    return tmp_path / "line.toml"


def test_a_regression_learns_and_its_files_predict(start_run: Start, job: Path) -> None:
    run = start_run(str(job))
    report = run.report()
    assert report["held_out"].keys() == {"loss", "mean_absolute_error", "mean_squared_error"}
    assert report["held_out"]["loss"] < 1e-3, "the share of the variance that is not explained"
    assert report["data"]["numeric_columns"] == 2
    assert report["parameters"] == 3

    preprocessing, weights = (
        read_preprocessing(run.dir / "preprocessing.json"),
        load_file(run.dir / "weights.safetensors"),
    )
    with (job.parent / "held-out.csv").open() as file:
        rows = list(csv.DictReader(file))
    outputs = preprocessing.inputs(rows) @ weights["dense_0.weight"] + weights["dense_0.bias"]
    predicted = preprocessing.target.mean + preprocessing.target.deviation * outputs[:, 0]
    error = predicted - [float(row["y"]) for row in rows]
    assert report["held_out"]["mean_squared_error"] == pytest.approx(np.mean(error**2), rel=1e-3)


def test_one_text_in_a_numeric_column_ends_the_start_with_its_place(start_run: Start, job: Path) -> None:
    table = job.parent / "line.csv"
    lines = table.read_text().splitlines()
    lines[436] = "1.5,hello,2.5"
    table.write_text("\n".join(lines))
    run = start_run(str(job))
    run.wait()
    assert run.process.returncode == 2
    assert f"{table}: column 'b', row 436 (line 437): found 'hello'" in run.complaint()
    assert "Traceback" not in run.complaint()
