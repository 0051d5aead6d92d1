"""First values that are not drawn from the seed: machines that share a store and no folder begin, and come back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import Catalogue
from parashard.checkpoints.verify import damage_in_store
from parashard.client.proto_conversion import plan_message
from parashard.data.base import DataSpec
from parashard.errors import ConfigurationError, NotReady
from parashard.job.load import as_toml, job_from_toml
from parashard.models.declaration import declare, write_declaration
from parashard.plan.variables import values_sha256
from parashard.process.shell import Stop
from parashard.process.starts import CoordinatorStart
from parashard.store import Store, open_store
from parashard_coordinator.__main__ import take_up
from parashard_coordinator.run.resolve import ResolvedJob
from parashard_coordinator.run.store import RunStore
from parashard_server.build import ShardBuilder
from support.small_job import SMALL_JOB

MODEL = """
import numpy as np
from parashard.plan.variables import Variable

class Drawing:
    def initial_variables(self):
        return {"drawn": np.random.default_rng().normal(size=(6, 2)), "zeros": Variable("zeros", (3,))}
    def loss_and_gradients(self, variables, batch, xp): return 0.0, {}
    def evaluate(self, variables, batch, xp): return {}

def build(spec): return Drawing()
"""


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return an empty store, opened by its URL as each process does."""
    return open_store(f"file://{tmp_path}/store" if request.param == "local" else request.getfixturevalue("s3_url"))


@pytest.fixture
def model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "drawing.py").write_text(MODEL)
    yield tmp_path
    sys.modules.pop("drawing", None)


def taken_up(store: Store, folder: Path, run_dir: str, **changed: Any) -> tuple[ResolvedJob, RunStore]:
    """Do what a coordinator does that is started with a run directory of its own."""
    (folder / run_dir).mkdir(exist_ok=True)
    job = job_from_toml(SMALL_JOB.replace('"softmax"', '"drawing:build"'), [("cluster.shards", 2, "test")])
    arguments: dict[str, Any] = {
        "run_id": "run-1",
        "job": folder / "job.toml",
        "model_folder": folder,
        "run_dir": folder / run_dir,
    }
    run_id, resolved, run_store = take_up(CoordinatorStart(**(arguments | changed)), job, open_store(store.url), Stop())
    assert run_id == "run-1"
    return resolved, run_store


def shard_values(store: Store, resolved: ResolvedJob) -> dict[str, np.ndarray]:
    """Return the variables that both shards begin with."""
    reply = pb.GetJobReply(
        run_id="run-1",
        job_digest=resolved.digest,
        job_toml=as_toml(resolved.job),
        plan=plan_message(resolved.plan),
        initial_sha256=resolved.initial_sha256,
        steps_total=resolved.steps.total,
        checkpoint_url=store.url,
    )
    values = {name: np.full(v.shape, np.nan, np.float32) for name, v in resolved.plan.variables.items()}
    for index in range(2):
        storage = ShardBuilder(reply, index, open_store(reply.checkpoint_url)).build(1, None).storage
        for placed in storage.layout:
            rows = values[placed.partition.variable][placed.partition.row_start : placed.partition.row_stop]
            rows[:] = storage.weights[placed.offset : placed.stop].reshape(rows.shape)
    return values


def test_shards_begin_with_what_the_coordinator_stored(store: Store, model_folder: Path) -> None:
    resolved, _ = taken_up(store, model_folder, "first")
    values = shard_values(store, resolved)
    assert values["drawn"].all()
    assert values["zeros"].tolist() == [0.0, 0.0, 0.0]
    assert values_sha256({"drawn": values["drawn"]}) == resolved.initial_sha256
    assert list(damage_in_store(Catalogue(store))) == []
    assert [path.name for path in (model_folder / "first").iterdir()] == ["declaration.json"]  # no values


def test_a_coordinator_in_another_folder_goes_on_with_them(store: Store, model_folder: Path) -> None:  # P2
    first, _ = taken_up(store, model_folder, "first")
    second, run_store = taken_up(store, model_folder, "second")
    assert run_store.incarnation == 2
    assert (second.digest, second.initial_sha256) == (first.digest, first.initial_sha256)
    np.testing.assert_equal(shard_values(store, second), shard_values(store, first))


def test_a_file_of_first_values_counts_at_the_first_start_only(store: Store, model_folder: Path) -> None:
    file, other = model_folder / "file.safetensors", model_folder / "other.safetensors"
    arrays = {"drawn": np.ones((6, 2), np.float32), "zeros": np.full(3, 2.0, np.float32)}
    save_file(arrays, file)
    save_file({name: -array for name, array in arrays.items()}, other)
    taken_up(store, model_folder, "first", init=file)
    second, _ = taken_up(store, model_folder, "second", init=other)
    np.testing.assert_equal(shard_values(store, second), arrays)


def test_of_two_that_begin_at_once_the_first_one_s_values_count(
    store: Store, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # P2
    winners: list[ResolvedJob] = []
    begin_run = RunStore.begin_run

    def overtaken(run_store: RunStore, *arguments: Any) -> None:
        monkeypatch.setattr(RunStore, "begin_run", begin_run)
        winners.append(taken_up(store, model_folder, "winner")[0])
        run_store.begin_run(*arguments)

    monkeypatch.setattr(RunStore, "begin_run", overtaken)
    with pytest.raises(NotReady, match="another coordinator has just begun run run-1"):
        taken_up(store, model_folder, "loser")
    again, _ = taken_up(store, model_folder, "loser")
    assert [winner.digest for winner in winners] == [again.digest]


def test_another_run_s_store_is_refused_before_anything_is_written(store: Store, model_folder: Path) -> None:
    taken_up(store, model_folder, "first")
    with pytest.raises(ConfigurationError, match="has run run-1 already"):
        taken_up(store, model_folder, "second", run_id="run-2")
    assert store.names("claims/coordinator") == ["00000001"]
    assert len(store.folders("initial")) == 1


def test_a_run_of_what_another_process_declares_opens_neither_data_nor_model(store: Store, tmp_path: Path) -> None:
    class Elsewhere:
        def initial_variables(self) -> dict[str, np.ndarray]:
            return {"drawn": np.full((6, 2), 7.0, np.float32)}

    spec = DataSpec(32, 0, (4,), 2, "ab" * 32)
    write_declaration(tmp_path, declare(spec, Elsewhere(), "c" * 64))  # type: ignore[arg-type]
    resolved, _ = taken_up(store, tmp_path, "first", declaration=tmp_path, model_folder=None)  # has no drawing.py
    assert (resolved.spec, resolved.steps.total) == (spec, 8 * resolved.steps.parts)
    np.testing.assert_array_equal(shard_values(store, resolved)["drawn"], 7.0)


def test_a_coordinator_that_its_launcher_starts_again_opens_neither(store: Store, model_folder: Path) -> None:
    first, _ = taken_up(store, model_folder, "first")
    (model_folder / "drawing.py").unlink()
    again, _ = taken_up(store, model_folder, "first", model_folder=None, again=True)
    assert (again.spec, again.digest, again.warnings) == (first.spec, first.digest, first.warnings)
    np.testing.assert_equal(shard_values(store, again), shard_values(store, first))


@pytest.mark.parametrize("how", [{"resume": True, "run_id": ""}, {}], ids=["resumed", "as in a container"])
def test_another_start_opens_them_and_refuses_others(store: Store, model_folder: Path, how: dict[str, Any]) -> None:
    taken_up(store, model_folder, "first")
    sys.modules.pop("drawing", None)
    (model_folder / "drawing.py").write_text(MODEL.replace("(6, 2)", "(6, 3)"))
    with pytest.raises(ConfigurationError, match="the code of the model differs"):
        taken_up(store, model_folder, "first", **how)


def test_a_damaged_declaration_is_made_anew(store: Store, model_folder: Path) -> None:
    first, _ = taken_up(store, model_folder, "first")
    (model_folder / "first" / "declaration.json").write_text("{")
    again, _ = taken_up(store, model_folder, "first", again=True)
    assert again.digest == first.digest
