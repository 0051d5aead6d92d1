"""A table in a file, and a run that is done without having run: its job, preprocessing and first weights."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from parashard.data import open_source
from parashard.data.preprocessing import as_json
from parashard.job.embeddings import tables_of
from parashard.job.load import as_toml, load_job
from parashard.models.building import build_model
from parashard.store.arrays import write_arrays

HOUSES = [
    [f"h{n}", n % 7 + 0.5, ["north", "old, town"][n % 2], "" if n % 5 == 0 else 1990 + n % 17, 10.5 * n]
    for n in range(60)
]


def written(name: str, header: list[str], rows: list[Any], delimiter: str = ",") -> None:
    """Write a CSV file."""
    with Path(name).open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])


def houses() -> None:
    """Write `My Houses.csv`."""
    written("My Houses.csv", ["id", "area", "district", "year", "price"], HOUSES)


def finished_run(job: Path, *, weights: bool = True) -> Any:
    """Make a run of a job by hand, and return its model, source and first weights."""
    loaded = load_job(job, environ={})
    source = open_source(loaded.job.data)
    run = Path("runs/done")
    run.mkdir(parents=True)
    (run / "job.toml").write_text(as_toml(loaded.job))
    if source.spec.preprocessing is not None:
        (run / "preprocessing.json").write_bytes(as_json(source.spec.preprocessing))
    model: Any = build_model(loaded.job.model, source.spec, 0, job.parent, tables_of(loaded.job))
    rng = np.random.default_rng(1)
    values = {
        name: rng.normal(size=variable.shape).astype(np.float32) for name, variable in model.initial_variables().items()
    }
    if weights:
        write_arrays(run / "weights.safetensors", values)
    return model, source, values
