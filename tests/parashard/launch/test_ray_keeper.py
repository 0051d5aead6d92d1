"""What an actor of Ray does on its node, without Ray: its child has a key that was made here, or does not start."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from parashard.launch import ray_keeper
from parashard.launch.ray_keeper import News, ProcessSpec, RayKeeper
from parashard.launch.starting import write_probe
from parashard.process.shell import ExitCode
from parashard.security import signing
from parashard.security.credentials import load
from parashard.security.identity import OF_A_JOB, Identity, Role
from parashard.security.signing import Signer
from support.certificates import Certificates
from support.starter_conformance import CHILDREN, MODULE, pid_in
from support.waiting import eventually

SHARD = Identity(Role.SHARD, "shard-0")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessSpec:
    """Return the spec to start a child that waits, inside TLS, on the node `a`."""
    context = SimpleNamespace(get_node_id=lambda: "a", runtime_env={})
    ray = SimpleNamespace(
        get_runtime_context=lambda: context, util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.7")
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_keeper, "_log_folder", lambda: tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(CHILDREN))
    monkeypatch.chdir(tmp_path)  # where an actor goes, too
    words = ["wait", str(tmp_path / "up"), "--host", "127.0.0.1", "--tls-dir", "/the/driver's"]
    store = str(tmp_path / "store")
    return ProcessSpec(
        name="shard-0",
        module=MODULE,
        words=words,
        host="",
        variables={},
        run_dir=str(tmp_path / "run"),
        folder=str(tmp_path),
        script=[],
        store=store,
        probe=write_probe(store, tmp_path / "run"),
        advice="",
        identity=SHARD.uri,
    )


def started(spec: ProcessSpec) -> RayKeeper:
    return RayKeeper(json.dumps(spec._asdict()))


def news(keeper: RayKeeper) -> News:
    return News(**json.loads(keeper.news(0)))


def test_a_child_starts_with_a_key_of_its_own_once_its_certificate_is_there(
    spec: ProcessSpec, tmp_path: Path, certificates: Certificates
) -> None:
    keeper = started(spec)
    told = news(keeper)
    assert (told.node, told.host, told.exit_code, "PRIVATE" in told.request) == ("a", "127.0.0.7", None, False)
    assert not (tmp_path / "up").exists()
    answer = Signer(certificates.authority, certificates.of(*OF_A_JOB)).answer(told.request, [SHARD], [told.host])
    keeper.take_certificate(json.dumps(answer))
    keeper.take_certificate(json.dumps(answer))  # a call may come twice
    pid = pid_in(tmp_path / "up")
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    assert words[words.index("--host") + 1] == "127.0.0.7"
    folder = Path(words[words.index("--tls-dir") + 1])
    assert load(folder).identities == (SHARD,)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder / "key.pem", folder.parent)]
    assert modes == [0o600, 0o700]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: news(keeper).exit_code == -signal.SIGKILL, "its end is told")


def test_a_child_that_is_asked_to_end_before_it_has_a_certificate_ends_once_it_has_started(
    spec: ProcessSpec, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_keeper, "NEWS_S", 0.0)
    keeper = started(spec)
    told = eventually(lambda: (found := news(keeper)).request and found, "it asks for a certificate")
    keeper.ask_to_end()
    keeper.ask_to_end()  # a call may come twice
    answer = Signer(certificates.authority, certificates.of(*OF_A_JOB)).answer(told.request, [SHARD], [told.host])
    keeper.take_certificate(json.dumps(answer))
    eventually(lambda: news(keeper).exit_code is not None, "its end is told")


def test_what_a_killed_launcher_left_in_the_store_the_next_one_of_the_run_replaces(tmp_path: Path) -> None:
    store = tmp_path / "store"
    probes = [write_probe(str(store), tmp_path / name) for name in ("run", "run", "another")]
    assert probes[0] == probes[1] != probes[2]
    assert sorted(os.listdir(store)) == sorted(set(probes))


def test_a_child_whose_request_is_not_answered_ends_in_a_sentence_and_may_be_started_again(
    spec: ProcessSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing, "ANSWER_S", 0.0)
    keeper = started(spec)
    told = eventually(lambda: (found := news(keeper)).exit_code is not None and found, "its end is told")
    assert told.exit_code == ExitCode.RETRY
    assert "on the node 127.0.0.7 of Ray: no answer to its request for a certificate within 0 s" in told.reason
    assert not (tmp_path / "up").exists()


def test_an_error_that_nobody_expects_is_an_end_with_its_kind(
    spec: ProcessSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_keeper, "NEWS_S", 0.0)
    monkeypatch.setattr(ray_keeper, "_check_store", no_thread)
    keeper = started(spec)
    told = eventually(lambda: (found := news(keeper)).exit_code is not None and found, "its end is told")
    assert told.exit_code == ExitCode.FAILED
    assert told.reason == "on the node 127.0.0.7 of Ray: RuntimeError: can't start new thread"


def no_thread(_: ProcessSpec) -> None:
    raise RuntimeError("can't start new thread")
