"""Worker threads with frameworks: each has a module, dropout has its bits, and the process's generators are kept."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.script_run import ScriptRun

pytestmark = pytest.mark.timeout(300)

TORCH = """
import json, threading
from concurrent.futures import ThreadPoolExecutor
import numpy as np, torch
import parashard as ps
from torch import nn

users, threads = {}, set()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))
    def forward(self, x):
        if self.training:
            users.setdefault(id(self), set()).add(threading.current_thread().name)
            threads.add(torch.get_num_threads())
        return self.net(x)

x = np.random.default_rng(0).normal(size=(128, 12)).astype(np.float32)
y = (x[:, 0] > 0) + 2 * (x[:, 1] > 0)
torch.set_num_threads(2)

def fitted(net, **sizes):
    users.clear()
    threads.clear()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    strategy = ps.ParameterServerStrategy(1, 2, "sync:2", workers_as="threads")
    trainer = ps.Trainer(ps.torch.Model(net, nn.functional.cross_entropy), ps.Adam(0.01), strategy)
    trainer.fit((x, y), epochs=10, verbose=0, **sizes)
    kept = bool((torch.get_rng_state() == before).all())
    with ThreadPoolExecutor(1) as new:
        after = new.submit(torch.get_num_threads).result()
    return [sorted(map(sorted, users.values())), kept, sorted(threads), after]

net = Net()
print(json.dumps({
    "a class": fitted(Net, batch_size=8),
    "an instance": fitted(Net(), batch_size=8),
    "a factory of one": fitted(lambda: net, batch_size=8),
    "pieces": fitted(Net, batch_size=4, gradient_accumulation=2),
}))
"""
KERAS = """
import json
import keras, numpy as np
import parashard as ps

def net():
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((12,)), layers.Dense(16), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(4),
    ])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"])
    return model

x = np.random.default_rng(0).normal(size=(130, 12)).astype(np.float32)
y = (x[:, 0] > 0) + 2 * (x[:, 1] > 0)

def report_of(strategy):
    trainer = ps.Trainer(ps.keras.Model(net), ps.Adam(0.01), strategy)
    report = trainer.fit((x, y), epochs=4, batch_size=8, validation_split=0.2, verbose=0).report
    return [report["weights_sha256"], report["evaluations"]]

threads = ps.ParameterServerStrategy(2, 2, "sync:2", workers_as="threads")
print(json.dumps([report_of(ps.MirroredStrategy(2, threads=1)), report_of(threads)]))
"""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NPROC": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}.items():
        monkeypatch.setenv(name, value)


def needs(*names: str) -> None:
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"NO TEST OF worker threads with {name}: it is not installed; `make test-frameworks` has it")


def said_by(folder: Path, text: str) -> Any:
    run = ScriptRun(folder, text)
    try:
        assert run.wait() == 0, run.complaint()
        return json.loads(run.output().splitlines()[-1])
    finally:
        run.clean_up()


def test_each_thread_has_a_module_and_generators_and_threads_are_as_they_were(tmp_path: Path) -> None:
    needs("torch")
    for given, (users, kept, threads, after) in said_by(tmp_path, TORCH).items():
        assert users in (
            [["parashard-worker-0"], ["parashard-worker-1"]],
            [["parashard-worker-0"]],
            [["parashard-worker-1"]],
        ), given
        assert (kept, threads, after) == (True, [1], 2), given


@pytest.mark.parametrize(
    "backend",
    ["jax", pytest.param("torch", marks=pytest.mark.full("test_framework_strategies.py has PyTorch's threads"))],
)
def test_a_keras_model_has_the_bits_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    needs("keras", backend)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    here, there = said_by(tmp_path, KERAS)
    assert here == there
