"""Worker threads with frameworks: each has a module, dropout has its bits, and the process's generators are kept."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

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
GIVEN
torch.set_num_threads(2)
torch.manual_seed(5)
before = torch.get_rng_state()
strategy = ps.ParameterServerStrategy(1, 2, "sync:2", workers_as="threads")
history = ps.Trainer(model, ps.Adam(0.01), strategy).fit((x, y), epochs=10, batch_size=8, verbose=0)
kept = bool((torch.get_rng_state() == before).all())
with ThreadPoolExecutor(1) as new:
    after = new.submit(torch.get_num_threads).result()
print(json.dumps([sorted(map(sorted, users.values())), kept, sorted(threads), after]))
"""
GIVEN = {
    "a class": "model = ps.torch.Model(Net, nn.functional.cross_entropy)",
    "an instance": "model = ps.torch.Model(Net(), nn.functional.cross_entropy)",
    "a factory of one": "net = Net()\nmodel = ps.torch.Model(lambda: net, nn.functional.cross_entropy)",
    "pieces": "model = ps.torch.Model(Net, nn.functional.cross_entropy)",
}
KERAS = """
import json, sys
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
strategy = {
    "mirrored": lambda: ps.MirroredStrategy(2, threads=1),
    "threads": lambda: ps.ParameterServerStrategy(2, 2, "sync:2", workers_as="threads"),
}[sys.argv[1]]()
history = ps.Trainer(ps.keras.Model(net), ps.Adam(0.01), strategy).fit(
    (x, y), epochs=4, batch_size=8, validation_split=0.2, verbose=0
)
print(json.dumps([history.report["weights_sha256"], history.report["evaluations"]]))
"""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NPROC": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}.items():
        monkeypatch.setenv(name, value)


def needs(*names: str) -> None:
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"NO TEST OF worker threads with {name}: it is not installed; `make test-frameworks` has it")


def said_by(folder: Path, text: str, *words: str) -> list[object]:
    folder.mkdir(exist_ok=True)
    run = ScriptRun(folder, text, *words)
    try:
        assert run.wait() == 0, run.complaint()
        found: list[object] = json.loads(run.output().splitlines()[-1])
        return found
    finally:
        run.clean_up()


@pytest.mark.parametrize("given", GIVEN)
def test_each_thread_has_a_module_and_generators_and_threads_are_as_they_were(tmp_path: Path, given: str) -> None:
    needs("torch")
    text = TORCH.replace("GIVEN", GIVEN[given])
    if given == "pieces":
        text = text.replace("batch_size=8", "batch_size=4, gradient_accumulation=2")
    users, kept, threads, after = said_by(tmp_path, text)
    assert users in (
        [["parashard-worker-0"], ["parashard-worker-1"]],
        [["parashard-worker-0"]],
        [["parashard-worker-1"]],
    )
    assert (kept, threads, after) == (True, [1], 2)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_keras_model_has_the_bits_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    needs("keras", backend)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    assert said_by(tmp_path / "here", KERAS, "mirrored") == said_by(tmp_path / "there", KERAS, "threads")
