"""`parashard run --on ssh:HOSTFILE`, behind a real sshd: kills, Ctrl-C, lost hosts; and nothing is left on any host."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from parashard.launch.run import INTERRUPTED
from support.cluster_run import DEADLINE_S, ClusterRun, eventually, sets
from support.command_run import ROOT
from support.long_job import LongJob
from support.sshd import Sshd

Start = Callable[..., ClusterRun]
OFTEN = sets(checkpoint__every_s=0.5)
PAGE = ROOT / "docs" / "hosts.md"
PLACES = {"192.0.2.1": "127.0.0.1", "192.0.2.2": "127.0.0.1", "/mnt/shared": "{}/shared", "/srv": "{}/two"}


@pytest.fixture
def ledger(tmp_path: Path) -> LongJob:
    """Return a ledger that does not end before it is let."""
    return LongJob(tmp_path, "ledger.toml", 600)


def ended_well(run: ClusterRun) -> None:
    report = run.report()
    assert (report["ledger_wrong"], run.left_over()) == (0, [])


def test_lost_hosts_and_a_killed_coordinator_lose_nothing(sshd: Sshd, start_run: Start, ledger: LongJob) -> None:
    hosts = sshd.hosts("one", "two", "three")
    run = start_run(ledger.file, "--on", f"ssh:{hosts}", *OFTEN, *sets(job__epochs=1), "--workers", "3")
    for number in range(1, 4):
        run.wait_for_steps(150 * number)
        keepers = eventually(sshd.keepers, "a host is there")
        os.kill(keepers[number % len(keepers)], signal.SIGKILL)
        if number == 2:
            run.kill("coordinator", "coordinator")
    run.wait_for_steps(600)
    ledger.let_end()
    ended_well(run)
    logs = {file.name for file in (run.dir / "logs").iterdir()}
    assert {"coordinator.log", "shard-0.log", "shard-1.log", "worker-2.log", "host-one.log"} <= logs


def test_a_killed_launcher_leaves_nothing_and_the_run_goes_on(sshd: Sshd, start_run: Start, ledger: LongJob) -> None:
    arguments = (ledger.file, "--on", f"ssh:{sshd.hosts('one', 'two')}", *OFTEN, *sets(job__epochs=1))
    run = start_run(*arguments)
    run.wait_for_steps(300)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    eventually(lambda: not sshd.left(), "the hosts have noticed", told=sshd.left)
    run.wait_until_all_exited()
    ledger.let_end()
    ended_well(start_run(*arguments, "--resume", run_dir=run.dir))


def test_ctrl_c_saves_and_leaves_nothing(sshd: Sshd, start_run: Start, ledger: LongJob) -> None:
    run = start_run(ledger.file, "--on", f"ssh:{sshd.hosts('one', 'two')}", *OFTEN)
    run.wait_for_steps(300)
    run.process.send_signal(signal.SIGINT)
    run.wait()
    assert run.process.returncode == INTERRUPTED
    assert "(saved" in run.complaint()
    assert (sshd.processes(), run.left_over()) == ({}, [])


@pytest.mark.full("a page from its first to its last command; test_ssh_hosts.py has what its commands do")
def test_every_command_of_the_page_about_hosts_runs(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's machines are this one: two folders, in which the same files lie."""
    text = PAGE.read_text()
    for machine in ("one", "two"):
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "job.toml").write_text((ROOT / "examples" / "digits.toml").read_text())
        (tmp_path / machine / "hosts").write_text(re.search(r"```text\n(.*?)```", text, re.DOTALL)[1])  # type: ignore[index]
    monkeypatch.setenv("PARASHARD_JOB__EPOCHS", "1")
    started: list[subprocess.Popen[bytes]] = []
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    assert len(lines) >= 8
    try:
        for line in lines:
            said, _, where = line.partition("  # on ")
            here, command = tmp_path / (where.strip() or "one"), said
            for theirs, ours in PLACES.items():
                command = command.replace(theirs, ours.format(tmp_path))
            process = subprocess.Popen(["/bin/sh", "-c", command], cwd=here, start_new_session=True)
            started.append(process)
            if "parashard run" in command and "--workers 0" in command:
                continue  # it waits for the next command
            assert process.wait(DEADLINE_S) == 0, line
        assert [process.wait(DEADLINE_S) for process in started] == [0] * len(lines)
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
