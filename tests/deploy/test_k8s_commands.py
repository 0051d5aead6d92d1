"""The pods' own commands, as processes on loopback addresses: they find each other, train, leave and come back.

Inside mutual TLS with the certificates that the manifests ask for, by the names that are in them; and without.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from parashard.cli.main import app
from parashard.launch.local_cluster import MODULES
from support.cluster_run import DEADLINE_S, eventually
from support.issued_secrets import Issuing, mount, secret_volumes
from support.k8s_manifests import EXAMPLE, ROOT, pods
from support.long_job import LongJob

WITH_NAMES = Path(__file__).resolve().parents[1] / "support" / "named_hosts.py"
SHARDS = 2
QUICK_STEPS = 200  # of 1350: the job is not over before a command that asks for its status has started

pytestmark = [
    pytest.mark.xdist_group("more clusters"),
    pytest.mark.timeout(900),
    pytest.mark.full("whole jobs by the pods' commands; test_external.py has processes without a launcher"),
]


class Pods:
    """Runs what the containers run, each at an address of its own; all of them end with this process."""

    def __init__(self, folder: Path, rendered: Path, job: LongJob) -> None:
        self.job = job
        self._folder = folder
        self._lifeline, self.held_open = os.pipe()
        self._network = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
        self._processes: list[subprocess.Popen[bytes]] = []
        manifests = [
            manifest
            for path in sorted((rendered / "base").glob("*.yaml"))
            for manifest in yaml.safe_load_all(path.read_text())
        ]
        self._pods = pods([manifest for manifest in manifests if manifest["kind"] in ("StatefulSet", "Job")])
        self._issuing = Issuing(manifests)
        coordinator = self._address("coordinator", 0)
        hosts = {"digits-coordinator": coordinator, "digits-coordinator-0": coordinator}
        hosts |= {f"digits-shard-{index}.digits-shard": self._address("shard", index) for index in range(SHARDS)}
        self._hosts = folder / "hosts.json"
        self._hosts.write_text(json.dumps(hosts))

    def start(self, role: str, index: int = 0) -> "subprocess.Popen[bytes]":
        """Start a pod's process, with what Kubernetes would have put into its arguments and its file system."""
        (container,) = self._pods[role]["containers"]
        given = {
            "$(POD_IP)": self._address(role, index),
            "$(SHARD_INDEX)": str(index),
            "$(WORKER_INDEX)": str(index),
            "/etc/parashard/job.toml": str(self._folder / "job.toml"),
            "/var/lib/parashard": str(self._folder),
        }
        given |= {f"--tls-dir={path}": f"--tls-dir={folder}" for path, folder in self._mounted(role).items()}
        if "--insecure" in container["args"]:  # no name is checked, and gRPC would look it up by itself
            given["digits-coordinator:"] = f"{self._address('coordinator', 0)}:"
        command, *arguments = container["args"]
        assert command == role
        for name, value in given.items():
            arguments = [argument.replace(name, value) for argument in arguments]
        with (self._folder / f"{role}-{index}.log").open("ab") as said:
            process = subprocess.Popen(
                [*self._python(MODULES[role]), *arguments, f"--lifeline={self._lifeline}"],
                cwd=ROOT,
                stderr=said,
                env=os.environ | {"PYTHONPATH": str(self._folder)},  # where the job's model is
                pass_fds=[self._lifeline],
            )
        self._processes.append(process)
        return process

    def run_in(self, role: str, command: str, *arguments: str) -> str:
        """Run a command inside a pod, as `kubectl exec` does, and return what it prints."""
        (container,) = self._pods[role]["containers"]
        mounted = self._mounted(role)
        given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        given = {name: str(mounted.get(value, value)) for name, value in given.items()}
        told = [argument.replace("/var/lib/parashard", str(self._folder)) for argument in arguments]
        ran = subprocess.run(
            [*self._python(command), *told],
            cwd=ROOT,
            env=os.environ | given,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def log(self, role: str, index: int = 0) -> str:
        """Return what a process has said."""
        return (self._folder / f"{role}-{index}.log").read_text()

    def heard(self, word: str, role: str, index: int = 0) -> None:
        """Wait until a process says a word."""
        eventually(lambda: word in self.log(role, index), f"{role} {index}: {word}", told=lambda: self.log(role, index))

    def stop(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.kill()
            process.wait(DEADLINE_S)
        os.close(self.held_open)
        os.close(self._lifeline)

    def _mounted(self, role: str) -> dict[str, Path]:
        """Mount a pod's Secrets; return where they are here, by where they are there."""
        found = {}
        for path, volume in secret_volumes(self._pods[role]).items():
            folder = self._folder / f"{role}{path.replace('/', '-')}"
            found[path] = mount(volume, self._issuing.secret(volume["secretName"]), folder)
        return found

    def _python(self, module: str) -> list[str]:
        return [sys.executable, "-P", str(WITH_NAMES), str(self._hosts), module]

    def _address(self, role: str, index: int) -> str:
        return f"{self._network}.{10 * (list(MODULES).index(role) + 1) + index}"


@pytest.fixture(params=["cluster.insecure=false", "cluster.insecure=true"])
def started(request, tmp_path) -> Iterator[Pods]:
    rendered = tmp_path / "rendered"
    # Pods have no memory in common, and shared memory shows no certificate.
    sets = [word for key in (request.param, "cluster.transport=tcp") for word in ("--set", key)]
    ran = CliRunner().invoke(app, ["render", "k8s", str(EXAMPLE), "--output", str(rendered), *sets])
    assert ran.exit_code == 0, ran.output
    job = (rendered / "base" / "job.toml").read_text().replace("/var/lib/parashard", str(tmp_path))
    assert 'launcher = "kubernetes"' in job
    job = job.replace('launcher = "kubernetes"', 'launcher = "external"')  # there is no API server to ask
    running = Pods(tmp_path, rendered, LongJob(tmp_path, "job.toml", QUICK_STEPS, job))
    yield running
    running.stop()


def test_the_pods_train_the_example_though_a_worker_leaves_and_a_shard_dies(started, tmp_path):
    shards = [started.start("shard", index) for index in range(SHARDS)]
    workers = [started.start("worker", index) for index in range(2)]
    started.start("coordinator")  # last: in a cluster nothing waits for another
    started.heard("joined", "worker", 0)
    started.heard("serving", "shard", 0)  # its first incarnation is known; the next is another
    assert "workers" in started.run_in("coordinator", "parashard", "status", "/var/lib/parashard", "--json")

    shards[0].kill()  # the job cannot end without it
    started.job.let_end()
    shards[0].wait(DEADLINE_S)
    started.heard("joined", "worker", 1)
    workers[1].send_signal(signal.SIGTERM)
    assert workers[1].wait(DEADLINE_S) == 75  # its index is not complete: the Job starts it again
    workers[1] = started.start("worker", 1)
    started.start("shard", 0)

    assert [worker.wait(DEADLINE_S) for worker in workers] == [0, 0], started.log("worker")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["state"] == "done"
    assert report["held_out"]["accuracy"] >= 0.95
    assert report["shard_restarts"] == 1
