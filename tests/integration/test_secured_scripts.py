"""Scripts inside mutual TLS: workers join by host and port with a certificate, and without one are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import pytest

from parashard.process.shell import ExitCode
from parashard.security.identity import Role
from support.certificates import WRONG_CA, Certificates
from support.cluster_run import DEADLINE_S, eventually
from support.command_run import DIES_WITH_US
from support.free_ports import free_ports
from support.script_run import LEDGER, ScriptRun

FIT = "trainer.fit(data, epochs=EPOCHS, batch_size=4)\nprint(json.dumps(trainer.evaluate(data)['least']))\n"
ELSEWHERE = LEDGER.replace("workers=2, ", 'workers=0, host="localhost", tls_dir=sys.argv[3], ') + FIT
PLACED = LEDGER.replace("shards=2, workers=2, ", "") + FIT


def command(run: ScriptRun, *flags: str) -> list[str]:
    """Return what joins by host and port, with the script in a process of its own."""
    where = json.loads((run.runs()[-1] / "coordinator.json").read_text())["address"]
    ours = [*DIES_WITH_US, sys.executable, "-m", "parashard", "worker", "--connect", where]
    return [*ours, *flags, "train.py", "5", "async", "of no use here"]


def worker(run: ScriptRun, *flags: str) -> subprocess.CompletedProcess[str]:
    """Join, and wait for the end."""
    told = command(run, *flags)
    return subprocess.run(told, cwd=run.folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def waiting(run: ScriptRun) -> None:
    """Wait until the cluster of a script that starts no workers is up."""
    eventually(lambda: "every shard is up" in run.output(), "the cluster is up", told=run.complaint)


def test_only_a_worker_with_a_certificate_joins_and_both_sides_say_why(
    start: Callable[..., ScriptRun], certificates: Certificates
) -> None:
    run = start(ELSEWHERE, "5", "async", str(certificates.folder(list(Role))))
    waiting(run)
    assert " --tls-dir DIR train.py 5 async " in run.output()
    without = worker(run, "--give-up-s", "1")
    assert "a missing certificate, or one that the other side refuses" in without.stderr
    refused = "the coordinator refuses a process without a certificate; a worker joins with --tls-dir"
    eventually(lambda: refused in run.output(), "the script's side says so, too", told=run.output)
    foreign = worker(run, "--give-up-s", "1", "--tls-dir", str(certificates.folder(Role.WORKER, WRONG_CA)))
    assert "a missing certificate, or one that the other side refuses" in foreign.stderr
    taken = "with a certificate that is not taken (CERTIFICATE_VERIFY_FAILED)"
    eventually(lambda: taken in run.output(), "the script's side says so, too", told=run.output)
    operator = worker(run, "--tls-dir", str(certificates.folder(Role.OPERATOR)))
    assert operator.returncode == ExitCode.CONFIGURATION
    assert "this process is a worker, and the certificate's roles are operator/" in operator.stderr
    good = worker(run, "--tls-dir", str(certificates.folder(Role.WORKER)))
    assert good.returncode == 0, good.stderr
    assert run.wait() == 0, run.complaint()
    assert json.loads(run.output().splitlines()[-1]) == 5.0


def test_a_script_that_says_nothing_is_placed_by_the_environment(
    start: Callable[..., ScriptRun], certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "elsewhere"
    placed = {
        "PARASHARD_TLS_DIR": str(certificates.folder(list(Role))),
        "PARASHARD_RUNS": str(runs),
        "PARASHARD_CLUSTER__HOST": "localhost",
        "PARASHARD_CLUSTER__WORKERS": "1",
        "PARASHARD_CLUSTER__SHARDS": "3",
        "PARASHARD_CLUSTER__TRANSPORT": "tcp",
    }
    for name, value in placed.items():
        monkeypatch.setenv(name, value)
    run = start(PLACED, "5", "async")
    assert run.wait() == 0, run.complaint()
    assert json.loads(run.output().splitlines()[-1]) == 5.0
    (folder,) = runs.iterdir()
    assert {path.stem for path in (folder / "logs").iterdir()} == {
        "coordinator",
        "fork-server",
        "shard-0",
        "shard-1",
        "shard-2",
        "worker-0",
    }
    assert "kind=tcp" in (folder / "logs" / "worker-0.log").read_text()


def test_credentials_that_lack_a_role_are_refused_before_there_is_a_run(
    start: Callable[..., ScriptRun], certificates: Certificates
) -> None:
    run = start(ELSEWHERE, "5", "async", str(certificates.folder(Role.WORKER)))
    assert run.wait() == 1
    last = run.complaint().splitlines()[-1]
    assert (
        "the certificate's roles are worker/worker-0; a local cluster also needs coordinator, operator, shard" in last
    )
    assert run.runs() == []


def test_workers_elsewhere_outlive_the_coordinator_and_the_script_at_a_fixed_port(
    start: Callable[..., ScriptRun], certificates: Certificates
) -> None:
    port = free_ports(6)
    placed = ELSEWHERE.replace("workers=0,", f"workers=0, port={port},")
    again = placed.replace("batch_size=4)", "batch_size=4, resume=True)")
    run = start(again, "5", "async", str(certificates.folder(list(Role))))
    (run.folder / "slow").touch()
    waiting(run)
    told = command(run, "--tls-dir", str(certificates.folder(Role.WORKER)))
    with Popen(told, cwd=run.folder, stdout=DEVNULL, stderr=PIPE, text=True) as other:
        tls = certificates.of(Role.OPERATOR)
        eventually(lambda: run.steps_complete(tls) >= 20, "it computes", told=run.complaint)
        run.kill("coordinator")
        eventually(lambda: "the coordinator ended: killed by SIGKILL" in run.output(), "it is started again")
        eventually(lambda: run.steps_complete(tls) >= 20, "it is back", told=run.output)
        run.clean_up()
        (run.folder / "slow").unlink()
        resumed = start(again, "5", "async", str(certificates.folder(list(Role))))
        assert resumed.wait() == 0, resumed.complaint()
        assert other.wait(DEADLINE_S) == 0, other.stderr and other.stderr.read()
    assert len(run.runs()) == 1
    assert json.loads(resumed.output().splitlines()[-1]) == 5.0
    where = json.loads((run.runs()[-1] / "coordinator.json").read_text())
    assert (where["address"], where["http"]) == (f"localhost:{port}", f"localhost:{port + 1}")
    for shard in (0, 1):
        assert f"shard-{shard} started (localhost:{port + 2 + 2 * shard})" in resumed.output()


LOOPS = """
import json, sys
import numpy as np
import parashard as ps

@ps.function
def push(weights, amount):
    return float(amount), {"w": np.full(3, -amount, np.float32)}

strategy = ps.ParameterServerStrategy(workers=1, tls_dir=sys.argv[1])
if not ps.is_worker():
    with ps.Cluster({"w": np.zeros(3)}, ps.SGD(1.0), strategy, examples=4) as cluster:
        with ps.connect(cluster.run_dir, tls_dir=sys.argv[1]) as session:
            for step in session.steps():
                session.push(step, {"w": np.full(3, -1.0)})
                if step.number == 0:
                    print(cluster.weights()["w"].tolist())
    print(cluster.weights()["w"].tolist())
with ps.Coordinator(strategy, variables={"w": np.zeros(3)}, optimizer=ps.SGD(1.0)) as coordinator:
    coordinator.schedule(push, args=(2.0,))
    coordinator.join()
    print(coordinator.weights()["w"].tolist())
"""


def test_loops_of_ones_own_run_inside_tls(start: Callable[..., ScriptRun], certificates: Certificates) -> None:
    run = start(LOOPS, str(certificates.folder(list(Role))))
    assert run.wait() == 0, run.complaint()
    assert run.output().splitlines() == ["[1.0, 1.0, 1.0]", "[4.0, 4.0, 4.0]", "[2.0, 2.0, 2.0]"]
