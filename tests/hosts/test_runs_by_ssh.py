"""`parashard run --on ssh:HOSTFILE` on hosts with addresses of their own, which are lost meanwhile; nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from host_campaign import START_S  # which lets `job_run` and `long_model` be found
from hosted_job import status_at
from job_run import NOTHING_EXPECTED, Ended, Expected, fault_free, sets, violations
from network_hosts import Host, Hosts

from support.long_job import LongJob
from support.sshd import Sshd
from support.waiting import eventually

HOME, ONE, TWO = "home", "one", "two"
QUICK_STEPS = 60
STEPS_MORE = 8
eventually = partial(eventually, deadline_s=START_S, poll_s=0.2)
pytestmark = [
    pytest.mark.full("root, namespaces, an sshd on each of two hosts, and minutes; test_ssh_runs.py has one address"),
    pytest.mark.skipif(os.environ.get("PARASHARD_HOSTS") != "1", reason="takes minutes: `make test-hosts` asks for it"),
    pytest.mark.timeout(900),
]


class RunBySsh:
    """A command on the host `home` that runs a job on the hosts `one` and `two`; each of these has an sshd."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.run_dir = hosts, folder / "run"
        self.home, self.one, self.two = (hosts.by_name[name] for name in (HOME, ONE, TWO))
        (folder / "sshd").mkdir()
        self.sshd = Sshd(folder / "sshd", elsewhere=True)
        self._folder, self._log = folder, (folder / "log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        for host in (self.one, self.two):
            host.run("mount", "-t", "tmpfs", "tmpfs", str(self.sshd.tmp))
            self.serve(host)
            ssh = self.home.enter([str(self.sshd.bin_ / "ssh"), host.name, "true"])
            eventually(
                lambda ssh=ssh: subprocess.run(ssh, stderr=self._log, check=False).returncode == 0, "sshd answers"
            )

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

    def start(self, *words: str) -> None:
        """Start the command. Checkpoints are in the run's folder: hosts share the disk."""
        hosts = self.sshd.hosts(ONE, TWO)
        command = self.at_home("run", *words, "--on", f"ssh:{hosts}", "--run-dir", str(self.run_dir))
        with (self._folder / "said").open("wb") as said:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)

    def said(self) -> str:
        """Return what the command has said so far."""
        return (self._folder / "said").read_text()

    def status(self) -> dict[str, Any]:
        """Return what the coordinator says of the job; empty: nothing now."""
        with suppress(FileNotFoundError):
            where = json.loads((self.run_dir / "coordinator.json").read_text())
            return status_at(self.home, where["http"]) or {}
        return {}

    def more_steps(self, count: int) -> None:
        """Wait until so many more steps are complete."""
        before = int(eventually(self.status, "the coordinator answers", told=self.said)["steps_complete"])
        eventually(
            lambda: int(self.status().get("steps_complete", 0)) >= before + count, f"{count} steps", told=self.said
        )

    def until_said(self, text: str) -> None:
        """Wait until the command has said something."""
        eventually(lambda: text in self.said(), text, told=self.said)

    def is_placed(self) -> None:
        """Check that each host has a shard at its address, which only workers beside it reach by shared memory."""
        for number, host in enumerate([self.one, self.two]):
            assert f"shard-{number} started ({host.address}:" in self.said()
        transports = re.findall(r"shard=(\d) kind=(\w+)", (self.run_dir / "logs" / "worker-0.log").read_text())
        assert sorted(transports) == [("0", "shm"), ("1", "tcp")]

    def lose_processes(self, host: Host) -> None:
        """Kill what runs behind a host's sshd, but for the shells that remove what keepers had; it comes back."""
        for pid in {*host.pids()} & {pid for pid, words in self.sshd.processes().items() if words[0] != "/bin/sh"}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.until_said(f"host {host.name} is lost")
        self.until_said(f"host {host.name} is back")

    def power_on(self, host: Host) -> None:
        """Let a host start again, as one does that keeps no temporary files."""
        host.run("find", str(self.sshd.tmp), "-mindepth", "1", "-delete")
        host.power_on()
        self.serve(host)

    def violations(self, expected: Expected = NOTHING_EXPECTED) -> list[str]:
        """Wait for the end of the job, and until nothing is left; return the promises that it broke."""
        assert self._process is not None
        code = self._process.wait(START_S)
        eventually(lambda: not self.left(), "nothing is left", told=self.left)
        report = json.loads((self.run_dir / "report.json").read_text())
        assert report["worker_restarts"] >= 4
        return violations(Ended(code, report, self.said(), (), self.run_dir), expected)

    def left(self) -> list[object]:
        """Return what is there still, but for the servers: processes, shared memory and temporary files."""
        found: list[object] = []
        for host in self.hosts.by_name.values():
            root = Path(f"/proc/{host.first_pid}/root")
            for folder in (root / "dev" / "shm", root / self.sshd.tmp.relative_to("/")):
                found += folder.iterdir()
            commands = (_command(pid) for pid in host.pids())
            found += [command for command in commands if command and not command.startswith(b"sshd: ")]
        return found

    def end(self) -> None:
        """End the command; what it started ends with the hosts."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.fixture
def by_ssh(hosts_possible: None, tmp_path: Path) -> Iterator[RunBySsh]:
    """Return three hosts and a way to run a job on two of them; they are gone afterwards."""
    with Hosts((HOME, ONE, TWO), tmp_path) as hosts:
        run = RunBySsh(hosts, tmp_path)
        try:
            yield run
        finally:
            run.end()
    first = [host.first_pid for host in hosts.by_name.values()]
    eventually(lambda: not any(map(_command, first)), "the hosts are gone")
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def test_digits_have_the_same_bits_though_a_host_loses_its_processes_and_one_its_power(
    by_ssh: RunBySsh, tmp_path: Path
) -> None:
    long = LongJob(tmp_path, "digits.toml", sys.maxsize)
    job = [long.file, *sets({"cluster.workers": 4, "job.epochs": 16})]
    expected = fault_free(job, "sync:4", tmp_path / "fault-free")
    long.quick_until(QUICK_STEPS)
    by_ssh.start(*job, "--consistency", "sync:4", "--set", "cluster.insecure=true")
    by_ssh.until_said("every shard is up")
    by_ssh.more_steps(QUICK_STEPS)
    by_ssh.is_placed()
    by_ssh.lose_processes(by_ssh.two)
    by_ssh.more_steps(STEPS_MORE)
    by_ssh.one.power_off()
    by_ssh.until_said("host one is lost: no answer")
    by_ssh.more_steps(STEPS_MORE)  # with all processes on the other host
    by_ssh.power_on(by_ssh.one)
    by_ssh.until_said("host one is back")
    long.let_end()
    assert by_ssh.violations(expected) == []


def test_the_ledger_inside_tls_counts_right_though_a_host_moves_and_the_launchers_loses_its_power(
    by_ssh: RunBySsh, tmp_path: Path
) -> None:
    long = LongJob(tmp_path, "ledger.toml", QUICK_STEPS)
    job = [long.file, *sets({"cluster.workers": 4, "job.epochs": 1}), *by_ssh.certified()]
    by_ssh.start(*job)
    by_ssh.until_said("every shard is up")
    by_ssh.more_steps(QUICK_STEPS)
    by_ssh.is_placed()
    by_ssh.lose_processes(by_ssh.two)
    by_ssh.more_steps(STEPS_MORE)
    by_ssh.hosts.move(ONE)
    by_ssh.until_said("host one is lost: no answer")
    by_ssh.until_said("host one is back")  # with a certificate for its new address
    by_ssh.more_steps(STEPS_MORE)
    by_ssh.home.power_off()
    eventually(lambda: not by_ssh.sshd.keepers(), "the hosts have noticed that nobody is there")
    by_ssh.home.power_on()
    by_ssh.start(*job, "--resume")
    by_ssh.until_said(f"started ({by_ssh.one.address}:")
    by_ssh.more_steps(STEPS_MORE)
    long.let_end()
    assert by_ssh.violations() == []
