"""A trainer's job as a job file: what it has, and what is refused without a file being written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import parashard as ps
from parashard.data import open_source
from parashard.errors import ConfigurationError
from parashard.job.load import load_job
from parashard.models.building import build_model

FACTORY = """
import parashard as ps
def build(spec, units=4):
    layers = [ps.layers.Dense(units), ps.layers.ReLU(), ps.layers.Dense(spec.classes)]
    return ps.Sequential(layers, input_shape=spec.input_shape, loss="softmax_cross_entropy")
"""
DATA = {"source": "csv", "path": "t.csv", "label": "kind"}


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ps.Trainer:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "factory_of_the_job_file", raising=False)
    Path("t.csv").write_text("a,b,kind\n" + "".join(f"{n % 7},{n % 5},{'xyz'[n % 3]}\n" for n in range(60)))
    Path("factory_of_the_job_file.py").write_text(FACTORY)
    model = ps.Sequential(
        [ps.layers.Dense(8), ps.layers.ReLU(), ps.layers.Dense(3)], input_shape=(2,), loss="softmax_cross_entropy"
    )
    strategy = ps.ParameterServerStrategy(shards=1, workers=3, consistency="sync:3")
    return ps.Trainer(model, ps.Adam(0.01, clip_norm=2.0), strategy, seed=5, settings={"checkpoint.every_s": 7})


def test_the_job_file_is_the_trainer_s_job(trainer: ps.Trainer) -> None:
    named = {"kind": "factory_of_the_job_file:build", "units": 8}
    trainer.to_job_file("o.toml", model=named, data=DATA, epochs=3, batch_size=16)
    loaded = load_job(Path("o.toml"), environ={})
    job = loaded.job
    assert (job.job.name, job.job.seed, job.job.epochs, job.job.batch_size) == ("o", 5, 3, 16)
    assert (job.optimizer.learning_rate, job.optimizer.clip_norm) == (0.01, 2.0)
    assert (job.cluster.shards, job.cluster.workers, job.checkpoint.every_s) == (1, 3, 7)
    model = build_model(job.model, open_source(job.data).spec, job.job.seed, Path.cwd())
    assert model.initial_variables()["dense_0.weight"].shape == (2, 8)
    assert repr(model) == repr(trainer._present.given)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "the model itself": ({"model": object()}, 'give model="module:factory"'),
    "arrays": ({"data": ([1], [2])}, 'and data={"source": "csv"'),
    "another model": (
        {"model": "factory_of_the_job_file:build"},
        "'factory_of_the_job_file:build' is another model than this trainer's: variable 'dense_0.bias' has the shape "
        "(4,) there, and (8,) here",
    ),
    "other variables": ({"model": "softmax"}, "variable 'dense_0.bias' has the shape (3,) there, and (8,) here"),
    "no module": ({"model": "no_such_module:build"}, "no module 'no_such_module'"),
    "no factory": ({"model": "build"}, "model.kind"),
    "an unknown key": ({"data": {**DATA, "lable": 1}}, "data.lable"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_named_is_refused_and_nothing_is_written(trainer: ps.Trainer, mistake: str) -> None:
    changed, says = MISTAKES[mistake]
    given: Any = {"model": {"kind": "factory_of_the_job_file:build", "units": 8}, "data": DATA, **changed}
    with pytest.raises(ConfigurationError) as refused:
        trainer.to_job_file("o.toml", **given, epochs=3, batch_size=16)
    assert says in refused.value.message
    assert not Path("o.toml").exists()
