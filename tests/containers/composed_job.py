"""ComposedJob: the compose file brought up by podman-compose, and a way to ask, to crash and to remove its containers.

What podman does otherwise than Docker is here. Its health checks need systemd, so the tests run them. It does not
start a container again while one that it depends on is not running, such as certificates, which has ended: so
services are brought up without their dependencies, in the file's order. `podman kill` counts as a stop by hand, after
which nothing is started again, so a crash is a SIGKILL to the container's main process from outside.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from container_engine import PROBE_DEADLINE_S, ROOT, run

from support.long_job import EXAMPLES, LongJob
from support.waiting import eventually

COMPOSE_FILE = ROOT / "deploy/compose/compose.yaml"
FIRST, SECOND, OTHERS = "certificates", "coordinator", ("shard-0", "shard-1", "worker")
DEADLINE_S = 240.0
EPOCHS = {"ledger.toml": 4, "digits.toml": 30}  # 4,096 and 1,350 steps
eventually = partial(eventually, deadline_s=DEADLINE_S, poll_s=0.2)


class ComposedJob:
    """One project of podman-compose.

    Parameters
    ----------
    image : str
        Runs as every service.
    job : LongJob
        In a folder of its own.
    workers : int
        How many.
    prometheus : str
        Runs as Prometheus beside the job; empty: none does.
    """

    _file = COMPOSE_FILE

    def __init__(self, image: str, job: LongJob, *, workers: int, prometheus: str = "") -> None:
        self._image = image
        self.let_end = job.let_end
        file = Path(job.file)
        self.project = f"parashard-test-{file.stem}"
        self._environment = {
            **os.environ,
            "PARASHARD_IMAGE": image,
            "PARASHARD_JOB": file.name,
            "PARASHARD_JOB_FOLDER": str(file.parent),
            "PARASHARD_WORKERS": str(workers),
            "PARASHARD_STATUS_PORT": "",  # whatever is free
            "PROMETHEUS_PORT": "",
            "PROMETHEUS_IMAGE": prometheus,
        }
        self._others = [*OTHERS, "prometheus"] if prometheus else OTHERS

    def up(self) -> None:
        """Bring everything up, once nothing is left of a test that died."""
        self.down()
        self.up_again()

    def up_again(self) -> None:
        """Bring up what does not run, as `docker compose up --detach` does."""
        self._certify()
        self._start(SECOND)
        health = ("parashard", "health", "--live", "coordinator:9100")
        eventually(
            lambda: self.ask(f"{SECOND}_1", *health).returncode == 0,
            "the coordinator is healthy",
            told=lambda: self.log(f"{SECOND}_1"),
        )
        self._start(*self._others)

    def _certify(self) -> None:
        self._start(FIRST)
        eventually(lambda: self.container(f"{FIRST}_1")["State"]["Status"] == "exited", "the certificates are there")
        assert self.container(f"{FIRST}_1")["State"]["ExitCode"] == 0, self.log(f"{FIRST}_1")

    def kill(self, service: str) -> None:
        """Kill all containers of a service through the engine, which then leaves them alone."""
        self._compose("kill", service)

    def down(self) -> None:
        """Remove containers, the volumes that they made for themselves, the project's volumes and its network."""
        left = run("podman", "ps", "--all", "--quiet", "--filter", f"label=io.podman.compose.project={self.project}")
        if left:
            run("podman", "rm", "--force", "--ignore", "--depend", "--volumes", "--time", "0", *left.split())
        self._compose("down", "--volumes", "--timeout", "1")

    def containers(self) -> dict[str, Any]:
        """Return what podman knows of each container, by names such as `worker_1`."""
        names = run(
            *("podman", "ps", "--all", "--format", "{{.Names}}"),
            *("--filter", f"label=io.podman.compose.project={self.project}"),
        ).split()
        found = json.loads(run("podman", "inspect", *names))
        return {container["Name"].removeprefix(f"{self.project}_"): container for container in found}

    def container(self, name: str) -> Any:
        """Return what podman knows of one container."""
        return self.containers()[name]

    def crash(self, name: str) -> None:
        """Kill a container's main process from outside, and wait until the engine has started it again."""
        before = self.container(name)
        os.kill(before["State"]["Pid"], signal.SIGKILL)

        def restarted() -> bool:
            now = self.container(name)
            return now["RestartCount"] > before["RestartCount"] and now["State"]["Running"]

        eventually(restarted, f"{name} is started again", told=lambda: self.container(name)["State"])

    def stop(self, name: str) -> None:
        """Ask a container to end, as `docker stop` does, and give it the time that it has."""
        run("podman", "stop", "--time", "15", f"{self.project}_{name}")

    def ask(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside a container and return how it ended."""
        return subprocess.run(
            ["podman", "exec", f"{self.project}_{name}", *command],
            capture_output=True,
            text=True,
            timeout=PROBE_DEADLINE_S,
            check=False,
        )

    def visit(self, *command: str, volume: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container of its own on the job's network, with one of its volumes as /tls."""
        mount = ("--volume", f"{self.project}_{volume}:/tls:ro")
        return subprocess.run(
            ["podman", "run", "--rm", "--network", f"{self.project}_training", *mount, self._image, *command],
            capture_output=True,
            text=True,
            timeout=PROBE_DEADLINE_S,
            check=False,
        )

    def wait_for_steps(self, steps: int) -> None:
        """Wait until so many steps are complete; the job must not be over by then."""
        said = [""]

        def so_many() -> bool:
            asked = self.ask("coordinator_1", "parashard", "status", "coordinator:7100", "--json")
            said[:] = [asked.stdout + asked.stderr]
            if asked.returncode != 0:
                return False  # it is starting, or the machine is busy
            status = json.loads(asked.stdout)
            assert status["state"] != "JOB_STATE_DONE", "the job was over before the fault"
            return int(status["steps_complete"]) >= steps

        eventually(so_many, f"{steps} steps are complete", told=lambda: said[-1])

    def report(self) -> dict[str, Any]:
        """Wait for the coordinator's end, which must be a success, and return the report in the volume."""
        eventually(
            lambda: self.container("coordinator_1")["State"]["Status"] == "exited",
            "the job is over",
            told=lambda: self.log("coordinator_1"),
        )
        assert self.container("coordinator_1")["State"]["ExitCode"] == 0, self.log("coordinator_1")
        report: dict[str, Any] = json.loads(self.ask_volume("cat", "/stored/report.json"))
        return report

    def ask_volume(self, *command: str) -> str:
        """Run a command in a container of its own that has the volume `run` as /stored, and return what it prints."""
        return run("podman", "run", "--rm", "--volume", f"{self.project}_run:/stored:ro", self._image, *command)

    def log(self, name: str) -> str:
        """Return what a container has written."""
        said = subprocess.run(
            ["podman", "logs", f"{self.project}_{name}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PROBE_DEADLINE_S,
            check=False,
        )
        return said.stdout

    def _start(self, *services: str) -> None:
        self._compose("up", "--detach", "--no-build", "--no-deps", *services)

    def _project(self) -> list[str]:
        return ["-p", self.project, "-f", str(self._file), "--profile", "monitoring"]

    def _compose(self, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "podman_compose", *self._project(), *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, f"podman-compose {' '.join(arguments)}: {done.stdout}\n{done.stderr}"


def longer(example: str, folder: Path, *, quick_until: int, more: str) -> LongJob:
    """Put an example into a folder for the containers, with more steps than there are seconds for a test."""
    text = (EXAMPLES / example).read_text()
    text, found = re.subn(r"^epochs = \d+", f"epochs = {EPOCHS[example]}", text, flags=re.M)
    assert found == 1
    folder.chmod(0o755)  # the containers' user reads it
    return LongJob(folder, example, quick_until, text + more)
