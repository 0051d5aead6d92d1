"""Scripts on a real GPU: memory of processes that do not train, faults, precisions, and the bits of rounds.

Each is a script in a process of its own, since a process whose context is lost has no other.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from parashard.launch.fork_server import opens_gpu
from parashard.launch.forks import Forks, Request, script_modules
from parashard.process.cuda_memory import DeviceMemory, memory_in_words
from support.script_run import ScriptRun

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpu"), pytest.mark.timeout(120)]

Start = Callable[..., ScriptRun]

JAX_TAKES = """
import json
import parashard
import jax, jax.numpy as jnp
assert jax.devices()[0].platform == "gpu", jax.devices()
jax.jit(lambda x: (x @ x).sum())(jnp.ones((64, 64))).block_until_ready()
import cupy
free, total = cupy.cuda.Device(0).mem_info
print(json.dumps({"used": total - free, "total": total}))
"""
TORCH = """
import json, sys
from pathlib import Path
import torch
from torch import nn
import parashard as ps

torch.zeros(1, device="cuda")  # CUDA is initialised before processes are started
kind, workers = sys.argv[1], int(sys.argv[2])

class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, 8), nn.Linear(8, 2)
    def forward(self, ids):
        if ids.is_cuda and kind == "memory":
            torch.empty(2**43, dtype=torch.uint8, device=ids.device)
        if ids.is_cuda and (kind == "assert" or (kind == "assert once" and not Path("seen").exists())):
            Path("seen").touch()
            ids = ids + 1000
        return self.linear(self.embedding(ids).mean(1))

class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),  # no pooling: its gradient may use atomics
            nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 7 * 7, 4),
        )
    def forward(self, x):
        return self.net(x)

torch.manual_seed(0)
if kind == "rounds":
    x, y, net = torch.randn(256, 3, 16, 16), torch.randint(0, 4, (256,)), Convolved
    policy, sizes = "sync:2", {"epochs": 3, "batch_size": 32}
else:
    x, net, policy, sizes = torch.randint(0, 10, (64, 4)), Embedded, "async", {"epochs": 1, "batch_size": 64}
    y = x[:, 0] % 2
strategy = ps.ParameterServerStrategy(1, workers, policy, device="cuda:0")
trainer = ps.Trainer(
    ps.torch.Model(net, nn.functional.cross_entropy), ps.Adam(1e-2), strategy, settings={"job.max_attempts": 2}
)
try:
    trainer.fit((x, y), verbose=0, **sizes)
except ps.JobFailed as error:
    print(json.dumps({"failed": str(error)}))
else:
    report = json.loads((sorted(Path("runs").glob("*"))[-1] / "report.json").read_text())
    print(json.dumps({"digest": report["weights_sha256"], "restarts": report["worker_restarts"]}))
"""
ONE_DEVICE = """
import json, sys
import torch
from torch import nn
import parashard as ps

kind = sys.argv[1]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 2)
    def forward(self, x):
        x = x.to(memory_format=torch.channels_last) if kind == "channels last" else x
        return self.linear(torch.relu(self.conv(x)).mean((2, 3)))

torch.manual_seed(0)
net = torch.compile(Net()) if kind == "compile" else Net()
x = torch.randn(256, 3, 8, 8)
y = (x.mean((1, 2, 3)) > 0).long()
model = ps.torch.Model(net, nn.functional.cross_entropy, autocast=kind if kind in ("bfloat16", "float16") else None)
trainer = ps.Trainer(model, ps.Adam(3e-2), ps.OneDeviceStrategy("cuda:0"))
losses = trainer.fit((x, y), epochs=12, batch_size=32, verbose=0).history["loss"]
print(json.dumps([losses[0], losses[-1]]))
"""


@pytest.fixture(autouse=True)
def on_a_gpu(xp_gpu: Any) -> None:
    """Skip where there is no GPU."""


def needs(framework: str) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"NO TEST of {framework} on a GPU: it is not installed")


def told(run: ScriptRun) -> Any:
    assert run.wait() == 0, run.complaint()
    return json.loads(run.output().splitlines()[-1])


def test_jax_preallocates_nothing_in_a_process_that_does_not_train(xp_gpu: Any) -> None:
    needs("jax")
    free, total = xp_gpu.cuda.Device(0).mem_info
    environ = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    run = subprocess.run([sys.executable, "-c", JAX_TAKES], env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["used"] - (total - free) < 0.1 * total, "JAX takes 75 % by itself"


def test_an_assert_on_the_gpu_ends_its_worker_and_the_job_goes_on(start: Start) -> None:
    needs("torch")
    found = told(run := start(TORCH, "assert once", "1"))
    assert found.get("restarts") == 1, (found, run.complaint())


def test_one_in_each_attempt_fails_the_job_with_the_step_and_what_to_do(start: Start) -> None:
    needs("torch")
    said = told(start(TORCH, "assert", "1"))["failed"]
    for part in ("the GPU's context is lost", "device-side assert", "CUDA_LAUNCH_BLOCKING=1", "step 0", "(examples "):
        assert part in said, said


def test_running_out_of_memory_names_a_batch_size(start: Start) -> None:
    needs("torch")
    said = told(start(TORCH, "memory", "1"))["failed"]
    for part in ("the GPU is out of memory", "GiB", "try batch_size 32, not 64", "step 0"):
        assert part in said, said


def test_rounds_of_a_convolutional_network_have_the_same_bits_with_one_worker_and_two(start: Start) -> None:
    needs("torch")
    assert told(start(TORCH, "rounds", "1"))["digest"] == told(start(TORCH, "rounds", "2"))["digest"]


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "channels last", "compile"])
def test_a_network_learns(start: Start, kind: str) -> None:
    needs("torch")
    first, last = told(start(ONE_DEVICE, kind))
    assert last < 0.9 * first


def test_a_fork_server_opens_no_gpu(tmp_path: Path) -> None:
    frameworks = {name: importlib.import_module(name) for name in ("torch", "jax") if find_spec(name)}
    lifeline, held = os.pipe()
    forks = Forks(lifeline, {})
    (tmp_path / "waits.py").write_text("import os, sys\nwhile os.read(int(sys.argv[-1]), 1): pass\n")
    command = [sys.executable, str(tmp_path / "waits.py"), str(lifeline)]
    try:
        with (tmp_path / "log").open("wb") as log:
            child = forks.start(
                Request(command, str(tmp_path), {**os.environ}, script_modules(frameworks)), log.fileno()
            )
        assert not opens_gpu(forks.server_pid)
        child.kill()
        child.wait()
    finally:
        forks.close()
        os.close(lifeline)
        os.close(held)


def test_the_memory_of_the_gpu_is_told() -> None:
    memory = DeviceMemory(0).read()
    assert memory is not None
    assert 0 < memory[0] <= memory[1]
    assert " GiB are free" in memory_in_words("cuda:0 any")
