"""What else of Ray, and which frameworks, work with parashard: PyTorch scripts, Ray Data, Ray Train and Tune."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import RayNodes

from support.script_run import ScriptRun
from support.torch_ledger import EXAMPLES, STEPS_AN_EPOCH, TORCH_LEDGER

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]
EPOCHS = 3


def ended_well(script: ScriptRun) -> Any:
    """Return what a script printed last, once it has ended well."""
    assert script.wait() == 0, script.complaint()
    return json.loads(script.output().splitlines()[-1])


def test_a_pytorch_script_has_the_bits_that_it_has_on_this_machine(nodes: RayNodes, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="NO TEST OF PYTORCH ON RAY: torch is not installed")
    found = []
    for name, where in (("here", []), ("ray", [nodes.address])):
        (tmp_path / name).mkdir()
        script = ScriptRun(tmp_path / name, TORCH_LEDGER, str(EPOCHS), "sync:2", "2", *where)
        try:
            found.append(ended_well(script))
        finally:
            script.clean_up()
    here, there = found
    assert (there["counts"], there["steps"], there["examples"]) == (
        [EPOCHS] * 2,
        EPOCHS * STEPS_AN_EPOCH,
        EPOCHS * EXAMPLES,
    )
    assert there == here


def test_what_ray_data_writes_as_parquet_is_trained_on(
    nodes: RayNodes, start: Callable[..., ScriptRun], tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow", reason="NO TEST OF RAY DATA: pyarrow is not installed")
    script = start(FROM_RAY_DATA, nodes.address, str(tmp_path / "rows"))
    assert ended_well(script) == {"files": 3, "least": EPOCHS, "greatest": EPOCHS}


@pytest.mark.parametrize("library", ["tasks", "train", "tune"])
def test_a_worker_of_rays_libraries_is_one_of_a_job(
    nodes: RayNodes, start: Callable[..., ScriptRun], tmp_path: Path, library: str
) -> None:
    needed = {"train": "ray.train.torch", "tune": "ray.tune"}.get(library, "ray")
    pytest.importorskip(needed, reason=f"NO TEST OF RAY {library.upper()}: it lacks a package")
    found = ended_well(start(WITHIN_RAY, nodes.address, library, str(tmp_path / "results")))
    assert (found["least"], found["greatest"]) == (EPOCHS, EPOCHS)
    assert len(found["sessions"]) == 2, "both are workers of the job"
    refused = f"the program is connected to Ray at {nodes.address}, found the address '127.0.0.9:1'"
    assert found["refused"] == f"{refused}; allowed: {nodes.address}, or none"


FROM_RAY_DATA = f"""
import json, sys
from pathlib import Path
import numpy as np
import parashard as ps

if not ps.is_worker():
    import ray
    ray.init(sys.argv[1], log_to_driver=False)
    numbers = ray.data.range(60, override_num_blocks=3)
    rows = numbers.map_batches(lambda block: {{"number": block["id"] * 1.0, "label": block["id"] % 2.0}})
    rows.write_parquet(sys.argv[2])

class Ledger:
    adds_losses = True

    def initial_variables(self):
        return {{"counts": np.zeros(60, np.float32)}}

    def loss_and_gradients(self, variables, batch, xp):
        gradient = np.zeros(60, np.float32)
        gradient[batch.inputs[:, 0].astype(int)] = -1.0
        return 0.5, {{"counts": gradient}}

    def evaluate(self, variables, batch, xp):
        counts = variables["counts"]
        return {{"loss": 0.0, "least": float(counts.min()), "greatest": float(counts.max())}}

data = ps.parquet(sys.argv[2] + "/*.parquet", inputs=["number"], targets="label")
strategy = ps.ParameterServerStrategy(workers=2, consistency="sync:2", cluster=ps.Ray())
trainer = ps.Trainer(Ledger(), ps.SGD(1.0), strategy, settings={{"consistency.reduce": "sum"}})
trainer.fit(data, epochs={EPOCHS}, batch_size=4, verbose=0)
counts = trainer.evaluate(data)
files = len(list(Path(sys.argv[2]).glob("*.parquet")))
print(json.dumps({{"files": files, "least": counts["least"], "greatest": counts["greatest"]}}))
"""

WITHIN_RAY = f"""
import json, os, sys, time
from pathlib import Path
import numpy as np
import ray
import parashard as ps

address, library, results = sys.argv[1:]
ray.init(address, log_to_driver=False)

def work(config):
    with ps.connect(config["run"]) as session:
        up = Path(config["run"], f"up-{{os.getpid()}}")
        up.touch()
        while len(list(up.parent.glob("up-*"))) < 2:  # else one might be done before the other comes
            time.sleep(0.02)
        for step in session.steps():
            gradient = np.zeros(60, np.float32)
            gradient[step.indices] = -1.0
            session.push(step, {{"counts": gradient}}, loss=0.5)

def with_tasks(config):
    task = ray.remote(num_cpus=1)(work)
    ray.get([task.remote(config) for _ in range(2)])

def with_train(config):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    two, where = ScalingConfig(num_workers=2), RunConfig(storage_path=results)
    TorchTrainer(work, train_loop_config=config, scaling_config=two, run_config=where).fit()

def with_tune(config):
    from ray import tune
    config = {{**config, "number": tune.grid_search([0, 1])}}
    found = tune.Tuner(work, param_space=config, run_config=tune.RunConfig(storage_path=results)).fit()
    assert not found.errors, found.errors

def cluster_at(address):
    strategy = ps.ParameterServerStrategy(shards=2, consistency="async", cluster=ps.Ray(address))
    steps = {{"examples": 60, "epochs": {EPOCHS}, "batch_size": 4}}
    return ps.Cluster({{"counts": np.zeros(60)}}, ps.SGD(1.0), strategy, **steps)

try:
    with cluster_at("127.0.0.9:1"):
        refused = ""
except ps.ConfigurationError as error:
    refused = str(error)
with cluster_at(address) as cluster:
    {{"tasks": with_tasks, "train": with_train, "tune": with_tune}}[library]({{"run": str(cluster.run_dir)}})
    report = cluster.finish()
    counts = cluster.weights()["counts"]
sessions = sorted(report["network"]["workers"])
found = {{"least": float(counts.min()), "greatest": float(counts.max()), "sessions": sessions, "refused": refused}}
print(json.dumps(found))
"""
