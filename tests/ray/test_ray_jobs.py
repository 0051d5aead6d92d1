"""Whole jobs on a real Ray: nodes that are lost, drained and added, and what is left in Ray when a run has ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import RayNodes
from ray_run import LEDGER, RayRun, ledger, quiet_run

from parashard.security.certs import issue, make_authority
from parashard.security.credentials import Credentials, load
from parashard.security.identity import OF_A_JOB, Identity
from support.cluster_run import ClusterRun, eventually
from support.command_run import ROOT
from support.short_lives import ShortLives

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]


@pytest.fixture
def run(nodes: RayNodes, tmp_path: Path) -> Iterator[Callable[..., RayRun]]:
    """Return what runs a job on Ray; afterwards nothing of it may be left, in Ray or on this machine."""
    runs: list[RayRun] = []

    def begin(*words: str) -> RayRun:
        runs.append(RayRun(nodes, tmp_path, *words))
        return runs[-1]

    yield begin
    for one in runs:
        one.clean_up()
        one.until_gone()
        names = one.shared_memory()
        if one.process.returncode == -signal.SIGKILL:  # shards that end with it leave what the resumed run would sweep
            for name in names:
                shutil.rmtree(name)
        else:
            assert names == []


@pytest.fixture(scope="module")
def quiet_sha256(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the weights of the ledger in `sync:4` on this machine, without Ray and without faults."""
    return str(quiet_run(tmp_path_factory.mktemp("quiet"), "ledger.toml", "sync:4")["weights_sha256"])


@pytest.mark.parametrize(
    "consistency",
    [
        "sync:4",
        pytest.param("async", marks=pytest.mark.full("sync:4 is the same on the same nodes, and shows the bits")),
    ],
)
def test_no_step_is_lost_or_counted_twice_when_nodes_are_lost_drained_and_added(
    run: Callable[..., RayRun], nodes: RayNodes, tmp_path: Path, quiet_sha256: str, consistency: str
) -> None:
    job = ledger(tmp_path, "ledger.toml")
    running = run(job.file, *LEDGER, "--consistency", consistency)
    running.wait_for_steps(40)

    nodes.kill(running.node_of("worker-0"))  # one of two: a worker of three has no room, and waits
    nodes.add()
    running.until_live(3)
    nodes.kill(running.node_of("shard-0"))
    nodes.add()
    running.until_live(3)

    drained = running.node_of("shard-1")
    nodes.drain(drained, deadline_s=60)
    eventually(lambda: drained not in running.places().values(), f"{drained} is left")
    nodes.kill(drained)
    nodes.add()
    running.until_live(3)

    job.let_end()
    report = running.report()
    assert report["ledger_wrong"] == 0
    assert consistency == "async" or report["weights_sha256"] == quiet_sha256
    log = (running.dir / "logs" / "shard-1.log").read_text()
    assert "event=stopping reason=SIGTERM" in log, "the drained node's shard saves"


def test_a_job_has_the_bits_that_it_has_on_this_machine(run: Callable[..., RayRun], tmp_path: Path) -> None:
    words = ["examples/digits.toml", "--consistency", "sync:4", "--set", "job.epochs=3"]
    here = ClusterRun(tmp_path / "here", words, ROOT)
    try:
        expected = here.report()["weights_sha256"]
    finally:
        here.clean_up()
    assert run(*words).report()["weights_sha256"] == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_of_a_run_that_is_stopped_or_killed(
    run: Callable[..., RayRun], nodes: RayNodes, tmp_path: Path, number: signal.Signals
) -> None:
    running = run(ledger(tmp_path, "ledger.toml").file, *LEDGER, "--set", "cluster.workers=2")
    running.until_live(2)
    processes = running.processes()
    assert sorted(processes) == ["shard-0", "shard-1", "worker-0", "worker-1"]
    assert nodes.left() != ([], [])
    running.process.send_signal(number)
    running.wait()
    running.until_gone()


def test_inside_tls_each_process_has_a_key_of_its_own_that_was_made_on_its_node_and_goes_with_it(
    run: Callable[..., RayRun], tmp_path: Path
) -> None:
    make_authority(tmp_path / "ca", valid_days=1)
    driver = tmp_path / "tls"
    issue(tmp_path / "ca", driver, [Identity(role, "driver") for role in OF_A_JOB], hosts=["127.0.0.2"], valid_days=1)
    job = ledger(tmp_path, "ledger.toml")
    secured = ["--tls-dir", str(driver), "--set", f"cluster.authority={tmp_path / 'ca'}"]
    tcp = ["--set", "cluster.transport=tcp", "--set", "cluster.workers=2"]
    running = run(job.file, *LEDGER, *secured, *tcp)
    running.credentials = Credentials(driver)
    running.until_live(2)
    folders = {name: _tls_folder(pid) for name, pid in running.processes().items()}
    assert sorted(folders) == ["shard-0", "shard-1", "worker-0", "worker-1"]
    shown = {name: [str(one) for one in load(folder).identities] for name, folder in folders.items()}
    assert shown == {name: [f"{name.partition('-')[0]}/{name}"] for name in folders}
    keys = [folder / "key.pem" for folder in folders.values()]
    assert len({key.read_bytes() for key in [*keys, driver / "key.pem"]}) == 5
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert {stat.S_IMODE(folder.parent.stat().st_mode) for folder in folders.values()} == {0o700}
    os.kill(running.processes()["shard-0"], signal.SIGKILL)
    eventually(
        lambda: (pid := running.processes().get("shard-0")) and _tls_folder(pid) != folders["shard-0"],
        "another life has another key",
        told=running.told,
    )
    job.let_end()
    assert running.report()["ledger_wrong"] == 0
    eventually(lambda: not any(folder.parent.exists() for folder in folders.values()), "no key is left on a node")


@pytest.mark.full("it waits for three renewals, each after five seconds")
def test_a_job_trains_while_every_certificate_is_renewed_and_connects_anew(
    run: Callable[..., RayRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives, job = ShortLives(tmp_path, "127.0.0.2"), ledger(tmp_path, "ledger.toml")
    monkeypatch.setenv("PYTHONPATH", str(lives.pythonpath))
    more = ["--set", "cluster.transport=tcp", "--set", "cluster.workers=2"]
    with lives:
        running = run(job.file, *LEDGER, *lives.words, *more)
        lives.check(running, job, running.processes)


def _tls_folder(pid: int) -> Path:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return Path(words[words.index("--tls-dir") + 1])


def test_a_script_trains_on_ray(nodes: RayNodes, start: Callable[..., Any]) -> None:
    script = start(SCRIPT, nodes.address)
    assert script.wait() == 0, script.complaint()
    assert json.loads(script.output().splitlines()[-1]) == {"least": 3.0, "lines": True}


def test_a_script_and_its_data_come_to_the_nodes_in_a_working_dir(nodes: RayNodes, start: Callable[..., Any]) -> None:
    text = SCRIPT.replace('{"env_vars": {"WHERE": "a node"}}', '{"working_dir": ".", "excludes": ["runs"]}')
    text = text.replace("np.arange(60)", "numbers()").replace("class Ledger", NUMBERS + "\nclass Ledger")
    script = start(text, nodes.address)
    assert script.wait() == 0, script.complaint()
    assert json.loads(script.output().splitlines()[-1]) == {"least": 3.0, "lines": True}
    log = (script.runs()[-1] / "logs" / "worker-0.log").read_text()
    assert "working_dir_files" in log, "the worker is in Ray's copy of the folder"


def test_each_worker_sees_the_gpu_that_ray_gives_it(ray: None, start: Callable[..., Any]) -> None:
    nodes = RayNodes(2, gpus=2)  # Ray takes our word for them
    try:
        text = SCRIPT.replace('{"CPU": 0.5}', '{"CPU": 0.5, "GPU": 1}')
        script = start(text + SEEN_GPUS, nodes.address)
        assert script.wait() == 0, script.complaint()
        assert json.loads(script.output().splitlines()[-1]) == [["0"], ["1"]]
    finally:
        nodes.down()


SEEN_GPUS = """
logs = [(history.run_dir / "logs" / f"worker-{number}.log").read_text() for number in range(2)]
print(json.dumps(sorted([line.split()[-1] for line in log.splitlines() if line.startswith("GPUs:")] for log in logs)))
"""

NUMBERS = """
from pathlib import Path
def numbers():
    if not ps.is_worker():
        np.save("numbers.npy", np.arange(60))
    print("data in", Path.cwd())
    return np.load("numbers.npy")
"""

SCRIPT = """
import json, os, sys
import numpy as np
import parashard as ps

print("an import that a worker repeats")
print("GPUs:", os.environ.get("CUDA_VISIBLE_DEVICES"))

class Ledger:
    adds_losses = True

    def initial_variables(self):
        return {"counts": np.zeros(60, np.float32)}

    def loss_and_gradients(self, variables, batch, xp):
        gradient = np.zeros(60, np.float32)
        gradient[batch.inputs[:, 0]] = -1.0
        return 0.5, {"counts": gradient}

    def evaluate(self, variables, batch, xp):
        return {"loss": 0.0, "least": float(variables["counts"].min())}

where = ps.Ray(sys.argv[1], worker_resources={"CPU": 0.5}, runtime_env={"env_vars": {"WHERE": "a node"}})
trainer = ps.Trainer(Ledger(), ps.SGD(1.0), ps.ParameterServerStrategy(workers=2, consistency="sync:2", cluster=where),
                     settings={"consistency.reduce": "sum"})
data = np.arange(60)[:, None], np.zeros(60, np.float32)
history = trainer.fit(data, epochs=3, batch_size=4, verbose=0)
log = (history.run_dir / "logs" / "worker-0.log").read_text()
print(json.dumps({"least": trainer.evaluate(data)["least"], "lines": "an import that a worker repeats" in log}))
"""
