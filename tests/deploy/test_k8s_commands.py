"""The pods' own commands, as processes on loopback addresses: they find each other, train, leave and come back."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from k8s_manifests import K8S, ROOT, pods

MODULES = {"coordinator": "coordinator", "shard": "ps_server", "worker": "worker"}
DEADLINE_S = 60.0
POLL_S = 0.02

pytestmark = pytest.mark.xdist_group("clusters")


class Pods:
    """Runs what the containers run, each at an address of its own; all of them end with this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lifeline, self.held_open = os.pipe()
        self._network = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
        self._processes: list[subprocess.Popen[bytes]] = []
        manifests = [
            manifest
            for path in sorted((K8S / "base").glob("*.yaml"))
            for manifest in yaml.safe_load_all(path.read_text())
        ]
        self._pods = pods([manifest for manifest in manifests if manifest["kind"] in ("StatefulSet", "Job")])

    def start(self, role: str, index: int = 0) -> "subprocess.Popen[bytes]":
        """Start a pod's process, with what Kubernetes would have put into its arguments and its file system."""
        (container,) = self._pods[role]["containers"]
        given = {
            "$(POD_IP)": self._address(role, index),
            "$(SECURITY)": "--insecure",
            "$(SHARD_INDEX)": str(index),
            "$(WORKER_INDEX)": str(index),
            "digits-coordinator:": f"{self._address('coordinator', 0)}:",
            "/etc/parashard/job.toml": str(self._folder / "job.toml"),
            "/var/lib/parashard": str(self._folder),
        }
        command, *arguments = container["args"]
        assert command == role
        for name, value in given.items():
            arguments = [argument.replace(name, value) for argument in arguments]
        with (self._folder / f"{role}-{index}.log").open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULES[role], *arguments, f"--lifeline={self._lifeline}"],
                cwd=ROOT,
                stderr=said,
                pass_fds=[self._lifeline],
            )
        self._processes.append(process)
        return process

    def log(self, role: str, index: int = 0) -> str:
        """Return what a process has said."""
        return (self._folder / f"{role}-{index}.log").read_text()

    def heard(self, word: str, role: str, index: int = 0) -> None:
        """Wait until a process says a word."""
        deadline_s = time.monotonic() + DEADLINE_S
        while word not in self.log(role, index):
            assert time.monotonic() < deadline_s, self.log(role, index)
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.kill()
            process.wait(DEADLINE_S)
        os.close(self.held_open)
        os.close(self._lifeline)

    def _address(self, role: str, index: int) -> str:
        return f"{self._network}.{10 * (list(MODULES).index(role) + 1) + index}"


@pytest.fixture
def started(tmp_path) -> Iterator[Pods]:
    job = (K8S / "base" / "job.toml").read_text().replace("/var/lib/parashard", str(tmp_path))
    assert 'launcher = "kubernetes"' in job
    job = job.replace('launcher = "kubernetes"', 'launcher = "external"')  # there is no API server to ask
    (tmp_path / "job.toml").write_text(job)
    running = Pods(tmp_path)
    yield running
    running.stop()


def test_the_pods_train_the_example_though_a_worker_leaves_and_a_shard_dies(started, tmp_path):
    shards = [started.start("shard", index) for index in range(2)]
    workers = [started.start("worker", index) for index in range(2)]
    started.start("coordinator")  # last: in a cluster nothing waits for another
    started.heard("joined", "worker", 0)

    shards[0].kill()  # the job cannot end without it
    shards[0].wait(DEADLINE_S)
    started.heard("joined", "worker", 1)
    workers[1].send_signal(signal.SIGTERM)
    assert workers[1].wait(DEADLINE_S) == 75  # its index is not complete: the Job starts it again
    workers[1] = started.start("worker", 1)
    started.start("shard", 0)

    assert [worker.wait(DEADLINE_S) for worker in workers] == [0, 0], started.log("worker")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["state"] == "done"
    assert report["accuracy"] >= 0.95
    assert report["shard_restarts"] == 1
