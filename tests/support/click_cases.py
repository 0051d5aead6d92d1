"""Models of clicks with a batch whose rows are looked up, and small logs in Criteo's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from parashard.data.base import Batch, DataSpec, Field
from parashard.data.tree import NO_KEY
from parashard.frozen_model import validated
from parashard.job.model_options import ModelOptions
from parashard.models.base import LooksUp, Model
from parashard.models.building import build_model
from parashard.models.looking_up import looked_up
from parashard.plan.embedding import Combiner, EmbeddingTable
from parashard.plan.optimizers import Adagrad
from support.model_cases import SEED, start

COLUMNS, KEYS, DIMENSION = 4, 6, 3
LISTS = {"tags": 3, "words": 5}
"""Columns of lists, and how many values each has at most."""
CLICK_MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "wide_deep": ({"kind": "wide_deep", "hidden": [7, 4]}, 3),
    "wide_deep-dropout": ({"kind": "wide_deep", "hidden": [9, 6], "dropout": 0.4}, 2),
    "wide_deep-no-numbers": ({"kind": "wide_deep", "hidden": [5]}, 0),
    "fm": ({"kind": "fm"}, 3),
    "fm-no-numbers": ({"kind": "fm"}, 0),
    "deepfm": ({"kind": "deepfm", "hidden": [7]}, 3),
    "deepfm-dropout": ({"kind": "deepfm", "hidden": [9, 6], "dropout": 0.4}, 1),
    "dlrm": ({"kind": "dlrm", "bottom": [5], "hidden": [7, 4]}, 3),
    "dlrm-dropout": ({"kind": "dlrm", "bottom": [], "hidden": [9], "dropout": 0.4}, 2),
}
"""Options, and how many numbers an example has."""


def tables(*, combiner: Combiner | None = None, **dimensions: int) -> tuple[EmbeddingTable, ...]:
    """Return tables by their names and dimensions; by default those of the models here."""
    chosen = dimensions or {"deep": DIMENSION, "wide": 1}
    adagrad = Adagrad(learning_rate=0.1)
    return tuple(EmbeddingTable(name, size, adagrad, combiner=combiner) for name, size in chosen.items())


def click_spec(numbers: int = 3, classes: int = 2, columns: int = COLUMNS, lists: bool = False) -> DataSpec:
    """Return the spec of data with numbers and keys, and columns of lists of them."""
    fields = [Field("inputs/numbers", (numbers,), "float32"), Field("inputs/keys", (columns,), "int64")]
    fields += [Field(f"inputs/lists/{name}", (most,), "int64") for name, most in LISTS.items() if lists]
    return DataSpec(20, 0, (), classes, "00", fields=tuple(fields))


def built_click(options: Mapping[str, Any], numbers: int, seed: int = SEED) -> Model:
    """Return a model of clicks."""
    return build_model(validated(ModelOptions, options), click_spec(numbers), seed, None, tables())


def click_batch(model: Model, numbers: int, n: int = 4, step: int = 11) -> Batch:
    """Return examples of few keys, so that some use one twice, and where the row of each is."""
    rng = np.random.default_rng(n)
    inputs = {
        "numbers": rng.standard_normal((n, numbers)).astype(np.float32),
        "keys": rng.integers(0, KEYS, (n, COLUMNS)) * 1_000_003 - 7,
    }
    batch = Batch(step, 2, np.arange(n), inputs, rng.integers(0, 2, n))
    assert isinstance(model, LooksUp)
    places = {}
    for table, keys in model.keys(batch).items():
        assert keys is inputs["keys"]
        places[table] = np.unique(keys, return_inverse=True)[1].reshape(keys.shape)
    return replace(batch, places=places)


def lists_batch(model: Model, numbers: int, n: int = 4, columns: int = COLUMNS) -> Batch:
    """Return examples with lists of keys too, of which each column has an empty one and equal keys in one."""
    rng = np.random.default_rng(n)
    inputs: dict[str, Any] = {
        "numbers": rng.standard_normal((n, numbers)).astype(np.float32),
        "keys": rng.integers(0, KEYS, (n, columns)) * 1_000_003 + 5,
        "lists": {},
    }
    for name, most in LISTS.items():
        keys = rng.integers(0, 2, (n, most)) * 7 + most
        keys[np.arange(most) >= rng.integers(1, most + 1, n)[:, None]] = NO_KEY
        keys[0] = NO_KEY
        inputs["lists"][name] = keys
    return looked_up(model, Batch(11, 2, np.arange(n), inputs, rng.integers(0, 2, n)), {t.name: t for t in tables()})


def click_start(model: Model, batch: Batch, dtype: Any = np.float32) -> dict[str, Any]:
    """Return the first variables, and the rows that a batch uses."""
    rng = np.random.default_rng(SEED)
    dimensions = {table.name: table.row_elements for table in tables()}
    rows = {
        name: (0.5 * rng.standard_normal((places.max(initial=-1) + 1, dimensions[name]))).astype(dtype)
        for name, places in batch.places.items()
    }
    return start(model, dtype) | rows


def criteo_row(label: object = 1, numbers: Sequence[object] = (), texts: Sequence[str] = ()) -> str:
    """Return a row; fields that are not given are empty."""
    given = [str(label), *map(str, numbers), *[""] * (13 - len(numbers)), *texts, *[""] * (26 - len(texts))]
    return "\t".join(given)


def criteo_log(path: Path, rows: int, seed: int = 0) -> Path:
    """Write a log of some rows, a tenth of whose fields are empty, and in which the first text tells the label."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        label = int(rng.integers(0, 2))
        numbers = [*rng.integers(-2, 1000, 13)]
        texts = [f"{label:08x}", *(f"{text:08x}" for text in rng.integers(0, 50, 25))]
        fields = [text if rng.random() > 0.1 else "" for text in (*numbers, *texts)]
        lines.append(criteo_row(label, fields[:13], fields[13:]))
    path.write_text("\n".join(lines) + "\n")
    return path
