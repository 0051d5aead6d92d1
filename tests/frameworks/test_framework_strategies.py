"""Strategies with frameworks: the bits of a cluster, state and dropout among them; JAX's devices as replicas."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.command_run import ROOT
from support.mnist_files import written_as_mnist
from support.script_run import ScriptRun

pytest.importorskip("jax", reason="NO TEST OF ps.TPUStrategy: JAX is not installed; `make test-frameworks` has it")
pytest.importorskip("torch", reason="NO TEST OF strategies with PyTorch; `make test-frameworks` has it")

pytestmark = pytest.mark.xdist_group("framework strategies")
SaidBy = Callable[[str, str], list[object]]

SCRIPT = """
import json, sys
import numpy as np
import parashard as ps

x = np.random.default_rng(0).normal(size=(130, 12)).astype(np.float32)
y = (x[:, 0] > 0) + 2 * (x[:, 1] > 0)

def jax_model():
    import jax, jax.numpy as jnp
    def init(key):
        first, second = jax.random.split(key)
        w, v = jax.random.normal(first, (12, 16)), jax.random.normal(second, (16, 4))
        return {"w": w, "v": v, "scale": jnp.float32(1)}
    def apply(p, inputs):
        return jax.nn.relu(inputs @ p["w"]) @ p["v"] * p["scale"]
    def loss(p, inputs, targets, key):
        kept = inputs if key is None else inputs * jax.random.bernoulli(key, 0.8, inputs.shape)
        return -jax.nn.log_softmax(apply(p, kept))[jnp.arange(len(targets)), targets].mean()
    return ps.jax.Model(init, loss, apply=apply, metrics=["accuracy"])

def torch_model():
    import torch
    from torch import nn
    net = lambda: nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4))
    return ps.torch.Model(net, loss=nn.functional.cross_entropy, metrics=["accuracy"])

made = {
    "one": lambda: ps.OneDeviceStrategy(threads=1),
    "sync:1": lambda: ps.ParameterServerStrategy(1, 1, "sync:1"),
    "mirrored": lambda: ps.MirroredStrategy(4, threads=1),
    "central": lambda: ps.CentralStorageStrategy(4, threads=1),
    "multi-worker": lambda: ps.MultiWorkerMirroredStrategy(4),
    "sync:4": lambda: ps.ParameterServerStrategy(2, 2, "sync:4"),
    "threads": lambda: ps.ParameterServerStrategy(2, 3, "sync:4", workers_as="threads"),
    "tpu": lambda: ps.TPUStrategy(devices=4),
    "tpu late": lambda: (__import__("jax").devices(), ps.TPUStrategy(devices=4)),
}[sys.argv[2]]
strategy = made()
trainer = ps.Trainer({"jax": jax_model, "torch": torch_model}[sys.argv[1]](), ps.Adam(0.01), strategy)
history = trainer.fit((x, y), epochs=4, batch_size=8, validation_split=0.2, verbose=0)
weights = {name: value.tolist() for name, value in trainer._present.weights().items()}
print(json.dumps([history.report["weights_sha256"], history.report["evaluations"], weights]))
"""
WITH_JAX = pytest.mark.full("PyTorch has the same bits; the strategies know no framework")
ONE_THREAD = {"NPROC": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def run(folder: Path, *words: str, script: str = SCRIPT) -> ScriptRun:
    folder.mkdir(exist_ok=True)
    started = ScriptRun(folder, script, *words)
    try:
        started.wait()
    finally:
        started.process.kill()
    return started


@pytest.fixture(scope="module")
def said_by(tmp_path_factory: pytest.TempPathFactory) -> SaidBy:
    """Return a function that runs the script with a framework and a strategy, each pair once."""

    @functools.cache
    def once(framework: str, strategy: str) -> list[object]:
        done = run(tmp_path_factory.mktemp("script"), framework, strategy)
        assert done.process.returncode == 0, done.complaint()
        found: list[object] = json.loads(done.output().splitlines()[-1])
        return found

    return once


@pytest.mark.parametrize(
    ("framework", "here", "there"),
    [
        pytest.param("jax", "one", "sync:1", marks=WITH_JAX),
        ("torch", "mirrored", "sync:4"),
        pytest.param("jax", "mirrored", "threads", marks=WITH_JAX),
        ("torch", "mirrored", "threads"),
    ],
)
def test_one_process_has_the_bits_of_a_cluster(said_by: SaidBy, framework: str, here: str, there: str) -> None:
    assert said_by(framework, here) == said_by(framework, there)


def test_the_example_has_one_digest_for_what_is_the_same_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user runs it, who sets no number of threads."""
    for name in ("NPROC", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name)
    data, digests = str(written_as_mnist(tmp_path, side=28)), set()
    for name in ("mirrored", "multi_worker_mirrored"):
        script = (ROOT / "examples/strategies.py").read_text()
        done = run(tmp_path / name, "--strategy", name, "--data", data, "--epochs", "1", "--json", script=script)
        assert done.process.returncode == 0, done.complaint()
        found = json.loads(done.output().splitlines()[-1])
        assert found["strategy"] == name
        digests.add(found["weights_sha256"])
    assert len(digests) == 1


def test_devices_of_jax_add_up_what_replicas_do(said_by: SaidBy) -> None:
    _, judged, weights = said_by("jax", "tpu")
    _, due, alone = said_by("jax", "mirrored")
    assert [one["steps"] for one in judged] == [one["steps"] for one in due]  # type: ignore[attr-defined]
    for name, values in alone.items():  # type: ignore[attr-defined]
        assert weights[name] == [pytest.approx(row, rel=1e-3, abs=1e-5) for row in values]  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("torch", "tpu"),
            "ps.TPUStrategy spreads arrays over JAX's devices: it trains a ps.jax.Model, found ps.torch.Model",
        ),
        (("jax", "tpu late"), "ps.TPUStrategy(devices=4): JAX has 1 (cpu), and its backend has started"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_a_sentence(tmp_path: Path, words: tuple[str, str], sentence: str) -> None:
    done = run(tmp_path, *words)
    assert done.process.returncode == 1
    assert sentence in done.complaint().splitlines()[-1]
