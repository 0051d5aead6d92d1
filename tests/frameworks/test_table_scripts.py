"""Rows of tables in scripts on real clusters: the same bits for any number of workers and shards, and after kills."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster_run import eventually
from support.script_run import ScriptRun

pytestmark = [pytest.mark.xdist_group("table scripts"), pytest.mark.timeout(300)]
pytest.importorskip(
    "torch", reason="NO TEST OF tables in scripts: PyTorch is not installed; `make test-frameworks` has it"
)

SCRIPT = """
import json, sys, time
from pathlib import Path
import numpy as np
import parashard as ps

slow, calls = Path("slow"), []
rng = np.random.default_rng(0)
users, items = rng.integers(0, 50, 400), rng.integers(-10**15, 10**15, 30)[rng.integers(0, 30, (400, 3))]
y = (rng.normal(size=50)[users] > 0).astype(np.float32)
x = {"user": users, "items": items}
keys = lambda inputs: {"users": inputs["user"], "items": inputs["items"]}
tables = ps.Table("users", 8, scale=0.1), ps.Table("items", 4, optimizer=ps.Momentum(0.1), scale=0.1)
auc = ps.metrics.AUC(from_logits=True)

def torch_model():
    import torch
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.items = ps.torch.Embedding(tables[0]), ps.torch.EmbeddingBag(tables[1])
            self.drop, self.out = torch.nn.Dropout(0.2), torch.nn.Linear(12, 1)
        def forward(self, user, items):
            calls.append(1)
            while slow.exists() and len(calls) > 10:
                time.sleep(0.05)
            return self.out(self.drop(torch.cat([self.user(user), self.items(items)], 1)))[:, 0]
    return ps.torch.Model(Net, torch.nn.functional.binary_cross_entropy_with_logits, metrics=[auc], keys=keys)

def jax_model():
    import jax, jax.numpy as jnp
    def apply(p, inputs, rows):
        return jnp.concatenate([rows["users"], rows["items"].mean(1)], 1) @ p["w"] + p["b"]
    def loss(p, inputs, targets, key, rows):
        z = apply(p, inputs, rows)
        return (jnp.maximum(z, 0) - z * targets + jnp.log1p(jnp.exp(-jnp.abs(z)))).mean()
    init = lambda key: {"w": 0.1 * jax.random.normal(key, (12,)), "b": jnp.zeros(())}
    return ps.jax.Model(init, loss, apply=apply, metrics=[auc], tables=tables, keys=keys)

strategy = {
    "async": lambda: ps.ParameterServerStrategy(1, 2),
    "one worker": lambda: ps.ParameterServerStrategy(1, 1, "sync:2"),
    "two workers": lambda: ps.ParameterServerStrategy(2, 2, "sync:2"),
    "threads": lambda: ps.ParameterServerStrategy(1, 2, "sync:2", workers_as="threads"),
    "multi-worker": lambda: ps.MultiWorkerMirroredStrategy(2),
    "mirrored": lambda: ps.MirroredStrategy(2, threads=1),
    "tpu": lambda: ps.TPUStrategy(2),
}[sys.argv[2]]()
model = {"jax": jax_model, "torch": torch_model}[sys.argv[1]]()
trainer = ps.Trainer(model, ps.Adam(0.01), strategy, settings={"checkpoint.every_s": 0.2})
fit = lambda **more: trainer.fit((x, y), epochs=4, batch_size=16, validation_split=0.2, verbose=0, **more)
"""
SAY = """
first, history = fit(), fit()
report = history.report
held = {name: array[-80:] for name, array in x.items()}
judged, outputs = trainer.evaluate((x, y)), trainer.predict(x)
print(json.dumps({
    "digests": [report["weights_sha256"], report["rows_digest"]],
    "first": first.history["val_loss"][-1],
    "rows": report["rows"], "val": {name: values[-1] for name, values in history.history.items()},
    "judged": judged, "outputs": outputs.tolist(),
    "tables": {table.name: [part.tolist() for part in trainer.table(table.name)] for table in tables},
    "own": trainer.model()(*map(__import__("torch").from_numpy, x.values())).tolist() if sys.argv[1] == "torch" else 0,
}))
"""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"NPROC": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}.items():
            patched.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def torch_with_one_worker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what the script says of PyTorch's model when one worker has trained it."""
    return said_by(tmp_path_factory.mktemp("one") / "run", "torch", "one worker")


def ended(folder: Path, *words: str, then: str = SAY) -> ScriptRun:
    folder.mkdir(exist_ok=True)
    started = ScriptRun(folder, SCRIPT + then, *words)
    try:
        started.wait()
    finally:
        started.process.kill()
    return started


def said_by(folder: Path, *words: str) -> Any:
    done = ended(folder, *words)
    assert done.process.returncode == 0, done.complaint()
    return json.loads(done.output().splitlines()[-1])


def test_a_cluster_trains_judges_and_gives_back_rows(tmp_path: Path) -> None:
    said = said_by(tmp_path / "run", "torch", "async")
    assert said["rows"] == {"items": 30, "users": 50}
    assert {name: [len(part) for part in parts] for name, parts in said["tables"].items()} == {
        "items": [30, 30],
        "users": [50, 50],
    }
    assert said["val"]["val_auc"] > 0.9
    assert said["judged"]["auc"] > 0.9
    assert said["own"] == pytest.approx(said["outputs"], abs=1e-5)


ANOTHER_WAY = pytest.mark.full("PyTorch's two workers have the same bits; test_tables_in_process.py has one process")
OTHER_WAYS = ("threads", "multi-worker", "mirrored")


@pytest.mark.parametrize("other", ["two workers", *(pytest.param(name, marks=ANOTHER_WAY) for name in OTHER_WAYS)])
def test_two_fits_have_the_same_bits_for_any_number_of_workers_and_shards(
    tmp_path: Path, torch_with_one_worker: Any, other: str
) -> None:
    assert torch_with_one_worker["val"]["val_loss"] < torch_with_one_worker["first"], "it goes on from the rows"
    assert said_by(tmp_path / "run", "torch", other) == torch_with_one_worker


@ANOTHER_WAY
def test_so_they_have_with_jax(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="NO TEST OF ps.jax with tables: JAX is not installed")
    due = said_by(tmp_path / "one", "jax", "one worker")
    for other in ("two workers", "mirrored"):
        assert said_by(tmp_path / other, "jax", other) == due, other


def test_a_killed_worker_and_shard_change_no_bit_of_rows(tmp_path: Path, torch_with_one_worker: Any) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/slow").touch()
    run = ScriptRun(tmp_path / "killed", SCRIPT + SAY, "torch", "two workers")
    try:
        eventually(lambda: run.steps_complete() >= 4, "steps are complete", told=run.complaint)
        for name in ("worker-0", "shard-1"):
            before = run.processes()[name]
            run.kill(name)
            eventually(lambda name=name, before=before: run.processes().get(name, before) != before, f"{name} is back")
        (tmp_path / "killed/slow").unlink()
        assert run.wait() == 0, run.complaint()
    finally:
        run.clean_up()
    found = json.loads((tmp_path / "killed/out").read_text().splitlines()[-1])
    assert found == torch_with_one_worker


@pytest.mark.parametrize(
    ("words", "then", "sentence"),
    [
        (("jax", "tpu"), "fit()", "ps.TPUStrategy does not look up rows of tables (items, users)"),
        (
            ("torch", "async"),
            "fit(callbacks=[ps.callbacks.ModelCheckpoint('best.safetensors')])",
            "ModelCheckpoint keeps the weights of an evaluation, and rows of tables (items, users) are not kept",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_there_is_a_run(
    tmp_path: Path, words: tuple[str, ...], then: str, sentence: str
) -> None:
    if words[0] == "jax":
        pytest.importorskip("jax", reason="NO TEST OF ps.jax with tables: JAX is not installed")
    done = ended(tmp_path / "run", *words, then=then)
    assert done.process.returncode != 0
    assert sentence in done.complaint()
    assert not done.runs()


NET = """
import torch
import parashard as ps

def build(spec, tables):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.town = torch.nn.Parameter(torch.zeros(2)), ps.torch.EmbeddingBag(tables["town"], "sum")
        def forward(self, numbers, keys):
            return self.town(keys) + self.bias
    return ps.torch.Model(Net, torch.nn.functional.cross_entropy, keys=lambda inputs: {"town": inputs["keys"]})
"""
JOB = """
[job]
name = "towns"
epochs = 30
batch_size = 8
[data]
source = "csv"
path = "towns.csv"
label = "rains"
key_columns = ["town"]
[model]
kind = "net:build"
[tables.town]
dimension = 2
optimizer = { kind = "adagrad", learning_rate = 0.5 }
[optimizer]
kind = "sgd"
learning_rate = 0.1
[cluster]
shards = 1
workers = 1
"""


def test_a_pytorch_model_of_a_job_file_looks_up_the_jobs_tables_and_predicts(tmp_path: Path) -> None:
    rows = [("Bergen", 1, "yes"), ("Aswan", 2, "no"), ("Lloro", 3, "yes"), ("Arica", 4, "no")] * 10
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "towns.csv").write_text("town,day,rains\n" + "".join(f"{t},{d},{r}\n" for t, d, r in rows))
    (tmp_path / "asked.csv").write_text("town,day\nArica,9\nLloro,9\n")
    run = ScriptRun(
        tmp_path,
        """
import subprocess, sys
from pathlib import Path
for words in (lambda: ["run", "job.toml"]), (lambda: ["predict", str(*Path("runs").iterdir()), "asked.csv"]):
    subprocess.run([sys.executable, "-m", "parashard", *words()], check=True)
""",
    )
    try:
        assert run.wait() == 0, run.complaint()
    finally:
        run.clean_up()
    assert [line.split(",")[0] for line in (tmp_path / "out").read_text().splitlines()[-2:]] == ["no", "yes"]
