"""A whole job on IPv6, inside TLS, in a range of ports, past proxies that are dead; and what the doctor says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parashard.doctor.service import look_at_service
from parashard.process.addresses import split_address
from parashard.security.credentials import Credentials
from parashard.security.identity import Role
from support.certificates import Certificates
from support.cluster_run import DEADLINE_S, ClusterRun, sets
from support.free_ports import free_ports
from support.ipv6 import needs_ipv6
from support.long_job import LongJob

PORTS = 16


@needs_ipv6
@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_a_job_on_ipv6_stays_in_its_ports_and_passes_by_proxies(
    start_run: Callable[..., ClusterRun],
    certificates: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
        for spelled in (name, name.upper()):
            monkeypatch.setenv(spelled, "http://127.0.0.1:9")  # nobody listens there
        monkeypatch.delenv("no_proxy", raising=False)
    first = free_ports(PORTS, "::1")
    ports = range(first, first + PORTS)
    job = LongJob(tmp_path, "ledger.toml", quick_until=200)
    placed = {"cluster__host": "::1", "cluster__port": f"{first}-{ports[-1]}", "cluster__transport": transport}
    tls = str(certificates.folder(list(Role)))
    run = start_run(job.file, "--tls-dir", tls, *sets(job__epochs=2, **placed))
    run.credentials = Credentials(Path(tls))
    run.wait_for_steps(100)
    status = run.status()
    told = [status.http_address, *(shard.address for shard in status.shards), *(w.http_address for w in status.workers)]
    told += [shard.http_address for shard in status.shards]
    assert all(split_address(address)[0] == "::1" for address in told), told
    assert all(split_address(address)[1] in ports for address in told), told
    assert split_address(status.http_address)[1] == ports[1]
    command = [sys.executable, "-m", "parashard", "doctor", str(run.dir), "--tls-dir", tls, "--json"]
    doctor = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert doctor.returncode == 0, (doctor.stdout, doctor.stderr)
    seen = json.loads(doctor.stdout)["measured"]
    assert (seen["role"], seen["tls"]) == ("coordinator", True)
    second = ["shard-0 by TCP", "shard-1 by TCP"] if transport == "tcp" else []
    assert sorted(seen["others"]) == sorted(["shard-0", "shard-1", *second, "the status page"])
    for name in ("shard-0", *second):
        shard = look_at_service(seen["others"][name]["address"], run.credentials)
        assert (shard.role, shard.problem, bool(shard.note)) == ("shard", "", name in second)
    job.let_end()
    report = run.report()
    assert (report["ledger_wrong"], report["state"]) == (0, "done")
    assert f"kind={transport}" in (run.dir / "logs" / "worker-0.log").read_text()
