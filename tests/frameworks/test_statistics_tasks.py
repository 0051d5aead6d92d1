"""Each task of the statistics laboratory makes the same trial of a seed twice, and its model trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from benchmarks.statistics import tasks
from support.mnist_files import written_as_mnist

pytest.importorskip("torch", reason="NO TEST OF the laboratory's tasks; `make test-frameworks` has it")
pytest.importorskip("jax", reason="NO TEST OF the laboratory's tasks; `make test-frameworks` has it")

PARTS = 16
"""The most workers that share a batch."""
STEPS = 48
"""More than a task's warm-up has."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_as_mnist(tmp_path_factory.mktemp("mnist"), side=28)


def _some(tree: Any, examples: int) -> Any:
    return {name: leaf[:examples] for name, leaf in tree.items()} if isinstance(tree, dict) else tree[:examples]


@pytest.mark.parametrize("name", tasks.names())
def test_a_task_trains_and_is_judged_by_its_metric(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (tasks.make(name, 1, data) for _ in range(2))
    part = first.batch_size // PARTS
    train, held_out = ((_some(x, STEPS * part), _some(y, STEPS * part)) for x, y in (first.train, first.held_out))
    metrics = []
    for trial in (first, second):
        trainer = ps.Trainer(
            trial.model, trial.optimizer, ps.OneDeviceStrategy(threads=1), seed=1, settings=trial.settings
        )
        trainer.fit(train, epochs=1, batch_size=part, verbose=0)
        metrics.append(trainer.evaluate(held_out)[trial.metric])
    assert np.isfinite(metrics[0])
    assert metrics[0] == metrics[1], "a seed's trial is the same whenever it is made"
    assert first.higher_is_better == (first.metric != "loss")
