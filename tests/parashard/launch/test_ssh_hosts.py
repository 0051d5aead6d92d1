"""Hosts by ssh: what every starter promises, behind a real sshd; which host gets what; what is wrong, in words."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from parashard import __version__
from parashard.errors import ConfigurationError
from parashard.job.load import load_job
from parashard.launch import hosts as hosts_module
from parashard.launch import keeper as keeper_module
from parashard.launch.host_file import NamedHost
from parashard.launch.hosts import SshHosts, _Link, host_for, identities_of, launcher_address, open_hosts
from parashard.launch.keeper import Keeper
from parashard.launch.runs import Run
from parashard.process.addresses import boot_id
from parashard.process.shell import ExitCode
from parashard.security.credentials import Credentials, load
from parashard.security.identity import OF_A_JOB, Identity, Role
from parashard.security.signing import LocalKey
from support.certificates import Certificates
from support.small_job import SMALL_JOB
from support.sshd import Sshd, sshd_on_path
from support.starter_conformance import CHILDREN, StarterConformance, is_gone, pid_in, reaped
from support.waiting import eventually

WAITS = "starter_child"
FULL = pytest.mark.full("a real sshd; test_local_starter.py has the same promises for processes of this machine")


@pytest.fixture
def sshd(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    with sshd_on_path(tmp_path_factory.mktemp("sshd"), monkeypatch, PYTHONPATH=str(CHILDREN)) as server:
        yield server


def run_of(folder: Path, cluster: str = "", **more: object) -> Run:
    """Return a small run, whose store is in its folder, with lines of the table `cluster`."""
    folder.mkdir(exist_ok=True)
    (folder / "job.toml").write_text(f"{SMALL_JOB}\n[cluster]\n{cluster}\n")
    return Run(load_job(folder / "job.toml", environ={}), folder, **more)  # type: ignore[arg-type]


@pytest.fixture
def told() -> list[str]:
    """Return what the user is told."""
    return []


@pytest.fixture
def names() -> tuple[str, ...]:
    """Return the hosts that `starter` has."""
    return ("one", "two")


@pytest.fixture
def starter(sshd: Sshd, tmp_path: Path, told: list[str], names: tuple[str, ...]) -> Iterator[SshHosts]:
    """Return hosts that are connected to."""
    hosts = open_hosts(run_of(tmp_path / "run"), sshd.hosts(*names), told.append)
    yield hosts
    hosts.end(0.0)


@FULL
class TestSshHosts(StarterConformance):
    STARTER = f"""
sys.path[:0] = [{str(CHILDREN.parent)!r}, {str(Path(__file__).parent)!r}]
from test_ssh_hosts import open_hosts, run_of
starter = open_hosts(run_of(folder / "another"), Path(folder / "hosts"), print)
"""

    @pytest.fixture
    def names(self) -> tuple[str, ...]:
        return ("one",)  # a keeper takes a second to start

    @pytest.fixture(autouse=True)
    def _host_file(self, tmp_path: Path) -> None:
        (tmp_path / "hosts").write_text("one\n")

    @pytest.fixture
    def machine_goes(self, sshd: Sshd) -> Callable[[], None]:
        return lambda: [os.kill(pid, signal.SIGTERM) for pid in sshd.keepers()] and None

    @pytest.fixture
    def machine_dies(self, sshd: Sshd) -> Callable[[], None]:
        return lambda: [os.kill(pid, signal.SIGKILL) for pid in sshd.keepers()] and None


def spread(hosts: str, shards: int, workers: int) -> dict[str, str]:
    """Return the names on each host of a run that has just begun."""
    running: dict[str, str] = {}
    for role, count in (("shard", shards), ("worker", workers)):
        for number in range(count):
            running[f"{role}-{number}"] = host_for(f"{role}-{number}", list(hosts), running, count)
    return {
        host: " ".join(name.replace("shard-", "s").replace("worker-", "w") for name in running if running[name] == host)
        for host in hosts
    }


def test_each_host_has_a_share_of_shards_and_of_workers_with_neighbouring_numbers() -> None:
    assert spread("abcd", 2, 2) == {"a": "s0", "b": "s1", "c": "w0", "d": "w1"}
    assert spread("ab", 2, 4) == {"a": "s0 w0 w1", "b": "s1 w2 w3"}
    assert spread("ab", 3, 3) == {"a": "s0 s1 w2", "b": "s2 w0 w1"}


def test_what_a_lost_host_had_goes_to_those_that_have_the_least() -> None:
    running = {"shard-0": "a", "worker-0": "a", "worker-1": "b", "worker-2": "c"}
    assert host_for("shard-1", ["a", "b", "c"], running, 2) == "b"
    assert host_for("worker-3", ["a", "b", "c"], running, 3) == "b", "more than were wanted at first"


def test_the_coordinator_is_reached_where_all_hosts_see_this_machine() -> None:
    assert launcher_address("127.0.0.1", ["127.0.0.1", "::1"]) == "127.0.0.1"
    assert launcher_address("127.0.0.1", ["10.0.0.1", "127.0.0.1", "10.0.0.1"]) == "10.0.0.1"
    assert launcher_address("train.example", ["10.0.0.1", "192.0.2.1"]) == "train.example"
    with pytest.raises(ConfigurationError, match=r"at 10\.0\.0\.1, 192\.0\.2\.1: set cluster\.host"):
        launcher_address("127.0.0.1", ["192.0.2.1", "10.0.0.1"])


@FULL
def test_a_lost_host_s_processes_end_and_it_is_used_again_once_it_is_back(
    sshd: Sshd, starter: SshHosts, told: list[str], tmp_path: Path
) -> None:
    for number in range(2):
        starter.start(f"shard-{number}", WAITS, ["wait", str(tmp_path / f"up-{number}")])
    pids = [pid_in(tmp_path / f"up-{number}") for number in range(2)]
    os.kill(parent_of(pids[0]), signal.SIGKILL)
    (ended,) = reaped(starter)
    assert (ended.name, ended.exit_code, starter.running) == ("shard-0", ExitCode.RETRY, ["shard-1"])
    assert ended.reason.startswith("its host one is lost: ")
    starter.start("worker-0", WAITS, ["exit", "0"])
    assert reaped(starter)[0].name == "worker-0", "on the host that is there"
    eventually(lambda: (starter.reap(), "host one is back" in told)[1], "it is connected to again")
    starter.start("shard-0", WAITS, ["wait", str(tmp_path / "again")])
    assert parent_of(pid_in(tmp_path / "again")) != parent_of(pids[1])


@FULL
def test_a_link_that_is_silent_is_cut_by_both_sides(
    sshd: Sshd, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "LINK_S", 3.0)
    starter = open_hosts(run_of(tmp_path / "run"), sshd.hosts("one"), told.append)
    try:
        starter.start("shard-0", WAITS, ["wait", str(tmp_path / "up")])
        pid = pid_in(tmp_path / "up")
        session = parent_of(parent_of(pid))  # sshd's own, through which everything goes
        os.kill(session, signal.SIGSTOP)
        try:
            (ended,) = reaped(starter)
            assert ended.reason == "its host one is lost: no answer for 3 s"
            eventually(lambda: is_gone(pid), "the process ends on a host that hears nothing")
        finally:
            os.kill(session, signal.SIGCONT)
    finally:
        starter.end(0.0)


@FULL
def test_what_has_come_while_the_launcher_stood_still_counts_as_heard(
    sshd: Sshd, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = open_hosts(run_of(tmp_path / "run"), sshd.hosts("one"), told.append)
    try:
        starter.start("worker-0", WAITS, ["wait", str(tmp_path / "up")])
        pid_in(tmp_path / "up")
        (link,) = starter._links.values()
        eventually(lambda: select.select([link._out], [], [], 0.0)[0], "the keeper has sent a sign of life")
        link._heard_s -= 2 * hosts_module.LINK_S
        assert (starter.reap(), starter.running, told) == ([], ["worker-0"], [])
    finally:
        starter.end(0.0)


@FULL
def test_a_host_that_is_back_without_the_store_gets_no_process(
    sshd: Sshd, starter: SshHosts, told: list[str], tmp_path: Path
) -> None:
    starter.start("shard-0", WAITS, ["wait", str(tmp_path / "up")])
    store = tmp_path / "run" / "checkpoints"
    store.rename(tmp_path / "not mounted")
    store.mkdir()
    os.kill(parent_of(pid_in(tmp_path / "up")), signal.SIGKILL)
    log = tmp_path / "run" / "logs" / "host-one.log"
    eventually(lambda: (starter.reap(), starter._failures["one"] >= 2)[1], "it was tried again", told=lambda: told)
    assert "host one is back" not in told
    store.rmdir()
    (tmp_path / "not mounted").rename(store)
    eventually(lambda: (starter.reap(), "host one is back" in told)[1], "it has the store again", told=log.read_text)


def test_of_another_version_a_keeper_says_which_and_reads_nothing_else() -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "parashard.launch.keeper"],
        input=b'{"version": "0.0.0", "job": "unknown"}\n',
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (json.loads(ran.stdout)["ready"]["version"], ran.stderr) == (__version__, b"")


@FULL
def test_without_a_host_a_process_waits_and_the_user_is_told(sshd: Sshd, starter: SshHosts, told: list[str]) -> None:
    sshd.stop()
    eventually(lambda: (starter.reap(), len(told) == 2)[1], "both hosts are lost")
    starter.start("worker-0", WAITS, ["exit", "0"])
    (ended,) = reaped(starter)
    assert (ended.exit_code, ended.reason) == (
        ExitCode.IO_ERROR,
        "it cannot be started: no host can be reached now",
    )


@FULL
def test_logs_are_in_the_run_s_folder_and_nothing_stays_on_the_host(
    sshd: Sshd, starter: SshHosts, tmp_path: Path, certificates: Certificates, told: list[str]
) -> None:
    starter.start("worker-0", WAITS, ["exit", "3", "gone"])
    reaped(starter)
    assert (tmp_path / "run" / "logs" / "worker-0.log").read_text() == "gone\n"
    credentials = Credentials(certificates.folder(list(OF_A_JOB)))
    authority = f'authority = "{certificates.authority}"'
    secured = open_hosts(run_of(tmp_path / "tls", authority, credentials=credentials), sshd.hosts("one"), told.append)
    try:
        secured.start("worker-0", WAITS, ["wait", str(tmp_path / "up")])
        words = words_of(pid_in(tmp_path / "up"))
        folder = Path(words[words.index("--tls-dir") + 1])
        assert [str(one) for one in load(folder).identities] == ["shard/host-one", "worker/host-one"]
        assert (folder / "key.pem").read_bytes() != (credentials.folder / "key.pem").read_bytes()
        assert (folder.parent.stat().st_mode & 0o777, (folder / "key.pem").stat().st_mode & 0o777) == (0o700, 0o600)
        remover = next(
            pid
            for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
            if words_of(pid)[-1:] == [str(folder.parent)]
        )
        os.kill(remover, signal.SIGTERM)  # as each process of a session gets it at a shutdown
        os.kill(parent_of(pid_in(tmp_path / "up")), signal.SIGKILL)
        eventually(lambda: not folder.parent.exists(), "the certificates go, even if the keeper is killed")
    finally:
        secured.end(0.0)


@FULL
def test_a_host_that_asks_for_another_certificate_is_lost_and_gets_a_new_one_later(
    sshd: Sshd, tmp_path: Path, certificates: Certificates, told: list[str]
) -> None:
    credentials = Credentials(certificates.folder(list(OF_A_JOB)))
    authority = f'authority = "{certificates.authority}"'
    hosts = open_hosts(run_of(tmp_path / "run", authority, credentials=credentials), sshd.hosts("one"), told.append)
    try:
        hosts.start("worker-0", WAITS, ["wait", str(tmp_path / "up")])
        pid_in(tmp_path / "up")
        hosts._links["one"].request = LocalKey(tmp_path, [Identity(Role.COORDINATOR, "host-one")]).due()
        (ended,) = hosts.reap()
        assert "its request for a certificate is refused: a certificate was asked for of coordinator/" in ended.reason
        eventually(
            lambda: (hosts.reap(), "host one is back" in told and hosts._links["one"].is_certified)[1],
            "it is connected to again",
            told=lambda: told,
        )
    finally:
        hosts.end(0.0)


@FULL
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("one python=/nowhere/python", r"host one: .*/nowhere/python.* \(exit code 127\)"),
        ("one python={blind}", r"host one: does not see the checkpoint store .*/run/checkpoints \(.*allowed as checkp"),
    ],
)
def test_a_host_that_cannot_take_part_is_named_before_anything_starts(
    sshd: Sshd, tmp_path: Path, line: str, says: str
) -> None:
    blind = tmp_path / "blind"  # a host that has another folder of this name
    blind.write_text(f'#!/bin/sh\nsed -u "s#/run/checkpoints#/elsewhere#" | exec {sys.executable} "$@"\n')
    blind.chmod(0o700)
    with pytest.raises(ConfigurationError, match=says):
        open_hosts(run_of(tmp_path / "run"), sshd.hosts("two", line.format(blind=blind)), print)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == [], "no probe is left"


class Said(_Link):
    """A link without an `ssh`: what its host says, and what it is sent."""

    def __init__(self, name: str, *messages: dict[str, object]) -> None:
        self.host = NamedHost(name, sys.executable)
        self.ready, self.refused, self.leaves_s, self.is_here, self.is_certified = None, "", None, False, False
        self.request = self.address = self._broken = ""
        self.seen = "", ""
        self.messages, self.sent, self._unsent = list(messages), list[bytes](), bytearray()
        self._heard_s = time.monotonic()

    def read(self) -> list[dict[str, object]]:
        """Return the messages that have come since the last call."""
        messages, self.messages = self.messages, []
        return messages

    def exit_code(self) -> int | None:
        """It has not ended."""
        return None

    def send(self, line: bytes) -> None:
        """Keep it."""
        self.sent.append(line)

    def certified_for(self) -> list[str]:
        """Return the addresses and names of each certificate that it was sent."""
        found = []
        for one in self.sent:
            certificate = x509.load_pem_x509_certificate(json.loads(one)["certified"]["certificate"].encode())
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            found += [str(name) for kind in (x509.DNSName, x509.IPAddress) for name in names.get_values_for_type(kind)]
        return found


def ready(name: str, connection: str, boot: str = "another", host: str = "") -> dict[str, object]:
    """Return what a host says first, with a request that is in order."""
    request = LocalKey(Path("unused"), identities_of(name)).due()
    words = {"version": __version__, "store": "", "connection": connection, "boot": boot, "host": host}
    return {"ready": {**words, "request": request}}


@pytest.fixture
def secured(tmp_path: Path, certificates: Certificates, told: list[str]) -> SshHosts:
    """Return hosts of a run inside TLS, whose launcher is reached at 192.0.2.1, and of which none is connected to."""
    lines = f'host = "192.0.2.1"\nauthority = "{certificates.authority}"'
    credentials = Credentials(certificates.folder(list(OF_A_JOB)))
    named = [NamedHost(name, sys.executable) for name in ("one", "two")]
    hosts = SshHosts(run_of(tmp_path / "run", lines, credentials=credentials), named, told.append)
    hosts.launcher_address = "192.0.2.1"
    return hosts


@pytest.mark.parametrize(
    ("connection", "says"),
    [
        ("192.0.2.1 9 192.0.2.1 22", "its address is said to be 192.0.2.1, which is this machine's"),
        ("192.0.2.1 9 ::ffff:192.0.2.1 22", "its address is said to be 192.0.2.1, which is this machine's"),
        ("192.0.2.1 9 127.0.0.1 22", "its address is said to be 127.0.0.1, which is this machine's"),
        ("127.0.0.1 9 127.0.0.1 22", "its address is said to be 127.0.0.1, which is this machine's"),
        ("192.0.2.1 9 192.0.2.7 22", "its address is said to be 192.0.2.7, which is that of host two"),
        ("192.0.2.1 9 *.train.example.com 22", "its address is said to be '*.train.example.com'; allowed: an IP"),
        ("launcher 9 192.0.2.8 22", "its address is said to be 'launcher'; allowed: an IP address"),
        ("nonsense", "its connection is said to be 'nonsense'; allowed: what sshd says"),
        ("", "its connection is said to be ''; allowed: what sshd says"),
    ],
)
def test_no_host_has_a_certificate_for_an_address_that_is_another_s(
    secured: SshHosts, connection: str, says: str
) -> None:
    two, one = Said("two", ready("two", "192.0.2.1 9 192.0.2.7 22")), Said("one", ready("one", connection))
    assert (secured._take_all(two), two.certified_for()) == ("", ["192.0.2.7"])
    assert says in secured._take_all(one)
    assert (one.sent, secured._is_up(one)) == ([], False)


def test_a_host_on_this_machine_has_a_certificate_for_where_others_reach_it(secured: SshHosts) -> None:
    here = [Said(name, ready(name, "127.0.0.1 9 127.0.0.1 22", boot_id())) for name in ("one", "two")]
    for link in here:
        assert (secured._take_all(link), link.certified_for()) == ("", ["192.0.2.1"])


def test_a_host_that_has_another_address_has_a_certificate_for_that(
    tmp_path: Path, secured: SshHosts, certificates: Certificates
) -> None:
    lines = f'interface = "192.0.2.0/24"\nauthority = "{certificates.authority}"'
    secured._run = run_of(tmp_path / "run", lines)
    link = Said("one", ready("one", "10.0.0.1 9 10.0.0.2 22", host="192.0.2.7"))
    assert secured._take_all(link) == ""
    request = LocalKey(tmp_path, identities_of("one")).due()
    link.messages = [{"request": [request, "192.0.2.8"]}]
    assert (secured._take_all(link), link.certified_for()) == ("", ["192.0.2.7", "192.0.2.8"])
    link.messages = [{"request": [request, "192.0.2.1"]}]
    assert "192.0.2.1, which is this machine's" in secured._take_all(link)


def test_a_host_is_used_once_it_has_written_its_certificate_down(secured: SshHosts) -> None:
    link = secured._links["one"] = Said("one", ready("one", "192.0.2.1 9 192.0.2.7 22"))
    assert secured._take_all(link) == ""
    secured.start("shard-0", "parashard_server", [])
    secured._take_all(link)
    assert [ended.exit_code for ended in secured._ended] == [ExitCode.IO_ERROR], "it is tried again"
    link.messages = [{"has_certificate": True}]
    secured._take_all(link)
    secured.start("shard-0", "parashard_server", [])
    assert json.loads(link.sent[-1])["start"][:2] == ["shard-0", "parashard_server"]


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Keeper, Callable[[], list[Any]]]]:
    """Return a keeper, and what it has sent since the last look."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    monkeypatch.setattr(keeper_module, "own_host", lambda named: named.removeprefix("interface:"))
    identities = [identity.uri for identity in identities_of("one")]
    begin = {"identities": identities, "job": SMALL_JOB, "workers": 1, "jax": False, "host": "interface:192.0.2.7"}
    kept = Keeper(begin, tmp_path / "keeper", write)

    def sent() -> list[Any]:
        with suppress(BlockingIOError):
            return [json.loads(line) for line in os.read(read, 1 << 16).splitlines() if line]
        return []

    yield kept, sent
    kept._cluster.end(0.0)
    os.close(read)
    os.close(write)


def test_a_keeper_tells_that_it_has_a_certificate_once_that_is_on_its_disk(
    keeper: tuple[Keeper, Callable[[], list[Any]]], tmp_path: Path, secured: SshHosts
) -> None:
    kept, sent = keeper
    assert kept._key is not None
    assert secured._signer is not None
    answer = secured._signer.answer(kept._key.due(), identities_of("one"), ["192.0.2.7"])
    (tmp_path / "keeper" / "tls").write_text("no room")
    kept._obey({"certified": answer})
    (told,) = sent()
    assert "ca.pem cannot be written" in told["tell"]
    (tmp_path / "keeper" / "tls").unlink()
    kept._obey({"certified": answer})
    assert sent() == [{"has_certificate": True}]


def test_a_keeper_asks_anew_where_its_host_has_another_address(
    keeper: tuple[Keeper, Callable[[], list[Any]]], secured: SshHosts
) -> None:
    kept, sent = keeper
    assert kept._key is not None
    assert secured._signer is not None
    kept._obey({"certified": secured._signer.answer(kept._key.due(), identities_of("one"), ["192.0.2.7"])})
    kept._report()
    assert sent() == [{"has_certificate": True}]
    kept._named, kept._look_s = "interface:192.0.2.8", 0.0
    kept._report()
    ((request, host),) = [message["request"] for message in sent()]
    assert (host, "BEGIN CERTIFICATE REQUEST" in request) == ("192.0.2.8", True)
    kept._report()
    assert sent() == []


def test_a_certificate_that_is_not_for_a_host_s_address_is_refused(certificates: Certificates) -> None:
    credentials = Credentials(certificates.folder(list(OF_A_JOB)))
    credentials.check_host("127.0.0.1")
    credentials.check_host("0:0:0:0:0:0:0:1")
    credentials.check_host("a.name")  # which a wildcard may be for
    with pytest.raises(ConfigurationError, match=r"others connect to 192\.0\.2\.7, and the certificate is for 127"):
        credentials.check_host("192.0.2.7")


def parent_of(pid: int) -> int:
    """Return the parent of a process; of one that a keeper has started, the keeper."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def words_of(pid: int) -> list[str]:
    """Return the command of a process; empty: it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    except OSError:
        return []
