"""A proxied cluster: what children are told, where the links lead as incarnations come and go, and who may be struck.

The children are modules of a few lines. A service listens at two ports, writes its address file and answers each
connection with its first argument, at the second port after "data ".
"""

import errno
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from parashard.chaos import proxied_cluster
from parashard.chaos.proxied_cluster import ProxiedCluster, SmallDisk, check_small, listening_at
from parashard.chaos.proxy import LinkFaults, ProxiedLink, Proxy
from parashard.errors import ConfigurationError
from support.small_mount import NotPermitted, mounted
from support.waiting import DEADLINE_S, eventually

SERVICE = """
import contextlib, json, os, select, socket, sys
listeners = {key: socket.create_server(("127.0.0.1", 0)) for key in ("address", "data_address")}
path = sys.argv[sys.argv.index("--address-file") + 1]
with open(path + ".tmp", "w") as file:
    json.dump({key: "127.0.0.1:%d" % listener.getsockname()[1] for key, listener in listeners.items()}, file)
os.replace(path + ".tmp", path)
while True:
    for listener in select.select(listeners.values(), [], [])[0]:
        accepted, _ = listener.accept()
        with contextlib.suppress(OSError), accepted:
            accepted.sendall(b"data " * (listener is listeners["data_address"]) + sys.argv[1].encode())
"""
TELL = "import json, sys\nprint(json.dumps(sys.argv[1:]))\n"
TELL_ALL = "import json, os, sys\nprint(json.dumps([*sys.argv[1:], os.environ.get('PARASHARD_FAILPOINTS')]))\n"
WAIT = "import signal\nsignal.pause()\n"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children run the modules `service`, `tell`, `tell_all` and `wait`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, source in (("service", SERVICE), ("tell", TELL), ("tell_all", TELL_ALL), ("wait", WAIT)):
        (tmp_path / f"{name}.py").write_text(source)


@pytest.fixture
def ended() -> list[str]:
    """Return a list that names the end of the cluster."""
    return []


@pytest.fixture
def cluster(tmp_path: Path, modules: None, ended: list[str]) -> Iterator[ProxiedCluster]:
    """Return a cluster of two shards and a worker, behind a proxy."""
    with Proxy() as proxy:
        cluster = ProxiedCluster(tmp_path, proxy, 2, 1, lambda: ended.append("before the end"))
        yield cluster
        if not ended:
            cluster.end(0.0)


def told(cluster: ProxiedCluster, name: str, *arguments: str) -> list[str]:
    """Start a child that tells its arguments; return them without the lifeline."""
    cluster.start(name, "tell", arguments)
    os.waitid(os.P_PID, cluster.pid(name), os.WEXITED | os.WNOWAIT)
    cluster.reap()
    words: list[str] = json.loads(cluster.log_path(name).read_text())
    return words[: words.index("--lifeline")]


def answer(address: str) -> str:
    """Return what the server behind an address says; "" if there is none."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
            return connection.recv(100).decode()
    except ConnectionResetError:
        return ""


def is_reset(cluster: ProxiedCluster, link: str, connection: socket.socket) -> bool:
    """Reset a link; tell whether that ended a connection that the proxy may only be about to accept."""
    cluster.reset(link)
    try:
        connection.recv(1)
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
    pytest.fail("a link that holds answers has carried one")


def test_the_links_are_one_to_each_service_and_one_to_the_coordinator_for_each_child(cluster):
    assert cluster.processes == ("coordinator", "shard-0", "shard-1", "worker-0")
    assert sorted(cluster.links) == [
        "coordinator",
        "shard-0",
        "shard-0>coordinator",
        "shard-1",
        "shard-1>coordinator",
        "worker-0>coordinator",
    ]


def test_a_worker_connects_to_the_front_of_its_own_link(cluster):
    words = told(cluster, "worker-0", "--connect", "/runs/1", "--name", "worker-0")
    assert words == ["--connect", words[1], "--name", "worker-0"]
    other = told(cluster, "shard-0", "--connect", "/runs/1")
    assert words[1].startswith("127.0.0.1:")
    assert words[1] != other[1]


def test_a_shard_advertises_its_front_and_reports_its_real_address(cluster, tmp_path):
    words = told(cluster, "shard-1", "--connect", "/runs/1", "--index", "1")
    assert words[2:4] == ["--index", "1"]
    assert (words[4], words[6]) == ("--advertise", "--advertise-data")
    assert words[5] != words[7]
    assert words[8:] == ["--address-file", str(tmp_path / "chaos" / "shard-1.json")]


def test_a_coordinator_advertises_its_link_and_connects_nowhere(cluster, tmp_path):
    words = told(cluster, "coordinator", "--job", "job.toml")
    assert words[:3] == ["--job", "job.toml", "--advertise"]
    assert words[4:] == ["--address-file", str(tmp_path / "chaos" / "coordinator.json")]


def test_a_worker_that_came_later_connects_as_it_was_told(cluster):
    assert told(cluster, "worker-7", "--connect", "/runs/1") == ["--connect", "/runs/1"]


def test_a_link_leads_to_the_present_incarnation_and_nowhere_between_two(cluster, tmp_path):
    words = told(cluster, "shard-0", "first")
    front, data = words[2], words[4]
    file = tmp_path / "chaos" / "shard-0.json"
    assert answer(front) == ""
    for incarnation in ("first", "second"):
        cluster.start("shard-0", "service", [incarnation])
        eventually(file.exists, "it listens")
        assert (answer(front), answer(data)) == (incarnation, f"data {incarnation}")
        assert cluster.signal("shard-0", signal.SIGKILL)
        os.waitid(os.P_PID, cluster.pid("shard-0"), os.WEXITED | os.WNOWAIT)
        cluster.reap()
        assert (answer(front), answer(data)) == ("", "")
    cluster.start("shard-0", "wait", [])
    assert not file.exists()


def test_every_child_reaches_the_coordinator_over_its_own_link(cluster, tmp_path):
    cluster.start("coordinator", "service", ["the coordinator"])
    eventually((tmp_path / "chaos" / "coordinator.json").exists, "it listens")
    fronts = [told(cluster, name, "--connect", "/runs/1")[1] for name in ("shard-0", "shard-1", "worker-0")]
    assert [answer(front) for front in fronts] == ["the coordinator"] * 3


@pytest.mark.parametrize(
    ("content", "address"),
    [
        ('{"address": "127.0.0.1:7"}', ("127.0.0.1", 7)),
        ('{"address": "[::1]:7"}', ("::1", 7)),
        ('{"address": "127.0.0.1:"}', None),
        ("{}", None),
        ("[]", None),
        ("{torn", None),
    ],
)
def test_what_an_address_file_says(content, address, tmp_path):
    assert listening_at(tmp_path / "x.json", "address") is None
    (tmp_path / "x.json").write_text(content)
    assert listening_at(tmp_path / "x.json", "address") == address
    assert listening_at(tmp_path / "x.json", "data_address") is None  # a shard that has no such port


@pytest.mark.parametrize(("link", "fronts"), [("coordinator", [1]), ("shard-1", [1, 3])])
def test_a_link_has_the_faults_that_are_set_and_can_be_reset_on_all_of_its_ways(cluster, tmp_path, link, fronts):
    words = told(cluster, link)
    cluster.start(link, "service", ["here"])
    eventually((tmp_path / "chaos" / f"{link}.json").exists, "it listens")
    for front in (words[index] for index in fronts):
        cluster.set_faults(link, LinkFaults(answers_held=True))
        host, _, port = front.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
            connection.settimeout(0.01)
            eventually(lambda held=connection: is_reset(cluster, link, held), "the connection is reset")
        cluster.set_faults(link, LinkFaults())
        assert answer(front).endswith("here")


def test_what_befalls_a_shards_link_befalls_both_of_its_ways(cluster, monkeypatch):
    suffered: list[tuple[str, LinkFaults]] = []
    monkeypatch.setattr(ProxiedLink, "set_faults", lambda way, faults: suffered.append((way.name, faults)))
    cluster.set_faults("shard-1", LinkFaults(duplicate=True))
    cluster.set_faults("coordinator", LinkFaults(delay_s=1.0))
    assert suffered == [
        ("shard-1", LinkFaults(duplicate=True)),
        ("shard-1 data", LinkFaults(duplicate=True)),
        ("coordinator", LinkFaults(delay_s=1.0)),
    ]


def test_the_field_is_ready_once_every_first_process_runs(cluster):
    for name in cluster.processes:
        assert not cluster.ready()
        cluster.start(name, "wait", [])
    assert cluster.ready()


def test_a_process_may_be_struck_while_it_runs(cluster):
    assert not cluster.signal("worker-0", signal.SIGKILL)
    cluster.start("worker-0", "wait", [])
    assert cluster.signal("worker-0", signal.SIGKILL)
    eventually(lambda: not cluster.signal("worker-0", signal.SIGKILL), "it has ended")
    assert [(child.name, child.reason) for child in cluster.reap()] == [("worker-0", "killed by SIGKILL")]


def test_the_campaign_is_stopped_before_the_children_are_ended(cluster, ended):
    cluster.start("worker-0", "wait", [])
    cluster.end(DEADLINE_S)
    assert ended == ["before the end"]
    assert cluster.running == []


def test_a_stray_has_the_arguments_of_the_service_and_is_told_to_die_once_it_has_claimed(cluster, tmp_path):  # P23
    assert not cluster.stray("shard-0"), "there is no shard yet that it could be a second one of"
    cluster.start("shard-0", "tell_all", ["--index", "0"])
    first = cluster._children["shard-0"]
    assert cluster.stray("shard-0")
    stray_log = cluster.log_path("shard-0-stray")
    eventually(lambda: stray_log.exists() and stray_log.read_text().endswith("]\n"), "a stray", told=lambda: "")
    first.wait()
    *own, faults = json.loads(cluster.log_path("shard-0").read_text())
    *strays, strays_faults = json.loads(stray_log.read_text())
    assert own == strays
    assert faults is None
    assert strays_faults.startswith("shard.boot.claimed=kill@1")


@pytest.fixture
def small() -> Iterator[Path]:
    """Return a folder on a file system of 1 MiB."""
    try:
        with mounted(size_mib=1) as folder:
            yield folder
    except NotPermitted as error:
        pytest.skip(str(error))


def test_it_is_filled_to_its_last_byte_and_given_back(small: Path) -> None:
    check_small(small)
    disk = SmallDisk(small)
    (small / "job.toml").write_text("kept")
    for name in ("one", "two"):
        disk.fill()
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (small / name).write_text("x" * 4096)
        disk.free()
        disk.free()
        (small / name).write_text("x" * 4096)
    assert (small / "job.toml").read_text() == "kept"


def test_a_large_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxied_cluster, "SMALL_BYTES_MAX", 1 << 20)
    with pytest.raises(ConfigurationError, match=r"at most 1 MiB, such as mount -t tmpfs"):
        check_small(tmp_path)


def test_no_more_than_the_bound_is_ever_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxied_cluster, "SMALL_BYTES_MAX", 3 << 20)
    SmallDisk(tmp_path).fill()
    assert (tmp_path / proxied_cluster.FILLER_FILE).stat().st_size == 3 << 20
