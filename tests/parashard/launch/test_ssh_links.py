"""The link to one host, over a shell script in the place of `ssh`: what is sent, and when it is given up."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parashard.errors import ConfigurationError
from parashard.job.load import load_job
from parashard.launch import hosts as hosts_module
from parashard.launch.host_file import NamedHost
from parashard.launch.hosts import SshHosts, _Link
from parashard.launch.runs import Run
from support.small_job import SMALL_JOB
from support.waiting import eventually

LONG = b"x" * 300_000
"""More than a pipe has room for."""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that puts a shell script in the place of `ssh`."""

    def put(script: str) -> None:
        (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "ssh").chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put


@pytest.fixture
def link(tmp_path: Path, ssh: Callable[[str], None]) -> Iterator[Callable[[str, bytes], _Link]]:
    """Return a function that opens a link to such a script; it ends with the test."""
    opened: list[_Link] = []

    def start(script: str, begin: bytes) -> _Link:
        ssh(script)
        opened.append(_Link(NamedHost("one", sys.executable), begin, tmp_path / "host-one.log"))
        return opened[-1]

    yield start
    for one in opened:
        one.close(0.0)


def test_an_ssh_that_has_ended_cuts_its_link_whatever_a_script_has_made_of_sigpipe(
    link: Callable[[str, bytes], _Link],
) -> None:
    signals: list[object] = []
    before = signal.signal(signal.SIGPIPE, lambda *given: signals.append(given))
    try:
        ended = link("exit 3", b"{}")
        eventually(lambda: ended.exit_code() is not None, "ssh has ended")
        ended.send(b"{}")
        assert ended.why_cut(None) == "it has closed the link"
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert not signals


def test_a_job_that_is_longer_than_a_pipe_reaches_its_host(link: Callable[[str, bytes], _Link]) -> None:
    reads = link('read -r line; echo "{\\"length\\": ${#line}}"', LONG)
    found: list[dict[str, Any]] = []
    eventually(lambda: bool(found.extend(reads.read()) or found), "the host has read all of it")
    assert (found, reads.why_cut(None)) == ([{"length": len(LONG)}], "")


def test_a_host_that_reads_nothing_is_given_up(
    link: Callable[[str, bytes], _Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "CONNECT_S", 0.2)
    silent = link("exec sleep 600", LONG)
    silent._heard_s = math.inf  # as if it went on talking
    eventually(lambda: silent.why_cut(None) != "", "it is given up")
    assert silent.why_cut(None) == "it has read nothing for 0 s"


def test_the_links_of_silent_hosts_end_together(
    tmp_path: Path, ssh: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[float] = []

    class Noting(_Link):
        def close(self, until_s: float) -> None:
            deadlines.append(until_s)
            super().close(until_s)

    ssh("exec sleep 600")
    monkeypatch.setattr(hosts_module, "_Link", Noting)
    monkeypatch.setattr(hosts_module, "CLOSE_S", 0.3)
    monkeypatch.setattr(hosts_module, "CONNECT_S", 0.1)
    (tmp_path / "run").mkdir()
    (tmp_path / "job.toml").write_text(SMALL_JOB)
    run = Run(load_job(tmp_path / "job.toml", environ={}), tmp_path / "run")
    named = [NamedHost(f"host{number}", sys.executable) for number in range(3)]
    with pytest.raises(ConfigurationError, match=r"host host0: .*; host host1: .*; host host2: "):
        SshHosts(run, named, print).connect()
    assert len(deadlines) == 3
    assert len(set(deadlines)) == 1, "of all together"
