"""Strategies: the same steps under each have the same weights, bit for bit, with and without processes (P13)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.script_run import ScriptRun

SCRIPT = """
import json, sys
import numpy as np
import parashard as ps

SIZE = 40

class Net:
    def initial_variables(self):
        return {"w": np.ones((SIZE, 3), np.float32), "v": np.full((3, 1), 0.5, np.float32)}

    def loss_and_gradients(self, variables, batch, xp):
        noise = np.random.default_rng(batch.step).normal(size=(len(batch.targets), 3)).astype(np.float32)
        hidden = batch.inputs @ variables["w"] + noise
        error = (hidden @ variables["v"])[:, 0] - batch.targets
        slope = (2 / len(error) * error)[:, None].astype(np.float32)
        return float(np.mean(error ** 2)), {"w": batch.inputs.T @ (slope @ variables["v"].T), "v": hidden.T @ slope}

    def evaluate(self, variables, batch, xp):
        error = (batch.inputs @ variables["w"] @ variables["v"])[:, 0] - batch.targets
        return {"loss": float(np.mean(error ** 2))}

strategy = {
    "one_device": lambda: ps.OneDeviceStrategy(threads=1),
    "mirrored": lambda: ps.MirroredStrategy(devices=4, threads=1),
    "central_storage": lambda: ps.CentralStorageStrategy(devices=4, threads=1),
    "multi_worker_mirrored": lambda: ps.MultiWorkerMirroredStrategy(workers=4),
    "sync:1": lambda: ps.ParameterServerStrategy(1, 1, "sync:1"),
    "sync:4": lambda: ps.ParameterServerStrategy(2, 3, "sync:4", partitioner={"kind": "fixed-shards"}),
    "threads": lambda: ps.ParameterServerStrategy(2, 3, "sync:4", workers_as="threads"),
    "layers in processes": lambda: ps.ParameterServerStrategy(2, 2, "sync:2", workers_as="processes"),
    "layers in fresh processes": lambda: ps.ParameterServerStrategy(2, 2, "sync:2", workers_as="processes"),
    "layers in threads": lambda: ps.ParameterServerStrategy(2, 2, "sync:2", workers_as="threads"),
}[sys.argv[1]]()
rng = np.random.default_rng(1)
x, y = rng.normal(size=(150, SIZE)), rng.normal(size=150)
settings = {"variables.w": {"encoding": "bfloat16", "learning_rate_factor": 0.5}, "variables.v": {"decay": False}}
optimizer = ps.AdamW(0.02, weight_decay=0.1, clip_norm=0.7, schedule={"kind": "cosine", "warmup_steps": 3})
model = Net()
if "layers" in sys.argv[1]:
    layers = [ps.layers.Dense(8), ps.layers.ReLU(), ps.layers.Dropout(0.3), ps.layers.Dense(1)]
    model, settings = ps.Sequential(layers, input_shape=(SIZE,), loss="mean_squared_error"), {}
with strategy.scope():
    trainer = ps.Trainer(model, optimizer, strategy, settings=settings)
history = trainer.fit((x, y), epochs=3, batch_size=7, validation_split=0.2, verbose=0)
print(json.dumps([history.report["weights_sha256"], history.report["evaluations"], history.report["steps_applied"][0]]))
"""


def said_by(folder: Path, strategy: str) -> list[object]:
    folder.mkdir()
    fresh = ("-u",) if "fresh" in strategy else ()  # no process of a Python with flags is forked
    run = ScriptRun(folder, SCRIPT, strategy, flags=fresh)
    try:
        assert run.wait() == 0, run.complaint()
        assert run.processes() == {}
        found: list[object] = json.loads(run.output().splitlines()[-1])
        return found
    finally:
        run.clean_up()


@pytest.mark.parametrize(
    ("strategies", "steps"),
    [
        (("one_device", "sync:1"), 54),
        (("mirrored", "sync:4"), 54),
        pytest.param(
            ("mirrored", "central_storage", "multi_worker_mirrored", "threads"),
            54,
            marks=pytest.mark.full(
                "test_in_process_training.py compares the first two; the job of the third is sync:4 "
                "(test_strategies.py); test_forks.py compares a forked worker's bits with a fresh process's"
            ),
        ),
        pytest.param(
            ("layers in processes", "layers in fresh processes", "layers in threads"),
            54,
            marks=pytest.mark.full(
                "test_forks.py compares a forked worker's bits, the case before it threads and processes"
            ),
        ),
    ],
)
def test_same_steps_same_bits(tmp_path: Path, strategies: tuple[str, ...], steps: int) -> None:
    found = {strategy: said_by(tmp_path / strategy.replace(":", ""), strategy) for strategy in strategies}
    expected = found[strategies[0]]
    assert found == dict.fromkeys(strategies, expected)
    assert expected[2] == steps
