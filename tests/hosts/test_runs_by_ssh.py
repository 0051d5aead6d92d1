"""`parashard run --on ssh:HOSTFILE` on hosts with addresses of their own, which are lost meanwhile; nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from host_campaign import START_S  # which lets `job_run` and `long_model` be found
from hosted_job import status_at
from job_run import NOTHING_EXPECTED, Ended, fault_free, sets, violations
from network_hosts import Host, Hosts

from support.long_job import LongJob
from support.sshd import Sshd
from support.waiting import eventually

HOME, ONE, TWO = "home", "one", "two"
QUICK_STEPS = 60
STEPS_MORE = 8
eventually = partial(eventually, deadline_s=START_S, poll_s=0.2)


class RunBySsh:
    """A command on the host `home` that runs a job on the hosts `one` and `two`; each of these has an sshd."""

    def __init__(self, hosts: Hosts, folder: Path, log: IO[bytes]) -> None:
        self.home, self.one, self.two = (hosts.by_name[name] for name in (HOME, ONE, TWO))
        self.sshd = Sshd(folder / "sshd", elsewhere=True)
        self.run_dir, self._folder, self._log = folder / "run", folder, log
        for host in (self.one, self.two):
            host.run("mount", "-t", "tmpfs", "tmpfs", str(self.sshd.tmp))
            self.serve(host)
            ssh = self.home.enter([str(self.sshd.bin_ / "ssh"), host.name, "true"])
            eventually(lambda ssh=ssh: subprocess.run(ssh, check=False, stderr=log).returncode == 0, "its sshd answers")

    def serve(self, host: Host) -> None:
        """Start a host's sshd."""
        host.start(self.sshd.command, self._log)

    def at_home(self, *words: str) -> list[str]:
        """Return the command that runs `parashard` on the host `home`, where `ssh` knows the others."""
        path = os.pathsep.join([str(self.sshd.bin_), os.environ["PATH"]])
        return self.home.enter(["env", f"PATH={path}", sys.executable, "-P", "-m", "parashard", *words])

    def certified(self) -> list[str]:
        """Make certificates as the page on hosts does; return the flags that have a run use them."""
        authority, tls = str(self._folder / "authority"), str(self._folder / "tls")
        roles = [word for role in ("operator", "coordinator", "shard", "worker") for word in ("--role", role)]
        for words in (["init", authority], ["issue", authority, tls, *roles, "--host", self.home.address]):
            subprocess.run(self.at_home("certs", *words), check=True, stdout=self._log)
        return ["--tls-dir", tls, "--set", f"cluster.authority={authority}"]

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start the run, whose checkpoints are in its folder: hosts share the disk."""
        hosts = self.sshd.hosts(ONE, TWO)
        command = self.at_home("run", *words, "--on", f"ssh:{hosts}", "--run-dir", str(self.run_dir))
        with (self._folder / "said").open("wb") as said:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)

    def said(self) -> str:
        """Return what the command has said so far."""
        return (self._folder / "said").read_text()

    def status(self) -> dict[str, Any]:
        """Return what the coordinator says of the job; empty: nothing now."""
        with suppress(FileNotFoundError):
            where = json.loads((self.run_dir / "coordinator.json").read_text())
            return status_at(self.home, where["http"]) or {}
        return {}

    def until_steps(self, steps: int) -> int:
        """Wait until more steps are complete; return how many are."""
        eventually(lambda: int(self.status().get("steps_complete", 0)) >= steps, f"{steps} steps", told=self.said)
        return int(self.status()["steps_complete"])

    def until_said(self, text: str) -> None:
        """Wait until the command has said something."""
        eventually(lambda: text in self.said(), text, told=self.said)

    def left(self) -> list[object]:
        """Return what is there still, but for the servers: processes, shared memory and temporary files."""
        found: list[object] = []
        for host in (self.home, self.one, self.two):
            found += [path for folder in self._emptied(host) for path in folder.iterdir()]
            commands = (_command(pid) for pid in host.pids())
            found += [command for command in commands if command and not command.startswith(b"sshd: ")]
        return found

    def kill_all(self, host: Host) -> None:
        """Kill what runs behind a host's sshd, but for the shells that remove what keepers had."""
        for pid in {*host.pids()} & {pid for pid, words in self.sshd.processes().items() if words[0] != "/bin/sh"}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def power_on(self, host: Host) -> None:
        """Let a host start again, as one does that keeps no temporary files."""
        host.run("find", str(self.sshd.tmp), "-mindepth", "1", "-delete")
        host.power_on()
        self.serve(host)

    def _emptied(self, host: Host) -> list[Path]:
        root = Path(f"/proc/{host.first_pid}/root")
        return [root / "dev" / "shm", root / self.sshd.tmp.relative_to("/")]


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.full("root, namespaces, an sshd on each of two hosts, and a minute; test_ssh_runs.py has one address")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("example", "policy", "epochs", "secure"),
    [("digits.toml", "sync:4", 16, False), ("ledger.toml", "async", 1, True)],
    ids=["digits", "the ledger inside TLS"],
)
def test_a_job_by_ssh_loses_nothing_when_its_hosts_are_lost(
    hosts_possible: None, tmp_path: Path, example: str, policy: str, epochs: int, secure: bool
) -> None:
    (tmp_path / "sshd").mkdir()
    long, values = LongJob(tmp_path, example, sys.maxsize), {"cluster.workers": 4, "job.epochs": epochs}
    job = [long.file, *sets(values)]
    expected = fault_free(job, policy, tmp_path / "fault-free") if policy.startswith("sync") else NOTHING_EXPECTED
    long.quick_until(QUICK_STEPS)
    with Hosts((HOME, ONE, TWO), tmp_path) as hosts, (tmp_path / "log").open("ab") as log:
        run = RunBySsh(hosts, tmp_path, log)
        words: Sequence[str] = run.certified() if secure else sets({"cluster.insecure": "true"})
        process = run.start(*job, "--consistency", policy, *words)
        try:
            run.until_steps(QUICK_STEPS)
            run.kill_all(run.two)
            run.until_said("host two is lost")
            run.until_said("host two is back")
            run.until_steps(run.until_steps(0) + STEPS_MORE)
            run.one.power_off()
            run.until_said("host one is lost: no answer")
            run.until_steps(run.until_steps(0) + STEPS_MORE)  # with all processes on the other host
            run.power_on(run.one)
            run.until_said("host one is back")
            long.let_end()
            code = process.wait(START_S)
        finally:
            process.kill()
            process.wait()
        eventually(lambda: not run.left(), "nothing is left", told=run.left)
        first = [host.first_pid for host in hosts.by_name.values()]
    report = json.loads((run.run_dir / "report.json").read_text())
    assert violations(Ended(code, report, run.said(), (), run.run_dir), expected) == []
    assert report["worker_restarts"] >= 4
    started = run.said().partition("every shard is up")[0]
    assert all(f"shard-{number} started ({host.address}:" in started for number, host in enumerate([run.one, run.two]))
    transports = re.findall(r"shard=(\d) kind=(\w+)", (run.run_dir / "logs" / "worker-0.log").read_text())
    assert sorted(transports[:2]) == [("0", "shm"), ("1", "tcp")], "shard 0 is on its host"
    eventually(lambda: not any(map(_command, first)), "the hosts are gone")
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
