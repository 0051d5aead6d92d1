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
SLOW = pytest.mark.full("it compiles for a quarter of a minute; test_jax_libraries.py has another model of Flax")
STEPS = 48
"""More than a task's warm-up has."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_as_mnist(tmp_path_factory.mktemp("mnist"), side=28)


def _some(tree: Any, examples: int) -> Any:
    return {name: leaf[:examples] for name, leaf in tree.items()} if isinstance(tree, dict) else tree[:examples]


def _bytes(tree: Any) -> Any:
    return {name: leaf.tobytes() for name, leaf in tree.items()} if isinstance(tree, dict) else tree.tobytes()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=SLOW) if name == "flax_cnn" else name for name in tasks.names()],
)
def test_a_task_trains_and_is_judged_by_its_metric(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (tasks.make(name, 1, data) for _ in range(2))
    part = first.batch_size // PARTS
    train, held_out = ((_some(x, STEPS * part), _some(y, STEPS * part)) for x, y in (first.train, first.held_out))
    for one, other in zip(first.train + first.held_out, second.train + second.held_out, strict=True):
        assert _bytes(one) == _bytes(other), "a seed's trial is the same whenever it is made"
    trainer = ps.Trainer(first.model, first.optimizer, ps.OneDeviceStrategy(threads=1), seed=1, settings=first.settings)
    trainer.fit(train, epochs=1, batch_size=part, verbose=0)
    assert np.isfinite(trainer.evaluate(held_out)[first.metric])
    assert first.higher_is_better == (first.metric != "loss")
