"""Whole jobs inside mutual TLS: no push is lost while certificates change, and a wrong certificate changes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parashard.errors import NotAllowed, ParashardError
from parashard.process.shell import ExitCode
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.security.credentials import Credentials
from parashard.security.identity import Role
from support.certificates import EXPIRED, WRONG_CA, Certificates
from support.cluster_run import DEADLINE_S, ClusterRun, eventually, sets
from support.command_run import ROOT
from support.long_job import LongJob

Start = Callable[..., ClusterRun]


def parashard(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parashard", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.smoke
def test_certificates_change_and_no_push_is_lost(start_run: Start, certificates: Certificates, tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    certificates.renew(folder, list(Role))
    job = LongJob(tmp_path, "ledger.toml", quick_until=1000)
    sizes = sets(job__epochs=1, cluster__transport="tcp")  # 1,024 steps
    run = start_run(job.file, "--tls-dir", str(folder), *sizes)
    run.credentials = Credentials(folder)
    log = run.dir / "logs" / "worker-0.log"
    for steps in (50, 400, 800):
        run.wait_for_steps(steps)
        certificates.renew(folder, list(Role))
    eventually(lambda: "credentials-renewed" in log.read_text(), "worker-0 has a new certificate", told=log.read_text)
    job.let_end()
    report = run.report()
    assert (report["ledger_wrong"], report["state"]) == (0, "done")
    assert "kind=tcp" in log.read_text()


def test_a_job_goes_on_while_expired_certificates_keep_processes_from_coming_back(
    start_run: Start, certificates: Certificates, tmp_path: Path
) -> None:
    folder = tmp_path / "tls"
    certificates.renew(folder, list(Role))
    job = LongJob(tmp_path, "ledger.toml", quick_until=50)
    run = start_run(job.file, "--tls-dir", str(folder))
    run.credentials = Credentials(folder)
    run.wait_for_steps(50)
    certificates.renew(folder, list(Role), EXPIRED)  # who runs already has the good one in memory
    run.kill("worker", "worker-0")

    def refused() -> bool:
        return any(event.startswith("worker-0 ended") and "expired at" in event for event in run.status().events)

    eventually(refused, "worker-0 has tried to come back")
    run.wait_for_steps(run.status().steps_complete + 5)
    run.kill("coordinator", "coordinator")
    log = run.dir / "logs" / "coordinator.log"
    eventually(lambda: "exit_code=75" in log.read_text(), "the coordinator has tried to come back")
    certificates.renew(folder, list(Role))
    run.wait_for_steps(run.status().steps_complete + 5)
    back = eventually(lambda: [w for w in run.status().workers if w.name == "worker-0"], "worker-0 is back")
    assert back[0].live


def test_only_an_operator_asks_and_scales(start_run: Start, certificates: Certificates, tmp_path: Path) -> None:
    job = LongJob(tmp_path, "ledger.toml", quick_until=10)
    run = start_run(job.file, "--tls-dir", str(certificates.folder(list(Role))))
    run.credentials = certificates.of(Role.OPERATOR)
    run.until(lambda status: len(status.workers) == 3, "every worker has joined")
    place = str(run.dir)
    assert parashard("status", place, "--tls-dir", str(certificates.folder(Role.OPERATOR))).returncode == ExitCode.DONE

    def refused(credentials: Credentials | None) -> ParashardError:
        client = CoordinatorClient(find_coordinator(place), credentials=credentials)
        with pytest.raises(ParashardError) as caught:
            client.scale(0)
        client.close()
        return caught.value

    assert isinstance(refused(certificates.of(Role.WORKER)), NotAllowed)
    for credentials in (Credentials(certificates.folder(Role.OPERATOR, WRONG_CA)), None):
        assert "a missing certificate, or one that the other side refuses" in str(refused(credentials))
    status = run.status()
    assert (len(status.workers), status.workers_wanted) == (3, 3)


def test_a_cluster_needs_all_roles_and_off_loopback_needs_credentials(
    certificates: Certificates, tmp_path: Path
) -> None:
    run = ("run", "examples/ledger.toml", "--run-dir", str(tmp_path / "run"))
    few = parashard(*run, "--tls-dir", str(certificates.folder(Role.WORKER)))
    assert few.returncode == ExitCode.CONFIGURATION
    assert "a local cluster also needs coordinator, operator, shard" in few.stderr
    open_to_all = parashard(*run, *sets(cluster__host="192.0.2.1"))
    assert open_to_all.returncode == ExitCode.CONFIGURATION
    assert "host '192.0.2.1' is off loopback, and there are no credentials" in open_to_all.stderr
