"""A sidecar evaluator: the newest of the files in a folder, each once, and where its figures go."""

from __future__ import annotations

import csv
import os
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.errors import BadData, ConfigurationError
from parashard.plan.variables import Variable
from parashard.store.arrays import write_arrays

DATA = np.arange(5.0)[:, None], np.zeros(5)


class Scaled:
    """Its outputs are its inputs times one weight; `then` is called at the end of each pass over the data."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.then = then

    def initial_variables(self) -> Mapping[str, Any]:
        return {"w": Variable("w", (1,))}

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        raise NotImplementedError

    def evaluate(self, variables: Any, batch: Any, xp: Any) -> Mapping[str, float]:
        if batch.indices[-1] == 4:
            self.then()
        return {"loss": float((batch.inputs * variables["w"]).mean()), "half": 0.5}


def keep(folder: Path, name: str, weight: float, order: int, **more: Any) -> None:
    """Keep weights as `ModelCheckpoint` does: a file is there whole; `order` says which one is newest."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.tmp"
    write_arrays(path, {"w": np.full(1, weight, np.float32)} | more)
    os.utime(path, ns=(order * 10**9, order * 10**9))
    path.replace(folder / name)


def evaluator(folder: Path, model: Scaled | None = None, **settings: Any) -> ps.SidecarEvaluator:
    return ps.SidecarEvaluator(model or Scaled(), DATA, folder, **({"timeout_s": 0, "batch_size": 2} | settings))


def test_the_newest_file_is_judged_with_means_over_all_examples(tmp_path: Path) -> None:
    keep(tmp_path, "2.safetensors", 3.0, order=2)
    keep(tmp_path, "9.safetensors", 1.0, order=1)
    (tmp_path / "3.safetensors.tmp").write_bytes(b"half a file")
    (tmp_path / "log.csv").write_text("no weights")
    side = evaluator(tmp_path)
    assert side.start() == {"loss": 6.0, "half": 0.5}
    assert (side.evaluations, side.file) == (1, "2.safetensors")


def test_each_file_is_judged_once_also_one_that_replaces_another(tmp_path: Path, capsys: Any) -> None:
    files = iter([("1", 2.0, 2), ("1", 3.0, 3), ("2", 4.0, 4)])

    def next_() -> None:
        for number, weight, order in files:
            keep(tmp_path, f"{number}.safetensors", weight, order)
            return

    keep(tmp_path, "1.safetensors", 1.0, order=1)
    side = evaluator(tmp_path, Scaled(next_), csv_path=tmp_path / "figures" / "side.csv")
    assert side.start() == {"loss": 8.0, "half": 0.5}
    with (tmp_path / "figures" / "side.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["file"], row["loss"]) for row in rows] == [
        ("1.safetensors", "2.0"),
        ("1.safetensors", "4.0"),
        ("1.safetensors", "6.0"),
        ("2.safetensors", "8.0"),
    ]
    assert capsys.readouterr().out.splitlines()[0] == "1.safetensors: loss 2, half 0.5"


def test_it_ends_after_so_many_evaluations_and_goes_on_with_its_file_of_figures(tmp_path: Path) -> None:
    folder, figures = tmp_path / "kept", tmp_path / "side.csv"
    keep(folder, "1.safetensors", 1.0, order=1)
    later = Scaled(lambda: keep(folder, "2.safetensors", 2.0, order=2))
    assert evaluator(folder, later, max_evaluations=1, csv_path=figures).start()["loss"] == 2.0
    assert evaluator(folder, max_evaluations=1, csv_path=figures).start()["loss"] == 4.0
    assert len(figures.read_text().splitlines()) == 3
    figures.write_text("time,file,accuracy\n")
    with pytest.raises(ConfigurationError, match="has the columns time, file, accuracy, and the evaluation time, file"):
        evaluator(folder, csv_path=figures).start()


def test_a_file_that_is_deleted_makes_no_older_one_new(tmp_path: Path) -> None:
    keep(tmp_path, "1.safetensors", 1.0, order=1)
    keep(tmp_path, "2.safetensors", 2.0, order=2)
    side = evaluator(tmp_path, Scaled((tmp_path / "2.safetensors").unlink))
    assert (side.start()["loss"], side.evaluations) == (4.0, 1)


def test_without_a_folder_it_ends_when_its_time_is_up(tmp_path: Path) -> None:
    assert evaluator(tmp_path / "none", timeout_s=0.02, poll_s=0.01).start() == {}


def test_ctrl_c_ends_it_with_the_newest_figures(tmp_path: Path) -> None:
    def press() -> None:
        if side.evaluations:
            raise KeyboardInterrupt
        keep(tmp_path, "2.safetensors", 2.0, order=2)

    keep(tmp_path, "1.safetensors", 1.0, order=1)
    side = evaluator(tmp_path, Scaled(press), timeout_s=60)
    assert side.start() == {"loss": 2.0, "half": 0.5}


def test_prometheus_sees_the_newest_figures(tmp_path: Path) -> None:
    seen: list[str] = []

    def scrape() -> None:
        with urllib.request.urlopen(f"http://{side.address}/metrics", timeout=10) as reply:
            seen.append(reply.read().decode())
        if len(seen) == 1:
            keep(tmp_path, "2.safetensors", 2.0, order=2)

    keep(tmp_path, "1.safetensors", 1.0, order=1)
    side = evaluator(tmp_path, Scaled(scrape), metrics_address="127.0.0.1:0")
    side.start()
    assert "parashard_evaluations_total 0.0" in seen[0]
    assert "parashard_evaluations_total 1.0" in seen[1]
    assert 'parashard_evaluation{metric="loss"} 2.0' in seen[1]
    assert 'parashard_build_info{role="evaluator"' in seen[1]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"w": np.zeros(2, np.float32)}, "variable 'w' is of shape (2,) there and of shape (1,) in the model"),
        ({"b": np.zeros(1, np.float32)}, "variable 'b' is of shape (1,) there and missing in the model"),
    ],
)
def test_a_file_of_another_model_is_refused_by_name(tmp_path: Path, more: Any, says: str) -> None:
    keep(tmp_path, "1.safetensors", 1.0, 1, **more)
    with pytest.raises(BadData) as error:
        evaluator(tmp_path).start()
    assert error.value.message == f"{tmp_path / '1.safetensors'} has no weights of this model: {says}"


def test_a_file_that_is_no_safetensors_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "1.safetensors").write_bytes(b"text")
    with pytest.raises(BadData, match=r"1\.safetensors: cannot be read as safetensors"):
        evaluator(tmp_path).start()


def test_weighted_examples_need_a_loss_that_takes_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the examples have weights, and the model's loss takes none"):
        ps.SidecarEvaluator(Scaled(), (*DATA, np.ones(5)), tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_evaluations": 0}, "max_evaluations must be a number of at least 1, found 0"),
        ({"batch_size": "3"}, "batch_size must be a whole number of at least 1, found '3'"),
        ({"batch_size": None}, "batch_size must be a whole number of at least 1, found None"),
        ({"timeout_s": float("nan")}, "timeout_s must be a number of at least 0, found nan"),
        ({"poll_s": "1"}, "poll_s must be a number of at least 0.01, found '1'"),
        ({"metrics_address": "9400"}, "metrics_address must be HOST:PORT, found '9400'"),
    ],
)
def test_what_it_cannot_do_is_a_sentence(tmp_path: Path, settings: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=f"SidecarEvaluator: {says}"):
        evaluator(tmp_path, **settings)
