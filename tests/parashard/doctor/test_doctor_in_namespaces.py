"""Two hosts of two interfaces each, as network namespaces: the job's interface is used, and a firewall is found."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parashard.doctor.hosts import HERE

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 120.0
SSH = """#!/bin/sh
for word; do command=$word; done
SSH_CONNECTION="10.95.0.1 5000 10.95.0.2 22" exec ip netns exec {there} sh -c "$command"
"""
FIREWALL = """table inet t {{
 chain input {{
  type filter hook input priority 0;
  iifname "eth1" tcp flags syn / syn,ack {verdict};
 }}
}}
"""

pytestmark = [
    pytest.mark.full("network namespaces, of root"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]


def run(*words: str, said: str = "") -> None:
    subprocess.run(words, input=said, check=True, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture
def there(tmp_path: Path) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return another host's namespace, and a function that runs the doctor on this one; eth0 is that of ssh."""
    names = here, there = f"psd{os.getpid()}a", f"psd{os.getpid()}b"
    try:
        for name in names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for number in (0, 1):
            eth = f"eth{number}"
            run("ip", "-n", here, "link", "add", eth, "type", "veth", "peer", "name", eth, "netns", there)
            for host, name in enumerate(names, 1):
                run("ip", "-n", name, "addr", "add", f"10.95.{number}.{host}/24", "dev", eth)
                run("ip", "-n", name, "link", "set", eth, "up")
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "ssh").write_text(SSH.format(there=there))
        (tmp_path / "bin" / "ssh").chmod(stat.S_IRWXU)
        (tmp_path / "hosts").write_text("node2\n")
        environ = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

        def doctor(*words: str, **more: str) -> Any:
            command = [sys.executable, "-m", "parashard", "doctor", str(tmp_path / "hosts"), "--json", *words]
            ended = subprocess.run(
                ["ip", "netns", "exec", here, *command],
                env=environ | more,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
            assert ended.returncode in (0, 1), ended.stderr
            return json.loads(ended.stdout)

        yield there, doctor
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=DEADLINE_S)


def test_a_job_listens_on_its_interface_and_in_its_ports(there):
    _, doctor = there
    of_ssh = doctor()["measured"]
    assert of_ssh["hosts"][1]["listens_at"].startswith("10.95.0.2:")
    job = {"PARASHARD_CLUSTER__INTERFACE": "eth1", "PARASHARD_CLUSTER__PORT": '"7400-7419"'}
    seen = doctor("--job", "examples/digits.toml", **job)["measured"]
    assert [host["listens_at"] for host in seen["hosts"]] == ["10.95.1.1:7400", "10.95.1.2:7402"]
    assert seen["links"]["node2"][HERE]["kind"] == seen["links"][HERE]["node2"]["kind"] == "open"
    by_network = doctor("--job", "examples/digits.toml", PARASHARD_CLUSTER__INTERFACE='"10.95.1.0/24"')["measured"]
    assert by_network["hosts"][1]["listens_at"].startswith("10.95.1.2:")
    for host, here in (("127.0.0.1", "[::]:"), ("10.95.1.1", "10.95.1.1:")):  # an address is that of this machine
        routed = doctor("--job", "examples/digits.toml", PARASHARD_CLUSTER__HOST=host)["measured"]
        assert routed["hosts"][0]["listens_at"].startswith(here)
        assert routed["hosts"][1]["listens_at"].startswith("10.95.0.2:")
        assert routed["links"]["node2"][HERE]["kind"] == routed["links"][HERE]["node2"]["kind"] == "open"


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nftables")
@pytest.mark.parametrize(("verdict", "kind"), [("drop", "silent"), ("reject with tcp reset", "refused")])
def test_a_firewall_in_one_direction_is_told_by_direction(there, verdict, kind):
    name, doctor = there
    run("ip", "netns", "exec", name, "nft", "-f", "-", said=FIREWALL.format(verdict=verdict))
    found = doctor("--job", "examples/digits.toml", PARASHARD_CLUSTER__INTERFACE="eth1")
    assert found["measured"]["links"][HERE]["node2"]["kind"] == kind
    assert found["measured"]["links"]["node2"][HERE]["kind"] == "open"
    (problem,) = [one for one in found["findings"] if one["severity"] == "problem"]
    assert problem["where"].startswith(f"{HERE} to node2 at 10.95.1.2:")
    assert "the other direction works" in problem["text"]
