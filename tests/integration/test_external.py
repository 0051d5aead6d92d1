"""Processes with an external launcher, such as compose: they end by themselves, with the job's exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parashard.launch.local_cluster import MODULES
from parashard.process.shell import ExitCode
from parashard.protocol.coordinator_client import ADDRESS_FILE, coordinator_in
from parashard.store import open_store
from support.cluster_run import DEADLINE_S, eventually
from support.command_run import ROOT
from support.ipv6 import needs_ipv6
from support.report_oracle import unsaved

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a service as a user would by hand; it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(role: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", MODULES[role], *arguments]
        started.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "host", [pytest.param("127.0.0.1", marks=pytest.mark.smoke), pytest.param("::1", marks=needs_ipv6)]
)
def test_all_processes_without_a_launcher_end_by_themselves_when_the_job_is_done(start, tmp_path, host):
    sets = ("job.epochs=1", "cluster.launcher=external", "cluster.shards=1", "cluster.workers=1")
    coordinator = start(
        *("coordinator", "--job", "examples/digits.toml", "--run-dir", str(tmp_path), "--run-id", "external"),
        *(word for text in sets for word in ("--set", text)),
        *("--linger-s", "5"),  # in which the shard, that asks once a second, hears of the end
        *("--host", host),
    )
    eventually((tmp_path / ADDRESS_FILE).exists, "the coordinator serves")  # others wait for it, but not for ever
    shard = start("shard", "--connect", str(tmp_path), "--index", "0", "--linger-s", "0", "--host", host)
    worker = start("worker", "--connect", str(tmp_path), "--host", "::1" if ":" in host else "localhost")
    assert worker.wait(DEADLINE_S) == 0
    assert shard.wait(DEADLINE_S) == 0  # it learns of the job's end and exits by itself
    assert coordinator.wait(DEADLINE_S) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["run_id"], report["shards"], report["state"]) == ("external", 1, "done")
    assert unsaved(open_store(str(tmp_path / "checkpoints")), report) == []


def test_a_worker_of_a_job_that_has_failed_says_so_and_so_does_each_that_comes_later(start, tmp_path):
    sets = ("cluster.launcher=external", "cluster.shards=1", "cluster.workers=1", "job.max_attempts=1")
    coordinator = start(
        *("coordinator", "--job", "examples/digits.toml", "--run-dir", str(tmp_path), "--run-id", "external"),
        *(word for text in (*sets, "optimizer.learning_rate=1e15") for word in ("--set", text)),
    )
    eventually((tmp_path / ADDRESS_FILE).exists, "the coordinator serves")
    shard = start("shard", "--connect", str(tmp_path), "--index", "0")
    worker = start("worker", "--connect", str(tmp_path))
    assert worker.wait(DEADLINE_S) == ExitCode.JOB_FAILED
    late = start("worker", "--connect", str(tmp_path))
    assert late.wait(DEADLINE_S) == ExitCode.JOB_FAILED
    assert "the job has failed" in late.stderr.read()
    assert [process.poll() for process in (coordinator, shard)] == [None, None], "they stay, to be asked"


def test_processes_whose_coordinator_stays_away_end_as_those_that_were_asked_to(start, tmp_path):
    sets = ("job.epochs=500", "cluster.launcher=external", "cluster.shards=1", "cluster.workers=1")
    coordinator = start(
        *("coordinator", "--job", "examples/ledger.toml", "--run-dir", str(tmp_path), "--run-id", "external"),
        *(word for text in sets for word in ("--set", text)),
    )
    eventually((tmp_path / ADDRESS_FILE).exists, "the coordinator serves")
    shard = start("shard", "--connect", str(tmp_path), "--index", "0", "--give-up-s", "3")
    worker = start("worker", "--connect", str(tmp_path), "--give-up-s", "3")  # over what an answer may take
    history = tmp_path / "history.jsonl"
    eventually(lambda: history.exists() and '"steps_complete": 1' in history.read_text(), "the job is on its way")
    coordinator.kill()
    late = start("worker", "--connect", coordinator_in(tmp_path)["address"], "--give-up-s", "1")
    assert [process.wait(DEADLINE_S) for process in (shard, worker, late)] == [0, 0, 0]
    assert "event=giving-up" in late.stderr.read()
    assert list(tmp_path.glob("checkpoints/shards/p0001/s0000/i00000001-*/manifest.json")), "it has saved what it had"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--set", "cluster.shards=0"), "cluster.shards"),
        (("--linger-s", "-1"), "-1 is no number of seconds"),
    ],
)
def test_a_mistake_on_its_command_line_is_reported_at_once(start, tmp_path, arguments, complaint):
    coordinator = start("coordinator", "--job", "examples/digits.toml", "--run-dir", str(tmp_path), *arguments)
    _, said = coordinator.communicate(timeout=DEADLINE_S)
    assert coordinator.returncode == 2
    assert complaint in said
    assert "Traceback" not in said
